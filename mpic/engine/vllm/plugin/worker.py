"""vLLM's workers with links: the platform's own worker, with a ``LinkRunner`` mixed into its model runner.

Settings under which answers would be wrong are refused when the engine starts.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from mpic.engine.vllm.plugin.packet_embedding import adapter_of, install
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.scheduler import LinkScheduler
from mpic.engine.vllm.plugin.selftest import self_test
from mpic.engine.vllm.plugin.watchdog import end_with_parent, leave_interrupts_to
from mpic.engine.vllm.wire import unknown_version
from mpic.errors import ModelRefused
from mpic.model.refusals import refuse_on_vllm

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

    from mpic.engine.vllm.plugin import span_attention
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class LinkWorker(PlatformWorker):
    """The class for ``--worker-cls``, on CPU and GPU.

    Raises:
        ModelRefused: raised at start for settings under which links are not known to be right.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        refuse(vllm_config)
        self._sharing = bool(vllm_config.kv_transfer_config.kv_connector_extra_config.get("sharing"))
        if self._sharing:
            refuse_sharing(vllm_config)
        if current_platform.is_cpu():
            span_attention.register(self._sharing)
        if vllm_config.kv_transfer_config.kv_connector_extra_config.get("parent"):
            end_with_parent(os.getppid())  # nothing else would end a worker that waits in a collective
            leave_interrupts_to(os.getppid())
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        if self._sharing and self.use_v2_model_runner:
            raise ModelRefused(
                "sharing chunks in vLLM: its first model runner is needed (VLLM_USE_V2_MODEL_RUNNER=0)"
            )
        # vLLM's runners are made in different methods of its CPU and GPU workers; both are whole by now
        if self.use_v2_model_runner:
            from mpic.engine.vllm.plugin.runner_v2 import LinkRunnerV2 as LinkRunner
        else:
            from mpic.engine.vllm.plugin.runner_v1 import LinkRunnerV1 as LinkRunner
        runner = type(self.model_runner)
        self.model_runner.__class__ = type(f"Link{runner.__name__}", (LinkRunner, runner), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        adapter = adapter_of(self.vllm_config)
        if adapter is not None and get_pp_group().is_first_rank:  # other pipeline stages have no embeddings
            install(self.model_runner.language_model, adapter)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        block = _only_full_attention(kv_cache_config, self.vllm_config)
        super().initialize_from_config(kv_cache_config)
        runner, connector = self.model_runner, get_kv_transfer_group()
        if connector._vllm_config is not self.vllm_config:
            raise ModelRefused("another engine in this process holds vLLM's KV connector; shut it down first")
        if len(runner.attn_groups) != 1 or len(runner.attn_groups[0]) != 1:
            raise ModelRefused("its layers use several attention backends")
        if runner.attn_groups[0][0].get_metadata_builder().reorder_batch_threshold is not None:
            raise ModelRefused("its attention backend sorts decodes in front of prefills")
        backends = {group.backend.get_name() for group in runner.attn_groups[0]}
        context = self.compilation_config.static_forward_context
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            # vLLM makes these while it warms up, which its CPU worker skips when it does not compile
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        runner.enable_links(PagedCache.of(self.vllm_config, context, block, backends))
        if self._sharing and not all(map(span_attention.is_ours, runner.paged.attention)):
            raise ModelRefused(
                "sharing chunks in vLLM: its layers have another attention; switch vllm_sharing off"
            )
        self_test(runner, self._sharing)
        connector.attach(runner)

    def key_rotation(self) -> tuple[list[float], bool]:
        """Return the rotary frequencies by which keys move, and whether neighbouring dimensions rotate together."""
        rotation = self.model_runner.rotation
        return rotation.frequencies.tolist(), rotation.interleaved


def refuse(config: VllmConfig) -> None:
    """Raise ModelRefused for settings, and versions of vLLM, that links cannot be combined with."""
    if reason := unknown_version(vllm.__version__):
        raise ModelRefused(reason)
    parallel, model, scheduler = config.parallel_config, config.model_config, config.scheduler_config
    cls = scheduler.get_scheduler_cls()
    reasons = {
        "it needs MPICConnector (--kv-transfer-config)": config.kv_transfer_config is None
        or config.kv_transfer_config.kv_connector != "MPICConnector",
        "it needs --scheduler-cls mpic.engine.vllm.plugin.scheduler.LinkScheduler": not issubclass(
            cls, LinkScheduler
        ),
        "it needs --no-async-scheduling": bool(scheduler.async_scheduling),
        "speculative decoding is not supported": config.speculative_config is not None,
        "context parallelism is not supported": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "micro-batches are not supported": bool(parallel.use_ubatching),
        "data parallelism is not tested": parallel.data_parallel_size > 1,
        "images that attend to themselves in both directions are not supported": bool(model.is_mm_prefix_lm),
        "its attention windows (R-SWA) are not supported": model.rswa_window is not None,
        "KV in another type than the model's is not supported": config.cache_config.cache_dtype
        not in ("auto", str(model.dtype).removeprefix("torch.")),
        "only models that generate are supported": model.runner_type != "generate",
        "prompt embeddings are not supported": bool(model.enable_prompt_embeds),
        "LoRA adapters are not supported": config.lora_config is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelRefused(f"linking in vLLM: {reason}")
    refuse_on_vllm(model.hf_config, model.hf_text_config)


def refuse_sharing(config: VllmConfig) -> None:
    """Raise ModelRefused for settings with which chunks are not shared yet (``shared_chunks``)."""
    reasons = {
        "only the CPU build has its attention": not current_platform.is_cpu(),
        "several workers are not supported": config.parallel_config.world_size > 1,
        "the model must run in float32": config.model_config.dtype != torch.float32,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelRefused(f"sharing chunks in vLLM: {reason}; switch vllm_sharing off")


def _only_full_attention(cache: KVCacheConfig, config: VllmConfig) -> int:
    """Return the tokens of a block, if there is one KV cache group of full attention layers."""
    groups = cache.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise ModelRefused(f"linking in vLLM: one group of full attention layers is needed, not {kinds}")
    spec = groups[0].kv_cache_spec
    if spec.sliding_window is not None and spec.sliding_window < config.model_config.max_model_len:
        raise ModelRefused(
            f"linking in vLLM: its attention window has {spec.sliding_window} tokens; set max_model_len to it"
        )
    return spec.block_size
