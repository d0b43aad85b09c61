"""The model's linear layers multiply with the kernels of ``mpic.kernels.products`` where these beat torch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mpic.kernels import products
from mpic.kernels.linear import KernelUnavailable, Product
from mpic.kernels.products import Products
from mpic.model.direct_call import DirectCall


class KernelLinear(DirectCall, nn.Linear):
    """A linear layer whose products are a kernel's for the numbers of rows for which there is one, where nothing is to
    be differentiated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self._parameters  # a module's attributes are slow, and a step calls dozens of these
        weight, bias = own["weight"], own["bias"]
        kernels = self._kernels_for(x, weight)
        if kernels is not None:
            return kernels(x, Product(weight, bias))
        return functional.linear(x, weight, bias)

    def _kernels_for(self, x: torch.Tensor, weight: torch.Tensor) -> Products | None:
        """Returns the kernels if one takes these rows. A model may have been moved or converted since it was loaded."""
        if x.dtype is not weight.dtype or not weight.is_cpu or not weight.is_contiguous():
            return None
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return None
        kernels = _kernels(x.dtype)
        inputs = self.in_features
        return kernels if kernels is not None and kernels.takes(x.numel() // inputs, inputs) else None


@functools.cache
def _kernels(dtype: torch.dtype) -> Products | None:
    """Returns the kernels for a dtype, or None where there are none."""
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
    """Has the plain linear layers use the kernels, in place: those of the decoder and the output projection, and where
    there is a kernel for blocks of rows those of the encoders of images, too."""
    parameter = next(text_model.parameters())
    if parameter.device.type != "cpu":
        return KernelsUsed(note=f"it multiplies on the CPU, not on {parameter.device.type}")
    try:
        kernels = products.load(parameter.dtype)
    except KernelUnavailable as error:
        return KernelsUsed(note=str(error))
    head = model.get_output_embeddings()
    everywhere = model if kernels.blocks is not None else text_model
    for module in (*everywhere.modules(), *([] if head is None else [head])):
        if type(module) is not nn.Linear:
            continue
        plain = type(module.weight) is nn.Parameter  # quantised weights are tensors of their own classes
        if plain and module.weight.dtype == parameter.dtype and module.weight.is_contiguous():
            module.__class__ = KernelLinear
    blocks = "torch" if kernels.blocks is None else kernels.blocks.name
    return KernelsUsed(kernels.few.name, blocks, blocks_note=kernels.blocks_note)
