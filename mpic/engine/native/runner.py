"""A step on the device: pack the scheduled rows of all lanes, run the model once, give back logits."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from mpic.engine.native.lanes import Lane, MappedSpan, Sequence
from mpic.kernels.singles import Singles, padded
from mpic.kernels.spans import SingleRows
from mpic.kernels.stream import Reading
from mpic.kv.gate import Waits
from mpic.kv.pool import Extent, Pool
from mpic.model.hooks import Attend, Layers, Step, Write, layers_of
from mpic.model.loaded import LoadedModel

_KEPT_VIEWS = 16
"""Pieces of one extent whose views are kept; policies cut a chunk in few ways."""


class Slice(NamedTuple):
    """Tokens ``[lo, hi)`` of a lane, to be computed in this step."""

    lane: Lane
    lo: int
    hi: int

    @property
    def wants_logits(self) -> bool:
        return isinstance(self.lane, Sequence) and self.hi == len(self.lane)


class Single(NamedTuple):
    """A row that stands alone: where it is in the step, its own tokens so far, and what it sees besides."""

    row: int
    own: MappedSpan
    spans: list[MappedSpan]


Piece = tuple[Extent, int, int, int]
"""Slots ``[lo, hi)`` of an extent, and how many times a row maps them."""


class Runner:
    """Builds and runs packed forwards."""

    def __init__(self, model: LoadedModel, pool: Pool | None) -> None:
        self.model, self.pool = model, pool

    def run(self, slices: list[Slice], waits: Waits | None = None) -> torch.Tensor:
        """One forward of all slices.

        Every layer writes the rows' keys and values before any row attends, so a link row may see chunks that are
        compiled by other rows of the same step.

        Args:
            waits: every layer waits for the same layer of these loads before any row attends.

        Returns:
            ``[w, vocabulary]`` fp32 on the CPU, one row for each slice that wants logits, in order.
        """
        device = self.model.device
        wanted, starts, total = [], [], 0
        for piece in slices:
            starts.append(total)
            total += piece.hi - piece.lo
            if piece.wants_logits:
                wanted.append(total - 1)
        positions = torch.cat([s.lane.positions[:, s.lo : s.hi] for s in slices], 1).to(device)
        embeds, deepstack = self.inputs(slices, starts)
        step = self._step(slices, starts)
        step.waits = waits
        rows = torch.tensor(wanted, dtype=torch.int64, device=device)
        return self.model.forward(embeds, positions, step, rows, deepstack).cpu()

    @staticmethod
    def _context(piece: Slice) -> int:
        return piece.hi - piece.lane.mapped + sum(span.hi - span.lo for span in piece.lane.spans)

    def inputs(
        self, slices: list[Slice], starts: list[int]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Embeddings ``[T, hidden]`` and, when any row has them, DeepStack features of its rows."""
        ids = torch.tensor([i for s in slices for i in s.lane.ids[s.lo : s.hi]], dtype=torch.int64)
        embeds = self.model.embed(ids).clone()
        mask = torch.zeros(len(ids), dtype=torch.bool)
        features = []
        for piece, offset in zip(slices, starts, strict=True):
            for start, values, deep in piece.lane.pieces:
                lo, hi = max(piece.lo, start), min(piece.hi, start + len(values))
                if lo >= hi:
                    continue
                rows = slice(offset + lo - piece.lo, offset + hi - piece.lo)
                embeds[rows] = values[lo - start : hi - start].to(embeds)
                if deep is not None:
                    mask[rows] = True
                    features.append(deep[:, lo - start : hi - start].to(embeds))
        if not features:
            return embeds, None
        return embeds, (mask.to(embeds.device), torch.cat(features, 1))

    def _step(self, slices: list[Slice], starts: list[int]) -> Step:
        """Blocks of rows attend span by span; rows that stand alone go together, unless the implementation takes whole
        steps and gathers them itself."""
        window = max(self._context(s) for s in slices)
        writes, calls, singles = [], [], []
        for piece, at in zip(slices, starts, strict=True):
            lane, lo, hi = piece
            rows, n, before = slice(at, at + hi - lo), hi - lo, lo - lane.mapped
            view = self.pool.view(lane.extent)
            fresh = layers_of(view, before, before + n)
            writes.append(Write(rows, fresh))
            if n == 1 and self.model.whole is None:
                own = MappedSpan(lane.extent, 0, before + 1, 0, 0)
                singles.append(Single(at, own, [s for s in lane.spans if s.row <= lo]))
                continue
            if n == 1:
                calls.append(Attend(rows, layers_of(view, 0, before + 1), False, None, True))
            else:
                calls.append(Attend(rows, fresh, True, None, True))
                if before:
                    calls.append(Attend(rows, layers_of(view, 0, before), False, None, False))
            for span in lane.spans:
                start = max(lo, span.row)
                if start < hi:
                    seeing = slice(at + start - lo, at + n)
                    calls.append(Attend(seeing, self._piece(span), False, self.model.shift(span.base), False))
        return Step(writes, calls, self.model.partial, window, self._singles(singles) if singles else None)

    def _piece(self, span: MappedSpan) -> Layers:
        """A mapped span's keys and values; immutable, so they are cut once while the extent stays where it is."""
        views = span.extent.views
        found = views.get((span.lo, span.hi))
        if found is None:
            if len(views) >= _KEPT_VIEWS:
                views.clear()
            found = views[span.lo, span.hi] = layers_of(self.pool.view(span.extent), span.lo, span.hi)
        return found

    def _singles(self, singles: list[Single]) -> SingleRows:
        """A span that several requests map is read once, each row with its own rotation. A row that maps a span twice
        reads it twice."""
        readers: dict[Piece, list[tuple[int, int]]] = {}
        for number, (_, own, spans) in enumerate(singles):
            times: Counter[tuple[Extent, int, int]] = Counter()
            for span in (own, *spans):
                piece = (span.extent, span.lo, span.hi)
                times[piece] += 1
                readers.setdefault((*piece, times[piece]), []).append((number, span.base))
        rows = [at for at, _, _ in singles]
        if self.model.stream is None:
            return self._batched(rows, readers)
        spans = [
            Reading(self.pool.stack([extent], lo, hi)[:, :, 0], found)
            for (extent, lo, hi, _), found in readers.items()
        ]
        return self.model.stream.rows(rows, spans, self.model.heads, self.model.shifts)

    def _batched(self, rows: list[int], readers: dict[Piece, list[tuple[int, int]]]) -> Singles:
        """Partials of one span are adjacent, and evenly spaced spans are one batch."""
        batches, stacks = [], []
        partials: list[tuple[int, int]] = []
        slots: list[list[int]] = [[] for _ in rows]
        for run in evenly_spaced(readers):
            _, lo, hi, _ = run[0]
            stacks.append(self.pool.stack([extent for extent, *_ in run], lo, hi))
            batches.append((len(partials), len(run), len(readers[run[0]])))
            for span in run:
                for number, base in readers[span]:
                    slots[number].append(len(partials))
                    partials.append((number, base))
        device = self.model.device
        table, padding = padded(slots, device)
        return Singles(
            torch.tensor(rows, device=device),
            torch.tensor([rows[number] for number, _ in partials], device=device),
            self.model.shifts([base for _, base in partials]),
            table,
            padding,
            tuple(batches),
            tuple(stacks),
            self.model.partial,
        )


def evenly_spaced(readers: dict[Piece, list]) -> list[list[Piece]]:
    """Group equal pieces of equally large extents, read by as many rows each, whose distances in the pool are equal.
    Any two of a kind are evenly spaced."""
    kinds: dict[tuple[int, ...], list[Piece]] = {}
    for span in sorted(readers, key=lambda span: span[0].start):
        kinds.setdefault((span[0].tokens, span[1], span[2], len(readers[span])), []).append(span)
    runs: list[list[Piece]] = []
    for spans in kinds.values():
        runs.append([])
        for span in spans:
            run = runs[-1]
            if len(run) > 1 and span[0].start - run[-1][0].start != run[1][0].start - run[0][0].start:
                runs.append([span])
            else:
                run.append(span)
    return runs
