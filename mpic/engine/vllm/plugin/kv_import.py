"""Writes chunks into the paged cache, with keys rotated from their chunk-local positions to those in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpic.engine.vllm.plugin.key_rotation import KeyRotation
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.kernels.attention import rotate


class PagedWrite(NamedTuple):
    """Tokens of a chunk that go into the paged cache.

    Args:
        kv: ``[2, heads, n, head_dim]`` for each of this worker's layers, with its heads only, in host memory: for a GPU
            either one tensor in page-locked memory or tensors mapped from a file.
        tokens: the tokens to write, as a slice or ``[count]`` ascending indices.
        count: number of tokens.
        delta: positions by which their keys move.
        slots: ``[count]`` slots that they are written to.
    """

    kv: Sequence[torch.Tensor]
    tokens: slice | torch.Tensor
    count: int
    delta: int
    slots: torch.Tensor

    @property
    def whole(self) -> bool:
        """True if all of the chunk lies in one contiguous tensor."""
        return isinstance(self.kv, torch.Tensor) and self.kv.is_contiguous()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        _, heads, _, width = self.kv[0].shape
        return 2 * heads * width * self.kv[0].element_size()


def place_on_cpu(paged: PagedCache, rotation: KeyRotation, writes: Sequence[PagedWrite]) -> None:
    """Write chunk tokens of any number of requests into a paged cache in host memory, layer by layer, so that a rotated
    key is still in the CPU cache when it is written."""
    for write in writes:
        turn = rotation.by(write.delta)
        for i, layer in enumerate(paged.layers):
            keys, values = (write.kv[i][half][:, write.tokens] for half in (0, 1))
            if turn is not None:
                keys = rotate(keys, turn)
            paged.write(layer, keys.transpose(0, 1), values.transpose(0, 1), write.slots)
