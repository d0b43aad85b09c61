"""Chooses the dtype that a model is loaded in when nobody has asked for one (``dtype = auto``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from mpic.kernels.c_kernel import why_no_unit
from mpic.model.checkpoint import stored_dtype

FULL, HALF = "float32", "bfloat16"


class DtypeChoice(NamedTuple):
    """A dtype by its name, and what an operator is told about it; empty: nothing."""

    name: str
    note: str = ""


def own_dtype(path: str, config: PretrainedConfig, cache: str | None = None) -> str:
    """Return the dtype of a checkpoint: of its configuration, at the top or, as for Qwen3-VL, in a part of it, else of
    its weights.

    Args:
        path, cache: see ``mpic.model.checkpoint.streamed_digest``.
    """
    for part in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        dtype = getattr(part, "dtype", None)
        if dtype is not None:
            return str(dtype).removeprefix("torch.")
    return stored_dtype(path, cache) or FULL


def dtype_on_cpu(
    own: str, *, kv_dtype: str = "auto", quantize: bool = False, packed: bool = False
) -> DtypeChoice:
    """Return what ``auto`` means on a CPU: bfloat16 if the checkpoint has it and the processor has a matrix unit for
    it, or with weights that are quantised here, whose kernels want it; else float32.

    With a matrix unit (AMX) bfloat16 is faster in every case of ``mpic bench dtype``. Where a processor has no more
    than products of pairs (AVX-512 BF16), prefills in it may take longer than in float32.

    Args:
        own: the checkpoint's dtype (``own_dtype``).
        kv_dtype: of the keys and values, if not the model's: that is an option of float32 models.
        quantize: the weights are quantised when they are loaded.
        packed: they are quantised in the checkpoint.
    """
    if quantize:
        return DtypeChoice(HALF)
    if kv_dtype != "auto" or packed or why_no_unit():
        return DtypeChoice(FULL)
    if own == HALF:
        return DtypeChoice(
            HALF, "bfloat16, as in its files, because this processor is faster in it; else --dtype float32"
        )
    return DtypeChoice(
        FULL, "this processor multiplies bfloat16 faster, with 8 significant bits: --dtype bfloat16"
    )


def dtype_for_results(dtype: str, device: torch.device, quantize: str = "") -> str:
    """Return the dtype in which answers are compared and adapters trained: on a CPU ``auto`` is float32, whatever the
    processor is fast at, so that results of different machines can be compared."""
    return FULL if dtype == "auto" and device.type == "cpu" and not quantize else dtype
