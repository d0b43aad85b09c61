"""The decoder's RMS norms call torch's own function, where it computes exactly the same on the CPU.

Written out, as in transformers' models, a norm is six operations, and a step has two or more in every layer.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from mpic.model.direct_call import DirectCall

_ROWS = 8
"""Rows that a norm is compared on."""


class OneCallNorm(DirectCall):
    """The forward of a norm that is ``weight * rms_norm(x)``. ``one_call_epsilon`` is set together with the class."""

    one_call_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        return weight * torch.rms_norm(hidden_states, weight.shape, None, self.one_call_epsilon)


def use_one_call(text_model: nn.Module) -> None:
    """Has the decoder's RMS norms use torch's function, in place, where a trial finds not a bit of difference."""
    parameter = next(text_model.parameters())
    if parameter.device.type != "cpu":
        return
    for module in text_model.modules():
        epsilon = _epsilon(module)
        if epsilon is not None and _is_same(module, epsilon, parameter.dtype):
            module.one_call_epsilon = epsilon
            module.__class__ = _one_call(type(module))


def _epsilon(module: nn.Module) -> float | None:
    """Returns the epsilon of a module that looks like an RMS norm with a weight; None of others."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or type(weight) is not nn.Parameter or weight.ndim != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.inference_mode()
def _is_same(norm: nn.Module, epsilon: float, dtype: torch.dtype) -> bool:
    """Returns whether a norm gives exactly what ``OneCallNorm`` would give, for rows of very different sizes."""
    weight = norm.weight
    rows = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.logspace(-4, 4, _ROWS)[:, None]).to(dtype)
    got, wanted = weight * torch.rms_norm(rows, weight.shape, None, epsilon), norm(rows)
    return got.dtype == wanted.dtype and torch.equal(got, wanted)


@functools.cache
def _one_call(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a class of norms of a kind with the forward of ``OneCallNorm``."""
    return type(kind.__name__, (OneCallNorm, kind), {"__module__": kind.__module__})
