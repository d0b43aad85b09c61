"""This engine's KV connector for vLLM: two thin sides over ``admission`` (scheduler) and ``runner`` (worker).

Start vLLM with all three of its parts, and without asynchronous scheduling::

    --kv-transfer-config '{"kv_connector": "MPICConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "mpic.engine.vllm.plugin.connector",
        "kv_connector_extra_config": {"folders": ["/var/mpic"]}}'
    --worker-cls mpic.engine.vllm.plugin.worker.LinkWorker
    --scheduler-cls mpic.engine.vllm.plugin.scheduler.LinkScheduler --no-async-scheduling

Settings in ``kv_connector_extra_config``: ``folders`` (absolute; chunk files are read, and compiled chunks written,
below them and nowhere else), ``host_bytes`` (most bytes of chunk KV in host memory), ``patience`` (seconds a link waits
for its files before late chunks are computed), ``readers`` (threads that read files), ``parent`` (a process id: vLLM
ends when that process has ended), ``packet`` (absolute path of the model's adapter, ``mpic.packet.adapter``),
``packet_digest`` (the adapter's digest: with another adapter in that file, vLLM does not start), ``sharing`` (accept
orders whose chunks lie in the paged cache once for all requests, ``shared_chunks``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from mpic.config import ConfigError
from mpic.engine.vllm.plugin.admission import Admission, TrackedRequest
from mpic.engine.vllm.plugin.host_memory import HostMemory
from mpic.engine.vllm.plugin.kv_export import KVExporter
from mpic.engine.vllm.plugin.packet_embedding import adapter_of
from mpic.engine.vllm.plugin.paged_cache import geometry
from mpic.engine.vllm.plugin.step_messages import StepInstructions, StepReport
from mpic.engine.vllm.plugin.watchdog import end_with_parent, leave_interrupts_to
from mpic.kv.expected import Expected
from mpic.model.identity import deepstack_layers

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from mpic.engine.vllm.plugin.runner import LinkRunner

DEFAULTS = {
    "host_bytes": 2 << 30,
    "patience": 5.0,
    "readers": 2,
    "parent": 0,
    "most_rows": 1024,
    "packet": "",
    "packet_digest": "",
    "sharing": False,
}


class MPICConnector(KVConnectorBase_V1, SupportsHMA):
    """Links and compiles chunks inside vLLM; see the module's docstring."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = _settings(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            if settings["parent"]:
                end_with_parent(settings["parent"])
                leave_interrupts_to(settings["parent"])
            model = vllm_config.model_config
            hidden, deepstack = model.hf_text_config.hidden_size, deepstack_layers(model.hf_config)
            adapter = adapter_of(vllm_config)
            expected = Expected(geometry(vllm_config), model.dtype, hidden, deepstack, adapter)
            in_process = vllm_config.parallel_config.distributed_executor_backend == "uni"
            self._host = HostMemory(
                settings["folders"], settings["host_bytes"], settings["readers"], expected, in_process
            )
            self._admission = Admission(
                vllm_config,
                self._host,
                settings["folders"],
                settings["patience"],
                settings["most_rows"],
                0 if adapter is None else len(adapter),
                settings["sharing"],
            )
        else:
            self._exporter = KVExporter()
            self._place_layer: Callable[[int], None] | None = None

    def shutdown(self) -> None:
        if self._role == KVConnectorRole.SCHEDULER:
            self._host.close()
        else:
            self._exporter.close()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._admission.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._admission.arrive(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._admission.claim(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._admission.admitted(request, num_external_tokens)

    def preempted(self, request: Request) -> None:
        """Record that vLLM preempts a request while it looks for blocks."""
        self._admission.preempted(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepInstructions:
        return self._admission.instructions(scheduler_output)

    def executed(self, output: KVConnectorOutput | None) -> dict[str, TrackedRequest]:
        """Record that a step has run; return the requests that end with it, by id."""
        return self._admission.executed(output.kv_connector_worker_meta if output is not None else None)

    def report(self, request: str) -> dict[str, Any] | None:
        """Return the report of a link that keeps generating; None for other requests."""
        return self._admission.report(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._admission.finished(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._admission.released(connector_output.finished_sending or ())

    # the worker's side

    def attach(self, runner: LinkRunner) -> None:
        """Connect the model runner, whose paged cache is exported and whose report is passed on."""
        self._runner = runner
        if not runner.paged.on_cpu:  # on this device vLLM may compile the code that asks for a layer
            self._place_layer = runner.place_layer

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: the runner begins to place chunks while it prepares the step's inputs."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Place a layer of the step's chunks on a GPU. vLLM calls it outside of captured graphs: in a step with links
        no graph has attention in it."""
        if self._place_layer is not None:
            self._place_layer(extract_layer_index(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a compiled chunk is read after its last step (``wait_for_save``)."""

    def wait_for_save(self) -> None:
        self._runner.end_placing()
        for request, export in self._get_connector_metadata().exports.items():
            self._exporter.export(self._runner, request, export)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._exporter.released(finished_req_ids), None

    def build_connector_worker_meta(self) -> StepReport | None:
        report = self._runner.report
        if not (report.placed or report.faults or report.lost):
            return None
        self._runner.report = StepReport()
        return report


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = {**DEFAULTS, **given}
    unknown = set(settings) - {"folders", *DEFAULTS}
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: unknown {sorted(unknown)}")
    folders = settings.get("folders")
    if not isinstance(folders, list | tuple) or not folders:
        raise ConfigError("kv_connector_extra_config: folders must be a list of absolute folders")
    settings["folders"] = [Path(folder) for folder in folders]
    for folder in settings["folders"]:
        if not folder.is_absolute() or not folder.is_dir():
            raise ConfigError(f"kv_connector_extra_config: {folder} is not an absolute folder that exists")
    kinds = {
        "host_bytes": int,
        "patience": int | float,
        "readers": int,
        "parent": int,
        "most_rows": int,
        "packet": str,
        "packet_digest": str,
    }
    if not isinstance(settings["sharing"], bool):
        raise ConfigError(f"kv_connector_extra_config: sharing cannot be {settings['sharing']!r}")
    for name, kind in kinds.items():
        value = settings[name]
        least = name in ("readers", "most_rows")
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is not str and value < least):
            raise ConfigError(f"kv_connector_extra_config: {name} cannot be {value!r}")
    return settings
