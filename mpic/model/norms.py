"""The decoder's RMS norms call torch's own function, where it computes the same: on a CPU to the last bit, on CUDA,
where it adds in another order, to the last digit.

Written out, as in transformers' models, a norm is eight operations, and a step has two or more in every layer.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from mpic.model.direct_call import DirectCall

_ROWS = 8
"""Rows that a norm is compared on."""
_ADDED = 1e-5
"""Relative difference of sums in fp32 that are added in another order, at most."""
_MOVED = 1e-3
"""Share of results in half precision that another order may move."""


class OneCallNorm(DirectCall):
    """The forward of a norm that is ``weight * rms_norm(x)``. ``one_call_epsilon`` is set together with the class."""

    one_call_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        return weight * torch.rms_norm(hidden_states, weight.shape, None, self.one_call_epsilon)


def use_one_call(text_model: nn.Module) -> None:
    """Has the decoder's RMS norms use torch's function, in place, where a trial finds that it computes the same."""
    parameter = next(text_model.parameters())
    if parameter.device.type not in ("cpu", "cuda"):
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
    """Returns whether a norm gives what ``OneCallNorm`` would give, for rows of very different sizes."""
    weight = norm.weight
    rows = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.logspace(-4, 4, _ROWS)[:, None]).to(dtype)
    rows = rows.to(weight.device)
    got, wanted = weight * torch.rms_norm(rows, weight.shape, None, epsilon), norm(rows)
    if got.dtype != wanted.dtype:
        return False
    return torch.equal(got, wanted) if weight.device.type == "cpu" else differs_by_order(got, wanted)


def differs_by_order(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Returns whether results differ by no more than sums in fp32 do that are added in another order.

    In half precision such a sum moves few results, by one step each. A norm that rounds at other places moves many.
    """
    step = torch.finfo(got.dtype).eps
    if not torch.allclose(got.float(), wanted.float(), rtol=max(step, _ADDED), atol=0):
        return False
    return got.dtype == torch.float32 or float((got != wanted).float().mean()) < _MOVED


@functools.cache
def _one_call(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a class of norms of a kind with the forward of ``OneCallNorm``."""
    return type(kind.__name__, (OneCallNorm, kind), {"__module__": kind.__module__})
