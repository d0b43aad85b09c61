"""A step on the device: pack the scheduled rows of all lanes, run the model once, give back logits."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from mpic.engine.native.lanes import Lane, MappedSpan, Sequence
from mpic.kernels.spans import Shift
from mpic.kv.pool import Pool
from mpic.model.hooks import Attend, Step, Write
from mpic.model.loaded import LoadedModel


class Slice(NamedTuple):
    """Tokens ``[lo, hi)`` of a lane, to be computed in this step."""

    lane: Lane
    lo: int
    hi: int

    @property
    def wants_logits(self) -> bool:
        return isinstance(self.lane, Sequence) and self.hi == len(self.lane)


class Runner:
    """Builds and runs packed forwards."""

    def __init__(self, model: LoadedModel, pool: Pool) -> None:
        self.model, self.pool = model, pool

    def run(self, slices: list[Slice]) -> torch.Tensor:
        """One forward of all slices.

        Every layer writes the rows' keys and values before any row attends, so a link row may see chunks that are
        compiled by other rows of the same step.

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
        embeds, deepstack = self._inputs(slices, starts)
        step = Step(
            self._writes(slices, starts),
            self._calls(slices, starts),
            self.model.partial,
            window=max(self._context(s) for s in slices),
        )
        rows = torch.tensor(wanted, dtype=torch.int64, device=device)
        return self.model.forward(embeds, positions, step, rows, deepstack).cpu()

    @staticmethod
    def _context(piece: Slice) -> int:
        return piece.hi + sum(span.hi - span.lo for span in piece.lane.spans)

    def _inputs(
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

    def _writes(self, slices: list[Slice], starts: list[int]) -> list[Write]:
        return [
            Write(slice(at, at + s.hi - s.lo), self.pool.view(s.lane.extent), s.lo - s.lane.mapped)
            for s, at in zip(slices, starts, strict=True)
        ]

    def _calls(self, slices: list[Slice], starts: list[int]) -> list[Attend]:
        calls: list[Attend] = []
        shared: dict[tuple[int, int, int, int], list[tuple[int, MappedSpan]]] = {}
        for (lane, lo, hi), at in zip(slices, starts, strict=True):
            rows = slice(at, at + hi - lo)
            view, before = self.pool.view(lane.extent), lo - lane.mapped
            if hi - lo == 1:
                calls.append(Attend(rows, view, 0, before + 1, False, None, True))
                times: Counter[tuple[int, int, int]] = (
                    Counter()
                )  # a chunk linked twice needs two calls for its row
                for span in lane.spans:
                    if span.row <= lo:
                        piece = (id(span.extent), span.lo, span.hi)
                        times[piece] += 1
                        shared.setdefault((*piece, times[piece]), []).append((at, span))
                continue
            calls.append(Attend(rows, view, before, before + hi - lo, True, None, True))
            if before:
                calls.append(Attend(rows, view, 0, before, False, None, False))
            for span in lane.spans:
                start = max(lo, span.row)
                if start < hi:
                    seeing = slice(at + start - lo, at + hi - lo)
                    shift = self.model.shift(span.base)
                    calls.append(
                        Attend(seeing, self.pool.view(span.extent), span.lo, span.hi, False, shift, False)
                    )
        calls += [self._shared_call(group) for group in shared.values()]
        return calls

    def _shared_call(self, group: list[tuple[int, MappedSpan]]) -> Attend:
        """Single rows of several requests that see the same piece read it together, each with its own rotation."""
        first = group[0][1]
        view = self.pool.view(first.extent)
        if len(group) == 1:
            at = group[0][0]
            return Attend(
                slice(at, at + 1), view, first.lo, first.hi, False, self.model.shift(first.base), False
            )
        rows = torch.tensor([at for at, _ in group], device=self.model.device)
        shifts = [self.model.shift(span.base) for _, span in group]
        known = next((s for s in shifts if s is not None), None)
        if known is None:
            return Attend(rows, view, first.lo, first.hi, False, None, False)
        still = Shift(torch.ones_like(known.cos), torch.zeros_like(known.sin), known.interleaved)
        shifts = [s or still for s in shifts]
        stacked = Shift(
            torch.stack([s.cos for s in shifts]), torch.stack([s.sin for s in shifts]), known.interleaved
        )
        return Attend(rows, view, first.lo, first.hi, False, stacked, False)
