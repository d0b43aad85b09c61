"""Modules of our own in the place of a model's, over the same parameters: linear layers that multiply with the kernels
of ``mpic.kernels.products`` where these beat torch, and RMS norms that call torch's own function where it computes the
same.

Written out, as in transformers' models, a norm is eight operations, and a step has two or more in every layer. On a CPU
torch's function gives the same to the last bit, on CUDA, where it adds in another order, to the last digit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from mpic.kernels import products
from mpic.kernels.linear import KernelUnavailable, Product
from mpic.kernels.products import Products

_ROWS = 8
"""Rows that a norm is compared on."""
_ADDED = 1e-5
"""Relative difference of sums in fp32 that are added in another order, at most."""
_MOVED = 1e-3
"""Share of results in half precision that another order may move."""


class KernelLinear(nn.Linear):
    """A linear layer whose products are a kernel's for the numbers of rows for which there is one, where nothing is to
    be differentiated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # ty: ignore[lost-keyword-for-regular-parameter] (nothing names it)
        own: Any = self._parameters  # a module's attributes are slow, and a step calls dozens of these
        weight, bias = own["weight"], own["bias"]
        kernels = self._kernels_for(x, weight)
        if kernels is not None:
            return kernels(x, Product(weight, bias))
        return functional.linear(x, weight, bias)

    def _kernels_for(self, x: torch.Tensor, weight: torch.Tensor) -> Products | None:
        """Return the kernels if one takes these rows. A model may have been moved or converted since it was loaded."""
        if x.dtype is not weight.dtype or not weight.is_cpu or not weight.is_contiguous():
            return None
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return None
        kernels = _kernels(x.dtype)
        inputs = self.in_features
        return kernels if kernels is not None and kernels.takes(x.numel() // inputs, inputs) else None


@functools.cache
def _kernels(dtype: torch.dtype) -> Products | None:
    """Return the kernels for a dtype; None if no kernel takes it."""
    try:
        return products.load(dtype)
    except KernelUnavailable:
        return None


class KernelsUsed(NamedTuple):
    """This says which kernels a model's linear layers multiply with.

    Args:
        few: "cpu-linear", or "torch".
        blocks: the same for blocks of rows: "cpu-linear-tiles", "cpu-linear-widened", or "torch".
        note: why ``few`` is torch; else empty.
        blocks_note: why ``blocks`` does not use the matrix unit that the processor has; else empty.
    """

    few: str = "torch"
    blocks: str = "torch"
    note: str = ""
    blocks_note: str = ""

    @property
    def details(self) -> dict[str, str]:
        """The details of a model (``/health``)."""
        names = {"linear_rows": self.few, "linear_blocks": self.blocks}
        return names | {"few_rows_note": self.note, "linear_blocks_note": self.blocks_note}


def use_kernels(model: nn.Module, text_model: nn.Module) -> KernelsUsed:
    """Replace plain linear layers by ones that use the kernels: those of the decoder and the output projection, and,
    where there is a kernel for blocks of rows, those of the encoders of images."""
    parameter = next(text_model.parameters())
    if parameter.device.type != "cpu":
        return KernelsUsed(note=f"it multiplies on the CPU, not on {parameter.device.type}")
    try:
        kernels = products.load(parameter.dtype)
    except KernelUnavailable as error:
        return KernelsUsed(note=str(error))
    head = cast(Any, model).get_output_embeddings()
    everywhere = model if kernels.blocks is not None else text_model
    candidates = {id(module) for module in (*everywhere.modules(), head)}

    def own(module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.Linear or id(module) not in candidates:
            return None
        plain = type(module.weight) is nn.Parameter  # quantised weights are tensors of their own classes
        fits = plain and module.weight.dtype == parameter.dtype and module.weight.is_contiguous()
        return _over(KernelLinear, module) if fits else None

    _replace(model, own)
    blocks = "torch" if kernels.blocks is None else kernels.blocks.name
    return KernelsUsed(kernels.few.name, blocks, blocks_note=kernels.blocks_note)


class OneCallNorm(nn.Module):
    """A norm that is ``weight * rms_norm(x)``."""

    epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight: Any = self._parameters["weight"]
        return weight * torch.rms_norm(hidden_states, weight.shape, None, self.epsilon)


def use_one_call(text_model: nn.Module) -> None:
    """Has the decoder's RMS norms use torch's function where a trial finds that it computes the same."""
    parameter = next(text_model.parameters())
    if parameter.device.type not in ("cpu", "cuda"):
        return

    def own(module: nn.Module) -> nn.Module | None:
        epsilon = _epsilon(module)
        if epsilon is None or not _is_same(module, epsilon, parameter.dtype):
            return None
        norm = _over(OneCallNorm, module)
        cast(OneCallNorm, norm).epsilon = epsilon
        return norm

    _replace(text_model, own)


def _epsilon(module: nn.Module) -> float | None:
    """Return the epsilon of a module that looks like an RMS norm with a weight; None of others."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or type(weight) is not nn.Parameter or weight.ndim != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.inference_mode()
def _is_same(norm: nn.Module, epsilon: float, dtype: torch.dtype) -> bool:
    """Return whether a norm gives what ``OneCallNorm`` would give, for rows of very different sizes."""
    weight: Any = norm.weight
    rows = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.logspace(-4, 4, _ROWS)[:, None]).to(dtype)
    rows = rows.to(weight.device)
    got, wanted = weight * torch.rms_norm(rows, weight.shape, None, epsilon), norm(rows)
    if got.dtype != wanted.dtype:
        return False
    return torch.equal(got, wanted) if weight.device.type == "cpu" else differs_by_order(got, wanted)


def differs_by_order(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether results differ by no more than sums in fp32 do that are added in another order.

    In half precision such a sum moves few results, by one step each. A norm that rounds at other places moves many.
    """
    step = torch.finfo(got.dtype).eps
    if not torch.allclose(got.float(), wanted.float(), rtol=max(step, _ADDED), atol=0):
        return False
    return got.dtype == torch.float32 or float((got != wanted).float().mean()) < _MOVED


def _over(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """Return a module of our own with the parameters, the hooks and the attributes of a model's."""
    own = kind.__new__(kind)
    own.__dict__.update(module.__dict__)
    return own


def _replace(root: nn.Module, own: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put a module of our own in every place below a root where the model has one that ``own`` gives one for."""
    found: dict[int, nn.Module | None] = {}
    for parent in list(root.modules()):
        for name, module in list(parent._modules.items()):
            if module is not None and id(module) not in found:
                found[id(module)] = own(module)
            if (ours := found.get(id(module))) is not None:
                setattr(parent, name, ours)
