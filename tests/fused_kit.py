"""Models whose steps are fused, for the tests of these."""

from __future__ import annotations

import pytest
import torch
from families import make_model

from mpic.kernels import c_kernel, linear
from mpic.model.loaded import LoadedModel
from mpic.model.program_proof import use_program

DTYPES = [torch.float32, torch.bfloat16]
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "llava": {},
    "qwen2_vl": {},
}
try:
    for _dtype in DTYPES:
        linear.load(_dtype)
    AVAILABLE = True
except c_kernel.KernelUnavailable:
    AVAILABLE = False
needs_fused = pytest.mark.skipif(
    not AVAILABLE, reason="no C compiler, or a processor on which torch is as fast"
)


def loaded_model(name="llama", dtype=torch.float32, text=None, model=None, kv_dtype=None):
    model = make_model(name, text=text)[0] if model is None else model
    with torch.no_grad():
        for parameter in model.parameters():  # else biases are zero, and weights of norms one
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) / 3)
    loaded = LoadedModel(model.to(dtype), None, name, kv_dtype)
    use_program(loaded)
    return loaded
