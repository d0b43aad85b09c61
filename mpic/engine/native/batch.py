"""The content of a step: rows of requests and of chunks that are being compiled, one row per token."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from mpic.kernels.span import Span
from mpic.kv.chunk import ChunkInputs, KVKey
from mpic.kv.pool import Extent
from mpic.model.bidirectional import Scope
from mpic.model.hooks import Observed


class EmbeddedTokens(NamedTuple):
    """Own tokens whose embeddings come from an image or a packet: own indices ``[start, start + n)``."""

    start: int
    embeds: torch.Tensor
    deepstack: torch.Tensor | None


@dataclass(eq=False)
class Rows:
    """Tokens to compute, in sequence order. Token i (``mapped <= i``) lives at slot ``i - mapped`` of ``extent``.

    The first ``computed`` tokens have their KV; the first ``mapped`` of those come from the prefix cache. ``spans`` are
    the chunks' keys that the tokens see besides each other. ``positions [p, tokens or more]`` may have spare columns at
    the end.
    """

    ids: list[int]
    positions: torch.Tensor
    embedded: list[EmbeddedTokens] = field(default_factory=list)
    extent: Any = None  # an Extent while they are admitted
    spans: list[Span[Extent]] = field(default_factory=list)
    mapped: int = 0
    computed: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        """Tokens ``[lo, hi)`` that attend to each other in both directions where the model's layers do; ascending."""
        return ()

    def cut(self, hi: int) -> int:
        """Return the token at which a step that is planned up to ``hi`` has to end. A block is computed in one step,
        so the step ends before a block that it would cut, except that a block at its beginning is computed whole."""
        for lo, end in self.blocks:
            if max(lo, self.computed) < hi < end:
                return lo if lo > self.computed else end
        return hi

    def places(self) -> np.ndarray:
        """Return the index of each token in the prompt, ``[tokens]`` ascending; layers with windows need it."""
        return np.arange(len(self.ids))


@dataclass(eq=False)
class CompileJob(Rows):
    """A chunk that is being compiled behind ``sink`` BOS tokens; its extent is the resident's. ``observed`` keeps the
    queries that its press needs. ``began`` is when it was begun, as ``Tombstones`` count it."""

    resident: Any = None  # a Resident once it is begun
    observed: Observed | None = None
    block: tuple[int, int] | None = None
    began: float = 0.0

    @property
    def user(self) -> str:
        return self.resident.key.owner

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        return () if self.block is None else (self.block,)


def compile_job(inputs: ChunkInputs, sink: int, bos: int, scope: Scope | None = None) -> CompileJob:
    """Return the rows of a chunk that is compiled alone, at positions 0.. (``sink`` BOS tokens first).

    Args:
        scope: the tokens of a prompt that attend to each other in both directions.
    """
    heads = torch.arange(sink).expand(inputs.positions.shape[0], sink)
    positions = torch.cat([heads, inputs.positions + sink], 1)
    embedded = [EmbeddedTokens(sink, inputs.embeds, inputs.deepstack)] if inputs.embeds is not None else []
    ids = [bos] * sink + inputs.token_ids.tolist()
    block = None
    if scope is Scope.PROMPT:
        block = (0, len(ids))
    elif scope is Scope.IMAGE and inputs.embeds is not None:
        block = (sink, len(ids))
    return CompileJob(ids, positions, embedded, block=block)


@dataclass(eq=False)
class CompileRequest:
    """A chunk to compile and save, for no prompt yet. It queues like a request; ``future`` gets its token count."""

    key: KVKey
    inputs: ChunkInputs
    future: Future[int]
    arrived: float

    @property
    def user(self) -> str:
        return self.key.owner


class BatchSlice(NamedTuple):
    """Tokens ``[lo, hi)`` of a request or compile job, computed in one step."""

    rows: Rows
    lo: int
    hi: int

    @property
    def wants_logits(self) -> bool:
        return not isinstance(self.rows, CompileJob) and self.hi == len(self.rows)

    @property
    def is_decoding(self) -> bool:
        """True for a request's last token alone, where it has no embedding of its own."""
        rows, lo, hi = self
        if hi - lo != 1 or not self.wants_logits:
            return False
        embedded = rows.embedded  # ascending, so that most often a look at the last one is enough
        if not embedded or embedded[-1].start + len(embedded[-1].embeds) <= lo:
            return True
        return not any(e.start <= lo < e.start + len(e.embeds) for e in embedded)
