"""Cases of attention in one layer, described by their sizes, as the tuner runs them.

Triton is imported where it is used, so that sections which need no kernels run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpic.kernels.attention import QueryRotation, SpanCall
from mpic.kernels.span import Span
from mpic.kernels.triton.tiles import Strides
from mpic.kernels.triton.tuning import Tiles
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.gpu.roofline import Cost

if TYPE_CHECKING:
    from mpic.kernels.triton.step import TritonStep


@dataclass(frozen=True)
class Case:
    """Attention of one layer.

    Args:
        rows: own tokens of each request; 1 is decoding.
        requests: number of requests, each with its own chunks unless ``shared``.
        spans, keys: number of chunks that a request maps, and tokens of each.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    rows: int
    requests: int
    spans: int
    keys: int
    shared: bool = False

    @property
    def words(self) -> str:
        sharing = ", the same for all" if self.shared else ""
        return (
            f"{self.requests} x {self.rows} rows over {self.spans} x {self.keys} keys{sharing}; "
            f"{self.heads}/{self.kv_heads} heads of {self.dim}"
        )

    @property
    def linked(self) -> int:
        return self.spans * self.keys

    def cost(self, dtype: torch.dtype) -> Cost:
        """Return the operations of the visible pairs, and the bytes of queries, outputs, and every key and value
        once."""
        pairs = self.requests * self.rows * (self.linked + (self.rows + 1) / 2)
        chunks = self.linked * (1 if self.shared else self.requests)
        keys = chunks + self.requests * self.rows
        numbers = 2 * self.kv_heads * keys + 2 * self.heads * self.requests * self.rows
        return Cost(4 * self.heads * self.dim * pairs, dtype.itemsize * self.dim * numbers)


PREFILL = Case("prefill", 32, 8, 128, 520, 1, 8, 2304)
DECODE = Case("decode", 32, 8, 128, 1, 8, 4, 2304)


def build(
    case: Case, placement: BenchDevice, tiles: Tiles | None = None, block_programs: int = 0
) -> tuple[TritonStep, torch.Tensor]:
    """Return a step of the case: extents side by side in one arena, as the pool lays them, every chunk at another
    base."""
    from mpic.kernels.triton.launch import Geometry
    from mpic.kernels.triton.step import TritonStep, strides_of

    g = Geometry(case.heads, case.kv_heads, case.dim, case.dim // 2)
    own, chunks = case.rows + 1, 1 if case.shared else case.requests
    per_token = 2 * case.kv_heads * case.dim
    tokens = case.requests * own + chunks * case.linked
    arena = torch.randn(tokens * per_token, dtype=placement.dtype, device=placement.device)
    begin = 0

    def extent(n: int) -> Strides:
        nonlocal begin
        data = arena[begin * per_token : (begin + n) * per_token].view(1, 2, case.kv_heads, n, case.dim)
        begin += n
        return strides_of(data, arena)

    def rotation(base: int) -> QueryRotation:
        angle = torch.linspace(0, float(base), case.dim // 2, device=placement.device)
        return QueryRotation(angle.cos(), angle.sin())

    sets = [[extent(case.keys) for _ in range(case.spans)] for _ in range(chunks)]
    calls: list[SpanCall] = []
    for request in range(case.requests):
        rows = slice(request * case.rows, (request + 1) * case.rows)
        calls.append(SpanCall(rows, Span(extent(own), 0, case.rows), causal=True))
        for number, chunk in enumerate(sets[0 if case.shared else request]):
            calls.append(SpanCall(rows, Span(chunk, 0, case.keys, base=number + 1)))
    count = case.requests * case.rows
    q = torch.randn(count, case.heads, case.dim, dtype=placement.dtype, device=placement.device).transpose(
        0, 1
    )
    return TritonStep(calls, count, g, arena, rotation, tiles=tiles, block_programs=block_programs), q


def segment_attention(case: Case, placement: BenchDevice, tiles: Tiles | None = None) -> Callable[[], object]:
    """Return the kernels' launches for one layer of the case."""
    from mpic.kernels.triton.warmup import programs_of

    scale = case.dim**-0.5
    prepared, q = build(case, placement, tiles)
    if case.rows > 1:  # decided as by an engine when it loads
        out = torch.empty(q.shape[1], *q.shape[::2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], device=q.device)
        blocks, *_ = prepared.launch(0, q, scale, None, out, lse)
        prepared, q = build(case, placement, tiles, programs_of(blocks, placement.device))
    return lambda: prepared.attend(0, q, scale)
