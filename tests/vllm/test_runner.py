"""The mixins of vLLM's model runners, without an engine around them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mpic.engine.vllm.plugin import worker
from mpic.engine.vllm.plugin.runner_v1 import LinkRunnerV1
from mpic.engine.vllm.plugin.runner_v2 import LinkRunnerV2, WithoutFullGraphs
from mpic.engine.vllm.plugin.scheduler import LinkScheduler
from mpic.errors import ModelRefused


class Platform:
    """Takes the place of vLLM's own runner."""

    cudagraph_manager = None

    def execute_model(self, fail: bool) -> str:
        self._step = "the rows of this step"
        if fail:
            raise RuntimeError("the forward failed")
        return "output"


@pytest.mark.parametrize("links", [LinkRunnerV1, LinkRunnerV2])
def test_the_rows_of_a_step_are_gone_when_the_step_ends_however_it_ends(links):
    runner = type("Runner", (links, Platform), {})()
    assert runner.execute_model(False) == "output" and runner._step is None
    with pytest.raises(RuntimeError):
        runner.execute_model(True)
    assert runner._step is None


class Graphs:
    """The part of vLLM's runner that chooses the graph of a step, with vLLM's own method and dispatcher."""

    _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)
    _determine_batch_execution_and_padding = GPUModelRunner._determine_batch_execution_and_padding
    uniform_decode_query_len = 1

    def __init__(self, mode: CUDAGraphMode) -> None:
        sizes = [1, 2, 4, 8, 16]
        compilation = CompilationConfig(
            mode=3, cudagraph_mode=mode, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=16
        )
        compilation.set_splitting_ops_for_v1("none", 1)
        self.vllm_config = SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=0,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            observability_config=SimpleNamespace(cudagraph_metrics=False),
        )
        self.parallel_config = self.vllm_config.parallel_config
        self.observability_config = self.vllm_config.observability_config
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        self.cudagraph_dispatcher = CudagraphDispatcher(self.vllm_config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode)


class GraphRunner(LinkRunnerV1, Graphs):
    pass


MODES = [
    ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"),
    ("FULL", "FULL", "NONE"),
    ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
    ("NONE", "NONE", "NONE"),
]
"""A mode of graphs, and the graph of a decoding step without and with links."""


@pytest.mark.parametrize(("mode", "without", "with_links"), MODES)
def test_a_step_with_links_uses_no_full_graph_and_keeps_piecewise_ones(mode, without, with_links):
    runner = GraphRunner(CUDAGraphMode[mode])
    dispatcher = runner.cudagraph_dispatcher

    def chosen() -> str:
        found, batch, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=3, num_reqs=3, num_scheduled_tokens_np=np.ones(3, np.int32), max_num_scheduled_tokens=1
        )
        assert batch.num_tokens == (3 if found is CUDAGraphMode.NONE else 4)
        return found.name

    assert chosen() == without
    runner._step = "the rows of this step"
    assert chosen() == with_links and runner.cudagraph_dispatcher is dispatcher
    runner._step = None
    assert chosen() == without


def graphs_of_the_second_runner(mode: str) -> CudaGraphManager:
    """Return the part of vLLM's manager that chooses a graph, with its own lists of the graphs it would have
    captured."""
    manager = CudaGraphManager.__new__(CudaGraphManager)
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16], "max_cudagraph_capture_size": 16}
    manager.__dict__ |= {
        "vllm_config": SimpleNamespace(
            speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False)
        ),
        "compilation_config": SimpleNamespace(**sizes),
        "cudagraph_mode": CUDAGraphMode[mode],
        "max_num_reqs": 16,
        "decode_query_len": 1,
        "varlen_decode": False,
        "ubatch_runner": None,
        "lora_capture_cases": [0],
        "_lora_dispatch_map": {},
        "_candidates": {},
        "_capture_descs": {},
        "_graphs_captured": True,
    }
    manager._init_candidates()
    return manager


class Dispatching:
    """The part of vLLM's second runner that chooses the graph of a step, with vLLM's own manager."""

    def __init__(self, mode: str) -> None:
        self.cudagraph_manager = graphs_of_the_second_runner(mode)
        self._links = {}

    def gather_batch_req_state(self, scheduler_output, dummy_run):
        return None, 1

    def execute_model(self, scheduler_output, dummy_run=False):
        _, uniform = self.gather_batch_req_state(scheduler_output, dummy_run)
        return self.cudagraph_manager.dispatch(3, 3, uniform, num_active_loras=0, max_query_len=1)


class DispatchingRunner(LinkRunnerV2, Dispatching):
    pass


@pytest.mark.parametrize(("mode", "without", "with_links"), [*MODES, ("FULL_DECODE_ONLY", "FULL", "NONE")])
def test_a_step_with_links_uses_no_full_graph_in_the_second_runner_either(mode, without, with_links):
    runner = DispatchingRunner(mode)
    manager = runner.cudagraph_manager
    step = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1, "c": 1})
    assert runner.execute_model(step).cg_mode.name == without
    runner._links = {"another": "a link that is not in this step"}
    assert runner.execute_model(step).cg_mode.name == without
    runner._links = {"b": "a link"}
    found = runner.execute_model(step)
    assert found.cg_mode.name == with_links and runner.cudagraph_manager is manager
    assert found.num_tokens == (3 if with_links == "NONE" else 4)
    assert runner.execute_model(step, dummy_run=True).cg_mode.name == without
    assert WithoutFullGraphs(manager).max_num_reqs == 16


def fitting() -> SimpleNamespace:
    """Return a configuration of vLLM with which links are right, as far as the tests read it."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
            data_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_mm_prefix_lm=False,
            rswa_window=None,
            dtype="torch.bfloat16",
            runner_type="generate",
            enable_prompt_embeds=False,
            hf_config=None,
            hf_text_config=None,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False, get_scheduler_cls=lambda: LinkScheduler),
        kv_transfer_config=SimpleNamespace(kv_connector="MPICConnector"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        lora_config=None,
    )


@pytest.mark.parametrize(
    ("part", "changed", "says"),
    [
        ("parallel_config", {"data_parallel_size": 2}, "data parallelism"),
        ("parallel_config", {"use_ubatching": True}, "micro-batches"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
        ("model_config", {"is_mm_prefix_lm": True}, "in both directions"),
        ("model_config", {"rswa_window": 512}, "R-SWA"),
        ("model_config", {"runner_type": "pooling"}, "that generate"),
        ("scheduler_config", {"async_scheduling": True}, "--no-async-scheduling"),
        ("scheduler_config", {"get_scheduler_cls": lambda: object}, "--scheduler-cls"),
        ("kv_transfer_config", {"kv_connector": "another"}, "MPICConnector"),
        ("cache_config", {"cache_dtype": "fp8"}, "another type"),
    ],
)
def test_what_links_cannot_be_combined_with_is_refused_by_name_when_a_worker_starts(
    monkeypatch, part, changed, says
):
    monkeypatch.setattr(worker, "refuse_on_vllm", lambda *configs: None)
    config = fitting()
    worker.refuse(config)
    vars(getattr(config, part)).update(changed)
    with pytest.raises(ModelRefused, match=says):
        worker.refuse(config)


def test_a_worker_of_another_version_of_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(ModelRefused, match=r"vLLM 0\.34\.0 is installed"):
        worker.refuse(fitting())


@pytest.mark.parametrize(
    ("part", "changed", "says"),
    [
        ("parallel_config", {"world_size": 2}, "several workers"),
        ("model_config", {"dtype": torch.bfloat16}, "float32"),
    ],
)
def test_what_chunks_are_not_shared_with_is_refused_by_name_when_a_worker_starts(part, changed, says):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1), model_config=SimpleNamespace(dtype=torch.float32)
    )
    worker.refuse_sharing(config)
    vars(getattr(config, part)).update(changed)
    with pytest.raises(ModelRefused, match=f"{says}.*vllm_sharing"):
        worker.refuse_sharing(config)
