"""Entries of the weights that training leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Entries = tuple[torch.nn.Parameter, Any]
"""A parameter, and an index of the entries of it that are held."""


class HeldWeights:
    """Holds entries at the values that they have when it is made: neither gradients nor weight decay move them."""

    def __init__(self, entries: Sequence[Entries] = ()) -> None:
        self._held = [(p, index, p.detach()[index].clone()) for p, index in entries]

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Zeroes the gradients of the held entries, so that an update is made for the others alone."""
        for p, index, _ in self._held:
            if p.grad is not None:
                p.grad[index] = 0

    @torch.no_grad()
    def restore(self) -> None:
        """Writes the held values back."""
        for p, index, values in self._held:
            p[index] = values
