"""Writes the keys and values of a step's single rows to their slots, with one copy per layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpic.kernels.upload import upload

_MOST = torch.finfo(torch.float16).max


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in the dtype that keys and values are kept in. Numbers beyond fp16 become its largest."""
    if x.dtype is dtype:
        return x
    kept = x.to(dtype)
    return kept.nan_to_num(float("nan"), _MOST, -_MOST) if dtype is torch.float16 else kept


class RowWrites:
    """The slots of single rows, as rows of ``head_dim`` elements of their common memory.

    Args:
        memory: a contiguous tensor that contains every target.
        rows: the step's rows, in order.
        targets: ``[layers, parts, kv_heads, slots, head_dim]``, the extent that each row is written to. With one part
            the values are the keys, and the keys are written.
        slots: of each row.

    Attributes:
        memory: ``[n, head_dim]``, a view of the given one.
        index: ``[layers, parts * kv_heads * rows]`` int64, the rows of ``memory`` that are written in a layer.
        count: number of single rows.
    """

    def __init__(
        self, memory: torch.Tensor, rows: Sequence[int], targets: Sequence[torch.Tensor], slots: Sequence[int]
    ) -> None:
        layers, parts, heads, _, dim = targets[0].shape
        places = np.array(
            [[t.storage_offset() + slot * t.stride(3), *t.stride()[:3]] for t, slot in zip(targets, slots)]
        )
        if memory.numel() % dim or (places % dim).any() or any(t.stride(3) != dim for t in targets):
            raise ValueError(f"rows of {dim} elements do not lie side by side in the memory")
        first, to_layer, to_part, to_head = (places // dim).T
        steps = [np.arange(n).reshape(-1, *[1] * (3 - axis)) for axis, n in enumerate((layers, parts, heads))]
        index = first + steps[0] * to_layer + steps[1] * to_part + steps[2] * to_head
        table = upload({"index": index.reshape(layers, -1), "rows": np.array(rows)}, memory.device)
        self.memory = memory.view(-1, dim)
        self.index, self._rows, self._parts = table["index"], table["rows"], parts
        self._of_layer, self.count = self.index.unbind(0), len(rows)
        self._numbers = self.index.numpy() if self.index.device.type == "cpu" else self.index

    def advance(self) -> None:
        """Move every row to its next slot."""
        self._numbers += 1  # the memory of ``index``; an operation of torch would take several times as long

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values of ``k, v [kv_heads, T, head_dim]`` of all rows of a step."""
        both = k[None] if self._parts == 1 else torch.stack([k, v])
        if self.count != k.shape[1]:  # otherwise they are all there are, in order
            both = both.index_select(2, self._rows)
        rows = narrowed(both.reshape(-1, both.shape[-1]), self.memory.dtype)
        self.memory.index_copy_(0, self._of_layer[layer], rows)
