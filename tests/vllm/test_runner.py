"""The mixin of vLLM's model runner, without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mpic.engine.vllm.plugin.runner_v1 import LinkRunnerV1 as LinkRunner


class Platform:
    """Takes the place of vLLM's own runner."""

    def execute_model(self, fail: bool) -> str:
        self._step = "the rows of this step"
        if fail:
            raise RuntimeError("the forward failed")
        return "output"


class Runner(LinkRunner, Platform):
    pass


def test_the_rows_of_a_step_are_gone_when_the_step_ends_however_it_ends():
    runner = Runner()
    assert runner.execute_model(False) == "output" and runner._step is None
    with pytest.raises(RuntimeError):
        runner.execute_model(True)
    assert runner._step is None


class Graphs:
    """As much of vLLM's runner as chooses the graph of a step, with vLLM's own method and dispatcher."""

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


class GraphRunner(LinkRunner, Graphs):
    pass


@pytest.mark.parametrize(
    ("mode", "without", "with_links"),
    [
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"),
        ("FULL", "FULL", "NONE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE", "NONE"),
    ],
)
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
