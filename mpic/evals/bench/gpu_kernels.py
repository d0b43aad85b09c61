"""What the GPU bench measures below the model: segment attention against torch's, loads from the host.

Triton is imported where it is used, so that the list of benches can be shown without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from mpic.evals.bench.frame import Row, Where
from mpic.kernels.spans import Shift
from mpic.kernels.triton.tuning import Tiles
from mpic.kernels.triton.worklist import KV, Call

if TYPE_CHECKING:
    from mpic.evals.bench.roofline import Ceilings
    from mpic.kernels.triton.step import Prepared


@dataclass(frozen=True)
class Case:
    """Attention of one layer.

    Args:
        rows: own tokens of each request; 1 is decoding.
        requests: with chunks of their own, unless ``shared``.
        spans, keys: chunks a request maps, and tokens of each.
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

    @property
    def flops(self) -> float:
        """Of the visible pairs."""
        pairs = self.requests * self.rows * (self.linked + (self.rows + 1) / 2)
        return 4 * self.heads * self.dim * pairs

    def bytes(self, size: int) -> float:
        """Every key and value once, queries and outputs."""
        chunks = self.linked * (1 if self.shared else self.requests)
        keys = chunks + self.requests * self.rows
        return size * self.dim * (2 * self.kv_heads * keys + 2 * self.heads * self.requests * self.rows)


def seconds(
    work: Callable[[], Any], where: Where, repeats: int, before: Callable[[], Any] = lambda: None
) -> float:
    """Median of ``repeats`` runs after two that do not count; on CUDA by events, with a cold cache when ``before``
    clears it."""
    for _ in range(2 if where.device.type == "cuda" else 0):
        work()
    taken = []
    for _ in range(repeats):
        before()
        if where.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def build(case: Case, where: Where, tiles: Tiles | None = None) -> tuple[Prepared, torch.Tensor]:
    """A step of the case: extents side by side in one arena, as the pool lays them, every chunk at another base."""
    from mpic.kernels.triton.step import Geometry, Prepared, kv_of

    g = Geometry(case.heads, case.kv_heads, case.dim, case.dim // 2)
    own, chunks = case.rows + 1, 1 if case.shared else case.requests
    per_token = 2 * case.kv_heads * case.dim
    tokens = case.requests * own + chunks * case.linked
    arena = torch.randn(tokens * per_token, dtype=where.dtype, device=where.device)
    at = 0

    def extent(n: int) -> KV:
        nonlocal at
        view = arena[at * per_token : (at + n) * per_token].view(2, case.kv_heads, n, case.dim)
        at += n
        return kv_of(view[0], view[1], arena)

    sets = [[extent(case.keys) for _ in range(case.spans)] for _ in range(chunks)]
    shifts: list[Shift] = []
    calls: list[Call] = []
    for request in range(case.requests):
        start, stop = request * case.rows, (request + 1) * case.rows
        calls.append(Call(start, stop, extent(own)._replace(hi=case.rows), True))
        for number, kv in enumerate(sets[0 if case.shared else request]):
            angle = torch.linspace(0, number + 1.0, case.dim // 2, device=where.device)
            shifts.append(Shift(angle.cos(), angle.sin()))
            calls.append(Call(start, stop, kv, False, len(shifts)))
    rows = case.requests * case.rows
    q = torch.randn(rows, case.heads, case.dim, dtype=where.dtype, device=where.device).transpose(0, 1)
    return Prepared(calls, rows, g, arena, shifts, tiles=tiles), q


def segment_attention(case: Case, where: Where, tiles: Tiles | None = None) -> Callable[[], object]:
    """The kernels' launches for one layer of the case."""
    prepared, q = build(case, where, tiles)
    return lambda: prepared.attend(0, q, case.dim**-0.5)


def torch_attention(case: Case, where: Where) -> Callable[[], torch.Tensor]:
    """SDPA on the same number of queries and keys, contiguous, rotated beforehand, nothing masked: more pairs than the
    case has, which ``attention_rows`` counts."""
    options = {"dtype": where.dtype, "device": where.device}
    n = case.linked + case.rows
    q = torch.randn(case.requests, case.heads, case.rows, case.dim, **options)
    k, v = (torch.randn(case.requests, case.kv_heads, n, case.dim, **options) for _ in range(2))
    grouped = case.heads != case.kv_heads
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def attention_rows(
    cases: tuple[Case, ...], where: Where, top: Ceilings, repeats: int
) -> tuple[list[Row], dict[str, float]]:
    """A row a case and implementation, and how many times torch's throughput ours reaches, by the case's name."""
    rows: list[Row] = []
    over: dict[str, float] = {}
    size = torch.empty(0, dtype=where.dtype).element_size()
    flush = torch.empty(
        256 << 20 if where.device.type == "cuda" else 1, dtype=torch.uint8, device=where.device
    )
    for case in cases:
        ours = seconds(segment_attention(case, where), where, repeats, flush.zero_)
        theirs = seconds(torch_attention(case, where), where, repeats, flush.zero_)
        pairs = case.requests * case.rows * (case.linked + case.rows)
        # throughput, not time: torch's call has the own tokens' upper triangle on top, and never shares keys
        masked = 4 * case.heads * case.dim * pairs / case.flops if case.rows > 1 else 1.0
        over[case.name] = theirs / masked / ours
        floor = top.floor(case, size)
        for name, taken in (("triton", ours), ("torch SDPA", theirs / masked)):
            rows.append(
                measured(f"attention, {case.name}", case.words, name, taken * 1e6, "us")
                | {"of floor": round(floor / taken, 3), "over torch": round(theirs / masked / taken, 3)}
            )
    return rows, over


def measured(what: str, shape: str, how: str, value: float, unit: str) -> Row:
    return {
        "table": "gpu",
        "measured": what,
        "shape": shape,
        "with": how,
        "value": round(value, 3),
        "unit": unit,
    }


def load_rows(where: Where, layers: int, kv_heads: int, dim: int, tokens: int, repeats: int) -> Iterator[Row]:
    """A chunk from the host: copied from pageable and from pinned memory, and by the kernel into scattered pages."""
    from mpic.kernels.triton import ops

    shape = (layers, 2, kv_heads, tokens, dim)
    pageable = torch.zeros(shape, dtype=where.dtype)
    target = torch.empty(shape, dtype=where.dtype, device=where.device)
    pinned = pageable.pin_memory() if where.device.type == "cuda" else pageable
    page = 16
    count = -(-tokens // page)
    step = layers * 2 * kv_heads * page * dim
    arena = torch.empty(count * step, dtype=where.dtype, device=where.device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    pages = (order * step).to(where.device)
    place = KV(0, 2 * kv_heads * page * dim, kv_heads * page * dim, page * dim, 0, tokens, ())
    ways = {
        "copy, pageable": lambda: target.copy_(pageable),
        "copy, pinned": lambda: target.copy_(pinned, non_blocking=True),
        "load_chunk, pinned, into pages": lambda: ops.load_chunk(pinned, arena, pages, place, page),
    }
    for name, work in ways.items():
        taken = seconds(work, where, repeats)
        yield measured(
            "host to device",
            f"{tokens} tokens of {layers} layers",
            name,
            pageable.nbytes / taken / 1e9,
            "GB/s",
        )
