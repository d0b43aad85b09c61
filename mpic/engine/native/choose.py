"""Chooses what runs the steps of a model, once: its attention when it is loaded, and the executor of an engine."""

from __future__ import annotations

import logging

import torch

from mpic.engine.native.cpu_executor import CpuExecutor
from mpic.engine.native.cuda_executor import CudaExecutor
from mpic.engine.native.executor import TorchExecutor
from mpic.errors import ModelRefused
from mpic.kv.pool import Pool
from mpic.model.loaded import LoadedModel
from mpic.model.program import NOT_STREAM, NOTE
from mpic.model.selftest import self_test

log = logging.getLogger(__name__)


def executor_for(
    model: LoadedModel, pool: Pool, budget: int, max_running: int, cuda_graphs: str
) -> TorchExecutor:
    """Return the executor that serves a model best, and say what it does and why.

    Args:
        budget: the most rows of a step.
        max_running: the most requests of a batch.
        cuda_graphs: ``on``, ``off``, or ``auto``; ``on`` demands an executor of CUDA's, on any device (for tests).

    Raises:
        ModelRefused: ``cuda_graphs`` is ``on``, and steps cannot be captured.
    """
    executor: TorchExecutor
    if model.device.type == "cuda" or cuda_graphs == "on":
        executor = CudaExecutor(model, pool, budget, max_running, cuda_graphs)
        why = f"cuda_graphs = {cuda_graphs}"
    elif model.program is not None and model.streams and model.triton is None:
        executor = CpuExecutor(model, pool, model.program)
        why = "it is proved to compute what the modules do"
    else:
        executor = TorchExecutor(model, pool)
        if model.program is not None:
            model.info.details[NOTE] = NOT_STREAM
        why = model.info.details.get(NOTE) or f"on {model.device}"
    model.info.details["executor"] = f"{executor.what}, {model.attention_name} attends ({why})"
    log.info("%s: %s", model.info.name, model.info.details["executor"])
    return executor


def choose_attention(model: LoadedModel, name: str) -> None:
    """Select the attention of a model that has passed its self-test with torch's, and has it pass with the selected.

    ``auto`` is Triton's for a model in half precision on CUDA: on an H100 a link over ten images had its first token 4
    times sooner with it than with torch's (``docs/gpu.md``). Where Triton does not take the model, torch's serves it.

    Raises:
        ModelRefused: the attention was asked for by name, and does not run here or gives other results.
    """
    if name == "auto" and (model.device.type != "cuda" or model.dtype is torch.float32):
        return
    try:
        model.choose_attention("triton" if name == "auto" else name)
        self_test(model)
    except ModelRefused as error:
        if name != "auto":
            raise
        log.warning("torch's attention serves instead of Triton's, several times slower: %s", error.message)
        model.choose_attention("auto")
        model.info.details["attention_note"] = error.message


def graphs_beside(attention: str, cuda_graphs: str) -> str:
    """Return the choice of CUDA graphs beside an attention: ``auto`` captures nothing where another one than Triton's
    was asked for."""
    if cuda_graphs == "auto" and attention not in ("auto", "triton"):
        log.info("attention %s was asked for, so steps are not captured", attention)
        return "off"
    return cuda_graphs
