"""The layers of a Llama-like decoder for blocks of rows on the CPU: products (``products.py``), and between them
``decoder.c``.

Written as modules, a layer has about twenty operations between its products, each of which reads and writes all rows,
most of them into new memory: a sixth of the time of a prompt of 512 tokens (12 layers x 768). Here these are a few
calls, on memory that is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

import torch

from mpic.kernels.decoder import DecoderKernel, DecoderLayers, PassStruct

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, q [heads, T, head_dim], k [kv_heads, T, head_dim], v) -> [T, heads, head_dim]``, fp32 or the model's dtype;
queries and keys are rotated, and keys and values are in their places if these were given."""

_KEPT_ROWS = 1024
"""Rows for which memory is kept from step to step: a larger step computes so long that allocating it does not count."""


class BlockPart(IntEnum):
    """A part of a layer that stands between products (``between`` of decoder.c)."""

    BEFORE_ATTENTION = 0
    HEADS = 1
    BEFORE_GATE = 2
    ACTIVATION = 3
    LAST = 4


class BlockLayers:
    """The layers of one model for steps of any rows.

    Args:
        kernel: has made ``layers``.
    """

    def __init__(self, kernel: DecoderKernel, layers: DecoderLayers) -> None:
        self._function, self._products = kernel.between, kernel.products
        self._layers = layers
        self._memory = threading.local()  # a step may wait for loads, and others must not wait with it

    def __call__(
        self,
        state: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        places: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Runs all layers. Behind the attention of the last one only the rows whose results are wanted are computed.

        Args:
            state: ``[T, hidden]``, the inputs of the first layer; overwritten.
            cosine, sine: ``[T, half]`` fp32, of the rows' positions.
            places: ``[T, 4]`` int64, where a row's keys and values go: address in layer 0 and key head 0 (0: nowhere),
                and the distances to the next layer, from keys to values and to the next head, in numbers.
            attend: computes a layer's attention.
            wanted: ``[w]`` int64, the rows whose results are wanted.

        Returns:
            ``[w, hidden]`` behind the last norm.

        Raises:
            ValueError: tensors of other sizes, dtypes or layouts.
        """
        count, layers = len(state), self._layers
        fits = layers.takes(state, cosine, sine) and places.shape == (count, 4)
        if not fits or places.dtype is not torch.int64 or not places.is_contiguous():
            raise ValueError(f"cpu-decoder cannot run a step of {tuple(state.shape)} {state.dtype}")
        room = self._room(count)
        this = PassStruct(rows=count, threads=torch.get_num_threads())
        _point(this, {"state": state, "cosine": cosine, "sine": sine, "places": places, **room})
        heads = [
            room[name].view(count, -1, layers.head_dim).transpose(0, 1) for name in ("query", "key", "value")
        ]
        last = len(layers.weights.layers) - 1
        for layer in range(last + 1):
            attended = self._attended(layer, this, room, heads, attend)
            if layer == last and len(wanted) < count:
                state, attended = state[wanted], attended[wanted]
                room = {name: memory[: len(wanted)] for name, memory in room.items()}
                this.rows = len(wanted)
                _point(this, {"state": state})
            if this.rows:
                self._behind_attention(layer, this, room, attended)
        out = torch.empty_like(state)
        if this.rows:
            _point(this, {"out": out})
            self._between(this, BlockPart.LAST, last)
        return out if len(wanted) < count else out[wanted]

    def _attended(
        self,
        layer: int,
        this: PassStruct,
        room: dict[str, torch.Tensor],
        heads: list[torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Computes a layer up to its attention, whose results it returns: ``[T, heads * head_dim]``."""
        weights = self._layers.weights.layers[layer]
        self._between(this, BlockPart.BEFORE_ATTENTION, layer)
        projections = [weights.query, weights.key, weights.value]
        self._products.into(room["normed"], projections, [room[name] for name in ("query", "key", "value")])
        self._between(this, BlockPart.HEADS, layer)
        return attend(layer, *heads).reshape(this.rows, -1).to(self._layers.dtype)

    def _behind_attention(
        self, layer: int, this: PassStruct, room: dict[str, torch.Tensor], attended: torch.Tensor
    ) -> None:
        """Computes the rest of a layer for ``this.rows`` rows, whose state it changes, from what they have attended to,
        ``[rows, heads * head_dim]``; ``room`` has memory for as many."""
        weights, multiply = self._layers.weights.layers[layer], self._products.into
        multiply(attended, [weights.output], [room["product"]])
        self._between(this, BlockPart.BEFORE_GATE, layer)
        multiply(room["normed"], [weights.gate, weights.up], [room["gate"], room["up"]])
        self._between(this, BlockPart.ACTIVATION, layer)
        multiply(room["gate"], [weights.down], [room["product"]])

    def _between(self, this: PassStruct, part: BlockPart, layer: int) -> None:
        self._function(self._layers.struct, this, part, layer)

    def _room(self, count: int) -> dict[str, torch.Tensor]:
        """Returns memory for ``count`` rows."""
        if count > _KEPT_ROWS:
            return self._layers.room(count)
        kept: dict[str, torch.Tensor] | None = getattr(self._memory, "room", None)
        if kept is None or len(kept["normed"]) < count:
            kept = self._memory.room = self._layers.room(count)
        return {name: memory[:count] for name, memory in kept.items()}


def _point(this: PassStruct, tensors: dict[str, torch.Tensor]) -> None:
    """Has a step work on these tensors."""
    for name, tensor in tensors.items():
        setattr(this, name, tensor.data_ptr())
