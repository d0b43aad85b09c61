"""A link in the model runner: the tokens it computes, the chunks it places or maps in the paged cache, its positions
and embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpic.engine.vllm.plugin.key_rotation import KeyRotation
from mpic.engine.vllm.plugin.kv_import import PagedWrite
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.step_messages import LinkStart, PlacedChunk, SharedStart
from mpic.kernels.paged_spans import MappedSpan
from mpic.link import Ranges


class PlacedPrompt:
    """A prompt that contains chunks.

    Attributes:
        length: number of its tokens.
        computed: ``[S]`` places of the computed tokens in the prompt, ascending.
        chunks: see ``step_messages``.
        shared: True for a ``SharedLink``.
    """

    shared = False

    def __init__(self, length: int, rows: Ranges, chunks: Sequence[PlacedChunk]) -> None:
        self.length, self.chunks = length, tuple(chunks)
        self.computed = np.concatenate([np.arange(lo, hi) for lo, hi in rows])
        for one in self.chunks:
            one.chunk.given_inputs()

    def positions(self) -> tuple[torch.Tensor, int]:
        """Return the M-RoPE positions ``[3, N]`` of the prompt, and the difference between a later token's position
        and its sequence index (0 or less)."""
        parts, end, base = [], 0, 0
        for one in self.chunks:
            inputs = one.chunk.given_inputs()
            start = base + one.start - end
            parts += [torch.arange(base, start).expand(3, -1), inputs.positions.expand(3, -1) + start]
            end, base = one.start + one.length, start + inputs.rotary_length
        parts.append(torch.arange(base, base + self.length - end).expand(3, -1))
        return torch.cat(parts, 1), base - end

    def embeddings(self, tokens: np.ndarray) -> tuple[np.ndarray, list[torch.Tensor]]:
        """Return a mask of the sequence indices ``tokens`` that belong to images, and their embeddings ``[n, width]``
        in order, each followed by its DeepStack features as in the output of the model's encoder."""
        image, parts = np.zeros(len(tokens), bool), []
        for one in self.chunks:
            lo, hi = np.searchsorted(tokens, (one.start, one.start + one.length))
            inputs = one.chunk.given_inputs() if lo < hi else None
            if inputs is None or inputs.embeds is None:
                continue
            image[lo:hi] = True
            index = torch.from_numpy(tokens[lo:hi] - one.start)
            rows = [inputs.embeds[index]]
            if inputs.deepstack is not None:
                rows += list(inputs.deepstack[:, index])
            parts.append(torch.cat(rows, -1))
        return image, parts


class SharedLink(PlacedPrompt):
    """A link that maps resident chunks, until its request ends. vLLM sees only its own tokens as the sequence.

    Attributes:
        spans: the mapped tokens, in the form that attention takes.
        behind: difference between the prompt's length and the number of own tokens, by which an answer's tokens stand
            later in the prompt than in vLLM's sequence.
    """

    shared = True

    def __init__(self, start: SharedStart, rotation: KeyRotation) -> None:
        super().__init__(start.length, start.rows, start.chunks)
        self.spans = [
            MappedSpan(np.array(span.blocks, np.int32), span.lo, span.hi, span.row, rotation.by(-span.base))
            for span in start.spans
        ]
        self.behind = start.length - len(self.computed)

    def tokens(self, lo: int, hi: int) -> np.ndarray:
        """Return the places of the scheduled tokens from ``lo`` to ``hi``."""
        own = len(self.computed)
        return np.concatenate([self.computed[lo:hi], np.arange(max(lo, own), hi) + self.behind])

    def own_positions(self) -> tuple[torch.Tensor, int]:
        """Return the M-RoPE positions ``[3, S]`` of the own tokens, and the difference between a later token's position
        and its index in vLLM's sequence."""
        positions, difference = self.positions()
        return positions[:, torch.from_numpy(self.computed)], difference + self.behind


class ActiveLink(PlacedPrompt):
    """A link whose prompt is not fully computed yet.

    Attributes:
        frontier: sequence index up to which all chunks are placed.
        seconds: time spent on placing its chunks.
    """

    def __init__(self, start: LinkStart, paged: PagedCache) -> None:
        super().__init__(start.length, start.rows, start.chunks)
        self.frontier, self.seconds = start.hit, 0.0
        mapped = np.ones(start.length, bool)
        mapped[self.computed] = False
        self._mapped = mapped
        self._kv = {
            i: one.chunk.slice_kv(paged.layers, paged.heads)
            for i, one in enumerate(start.chunks)
            if mapped[max(one.start, start.hit) : one.start + one.length].any()
        }

    def tokens(self, lo: int, hi: int) -> np.ndarray:
        """Return the sequence indices to compute for the scheduled tokens from ``lo`` to ``hi``; after the prompt the
        two are the same."""
        first = len(self.computed) - self.length
        return np.concatenate([self.computed[lo + first : hi + first], np.arange(max(lo, self.length), hi)])

    def advance(self, frontier: int, blocks: torch.Tensor, paged: PagedCache) -> list[PagedWrite]:
        """Return the chunk tokens that must be placed before a step that reaches ``frontier``."""
        lo, hi = self.frontier, min(frontier, self.length)
        self.frontier = max(lo, hi)
        writes = []
        for i, kv in self._kv.items():
            one = self.chunks[i]
            first, last = max(lo, one.start), min(hi, one.start + one.length)
            indices = first + np.flatnonzero(self._mapped[first:last]) if first < last else ()
            if not len(indices):
                continue
            tokens: slice | torch.Tensor = slice(indices[0] - one.start, indices[-1] + 1 - one.start)
            if len(indices) <= indices[-1] - indices[0]:
                tokens = torch.from_numpy(indices - one.start)
            slots = paged.slots(blocks, torch.from_numpy(indices))
            writes.append(PagedWrite(kv, tokens, len(indices), one.base - one.chunk.sink, slots))
        return writes
