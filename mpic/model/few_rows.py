"""The decoder's linear layers multiply few rows with a kernel made for them (``mpic.kernels.linear``)."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from mpic.kernels import linear
from mpic.kernels.linear import KernelUnavailable
from mpic.model.direct_call import DirectCall


class FewRowsLinear(DirectCall, nn.Linear):
    """A linear layer whose products of few rows are the kernel's, where nothing is to be differentiated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self._parameters  # a module's attributes are slow, and a step calls dozens of these
        weight, bias = own["weight"], own["bias"]
        if self._is_few(x, weight):
            return linear.load(x.dtype)(x, weight, bias)
        return functional.linear(x, weight, bias)

    def _is_few(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Returns whether the kernel takes these rows. A model may have been moved or converted since it was loaded."""
        if x.dtype is not weight.dtype or not weight.is_cpu or not weight.is_contiguous():
            return False
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return False
        return x.numel() <= _most_rows(x.dtype) * self.in_features


@functools.cache
def _most_rows(dtype: torch.dtype) -> int:
    """Returns the most rows that the kernel takes, 0 where there is none for the dtype."""
    try:
        return linear.load(dtype).most_rows
    except KernelUnavailable:
        return 0


def use_few_rows(model: nn.Module, text_model: nn.Module) -> str:
    """Has the decoder's plain linear layers and the output projection use the kernel, in place.

    Returns:
        Empty, or why none of them does.
    """
    parameter = next(text_model.parameters())
    if parameter.device.type != "cpu":
        return f"it multiplies on the CPU, not on {parameter.device.type}"
    try:
        linear.load(parameter.dtype)
    except KernelUnavailable as error:
        return str(error)
    head = model.get_output_embeddings()
    for module in (*text_model.modules(), *([] if head is None else [head])):
        if type(module) is not nn.Linear:
            continue
        plain = type(module.weight) is nn.Parameter  # quantised weights are tensors of their own classes
        if plain and module.weight.dtype == parameter.dtype and module.weight.is_contiguous():
            module.__class__ = FewRowsLinear
    return ""
