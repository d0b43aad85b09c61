"""The kernel over vLLM's paged cache for CPUs, compared with gathered keys and one softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from processors import compiled_for
from spans_kit import needs_compiler

from mpic.kernels import paged_spans
from mpic.kernels.attention import QueryRotation, rotate
from mpic.kernels.paged_spans import MappedSpan, PagePlan, SharedRows

pytestmark = needs_compiler
processor = compiled_for("avx2", "avx512")
BLOCKS = 40
NAN = float("nan")


@pytest.fixture(autouse=True)
def built_anew():
    paged_spans.load.cache_clear()
    yield
    paged_spans.load.cache_clear()


class Cache:
    """A paged cache whose unused tokens are NaN, and what it holds in order."""

    def __init__(self, kv_heads: int, block: int, dim: int) -> None:
        self.pages = torch.full((BLOCKS, kv_heads, block, 2 * dim), NAN)
        self.block, self.dim, self.kv_heads = block, dim, kv_heads
        self.random = torch.Generator().manual_seed(3)
        self.free = torch.randperm(BLOCKS, generator=self.random).tolist()
        self.held: dict[int, torch.Tensor] = {}

    def hold(self, tokens: int) -> np.ndarray:
        """Write random keys and values, and return their blocks."""
        kv = torch.randn(2, self.kv_heads, tokens, self.dim, generator=self.random)
        blocks = [self.free.pop() for _ in range(-(-tokens // self.block))]
        for i, block in enumerate(blocks):
            part = kv[:, :, i * self.block : (i + 1) * self.block]
            halves = self.pages[block].view(self.kv_heads, 2, self.block * self.dim)
            halves[:, 0].view(self.kv_heads, self.dim, self.block)[:, :, : part.shape[2]] = part[0].mT
            halves[:, 1].view(self.kv_heads, self.block, self.dim)[:, : part.shape[2]] = part[1]
        numbers = np.array(blocks, np.int32)
        self.held[blocks[0]] = kv
        return numbers

    def of(self, blocks: np.ndarray) -> torch.Tensor:
        return self.held[int(blocks[0])].double()


def turned(dim: int, base: float, interleaved: bool) -> QueryRotation:
    angle = base * torch.arange(1, dim // 2 + 1) / 7
    return QueryRotation(angle.cos(), angle.sin(), interleaved)


def expected(cache: Cache, query: torch.Tensor, one: SharedRows, scale: float) -> torch.Tensor:
    """Return ``[n, heads, dim]`` of the rows of one request, row by row."""
    found = []
    for i, row in enumerate(query[one.rows]):
        index, parts = one.index + i, []
        own = cache.of(one.blocks)[:, :, : index + 1]
        parts.append((row, own))
        for span in one.spans:
            if index >= span.row:
                q = row if span.turn is None else rotate(row[:, None], span.turn)[:, 0]
                parts.append((q, cache.of(span.blocks)[:, :, span.lo : span.hi]))
        scores, values = [], []
        for q, (keys, value) in parts:
            grouped = q.double().view(cache.kv_heads, -1, cache.dim)
            scores.append(grouped @ keys.mT * scale)
            values.append(value)
        weights = torch.cat(scores, -1).softmax(-1)
        found.append((weights @ torch.cat(values, 1)).reshape(-1, cache.dim))
    return torch.stack(found).float()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "interleaved"),
    [(4, 2, 32, 32, False), (3, 3, 64, 64, True), (8, 1, 80, 32, False), (6, 2, 128, 32, False)],
)
def test_rows_over_own_blocks_and_spans_equal_gathered_keys(heads, kv_heads, dim, block, interleaved):
    cache, scale = Cache(kv_heads, block, dim), dim**-0.5
    rotary = dim if dim != 80 else 64  # a part of a head may stay as it is
    chunks = [cache.hold(tokens) for tokens in (70, 32, 5)]
    spans = [
        MappedSpan(chunks[0], 0, 70, 0, turned(rotary, 3.0, interleaved)),
        MappedSpan(chunks[1], 5, 32, 4, turned(rotary, 41.0, interleaved)),
        MappedSpan(chunks[0], 33, 64, 4, None),
        MappedSpan(chunks[2], 1, 4, 39, turned(rotary, -2.0, interleaved)),
    ]
    cuts = [(0, 45), (38, 1), (17, 3)]  # the first own token of this step's, and how many
    requests, rows = [], 2
    for i, (index, count) in enumerate(cuts):
        requests.append(SharedRows(slice(rows, rows + count), index, cache.hold(index + count), spans[i:]))
        rows += count + 1
    requests.append(SharedRows(slice(rows, rows + 2), 31, cache.hold(33), []))
    wide = torch.randn(rows + 4, heads + 2, dim, generator=cache.random)
    query, out = wide[:, :heads], torch.full((rows + 4, heads, dim), 7.0)  # as a part of Q, K and V together
    kernel = paged_spans.load(dim, block, heads // kv_heads)
    kernel.attend(query, cache.pages, PagePlan(requests, heads // kv_heads), scale, out)
    untouched = torch.ones(len(out), dtype=torch.bool)
    for one in requests:
        torch.testing.assert_close(out[one.rows], expected(cache, query, one, scale), atol=2e-6, rtol=1e-5)
        untouched[one.rows] = False
    assert untouched.sum() == 7 and (out[untouched] == 7.0).all()
    alone = torch.full_like(out, 7.0)
    kernel.attend(query, cache.pages, PagePlan(requests[1:2], heads // kv_heads), scale, alone)
    assert torch.equal(alone[requests[1].rows], out[requests[1].rows]), "other rows of a step change nothing"


@pytest.mark.parametrize("wrong", ["dtype", "dimension", "heads", "strided"])
def test_what_it_was_not_built_for_is_refused(wrong):
    cache = Cache(2, 32, 32)
    blocks = cache.hold(4)
    plan = PagePlan([SharedRows(slice(0, 1), 3, blocks, [])], 2)
    query = torch.zeros(1, 4, 32)
    query = {
        "dtype": query.bfloat16(),
        "dimension": torch.zeros(1, 4, 64),
        "heads": torch.zeros(1, 3, 32),
        "strided": torch.zeros(1, 4, 64)[..., ::2],
    }[wrong]
    with pytest.raises(ValueError, match=r"not built for|side by side"):
        paged_spans.load(32, 32, 2).attend(query, cache.pages, plan, 1.0, torch.zeros(1, 4, 32))


def test_shapes_that_it_does_not_know_are_unavailable():
    for dim, block, group in ((24, 32, 1), (32, 16, 1), (32, 32, paged_spans.MOST + 1)):
        with pytest.raises(paged_spans.KernelUnavailable):
            paged_spans.load(dim, block, group)
