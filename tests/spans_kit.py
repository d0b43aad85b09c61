"""Steps of blocks of rows, and what one softmax gives for them, for the tests of the kernels that take a layer in one
call (``block_spans.py``, ``block_tiles.py``)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from rotation_kit import Rotary

from mpic.kernels import reference
from mpic.kernels.attention import PLAIN, Extras, KVView, SpanCall
from mpic.kernels.block_spans import BlockSpanKernel
from mpic.kernels.span import Span

COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler on this machine")
CPU = torch.device("cpu")
LAYER, LAYERS = 1, 2
DIMS = (24, 64, 80, 128)
NAN = float("nan")
UNREADABLE_SPANS = ["dtype", "rectangle", "heads", "dimension", "slots", "visible", "listed"]
UNREADABLE_QUERIES = ["dtype", "heads", "dimension", "rows", "strided"]


@st.composite
def steps(draw):
    """A step of some requests. Each has own rows, earlier own tokens or none, and spans that a suffix of its rows sees
    whole, through a window, or as listed slots. Slots that nobody sees are not numbers."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dim = draw(st.sampled_from(DIMS))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8)]))
    parts = draw(st.sampled_from([1, 2]))

    def view(tokens: int) -> KVView:
        data = torch.full((LAYERS, parts, kv_heads, tokens + 7, dim), NAN)
        data[LAYER, :, :, 3 : 3 + tokens] = torch.randn(parts, kv_heads, tokens, dim)
        return KVView(data)

    calls, total = [], draw(st.sampled_from([0, 3]))  # rows before are single rows, which no call covers
    for _ in range(draw(st.integers(1, 3))):
        rows, before = draw(st.sampled_from([2, 5, 33, 130, 250])), draw(st.sampled_from([0, 1, 70]))
        causal = draw(st.booleans())
        own, block = view(before + rows), slice(total, total + rows)
        calls.append(SpanCall(block, Span(own, 3 + before, 3 + before + rows), causal=causal, first=True))
        if before:
            calls.append(SpanCall(block, Span(own, 3, 3 + before)))
        for _ in range(draw(st.integers(0, 3))):
            tokens, base = draw(st.sampled_from([1, 63, 64, 200])), draw(st.sampled_from([0, 11, 900]))
            span, seen = (
                Span(view(tokens), 3, 3 + tokens, base),
                slice(total + draw(st.integers(0, rows - 1)), total + rows),
            )
            how = draw(st.sampled_from(["whole", "window", "listed"]))
            if how == "whole":
                calls.append(SpanCall(seen, span))
                continue
            hidden = torch.randint(0, tokens, (seen.stop - seen.start,)).sort().values
            if how == "window":
                calls.append(SpanCall(seen, span, visible=hidden))
                continue
            slots = 3 + torch.randperm(tokens)
            calls.append(SpanCall(seen, Span(span.source, tokens // 3, tokens, base), slots=slots))
        total += rows
    heads = kv_heads * group
    rotary = Rotary(draw(st.sampled_from([dim // 2, dim // 4])), draw(st.booleans()))
    extras = Extras(None, 2 * torch.randn(heads)) if draw(st.booleans()) else PLAIN
    q = torch.randn(total, heads, dim + 4).transpose(0, 1)[..., :dim]
    return q, calls, rotary, extras


def attended(
    kernel: BlockSpanKernel,
    q: torch.Tensor,
    calls: list,
    rotary: Rotary,
    extras: Extras = PLAIN,
    scale: float | None = None,
    **given,
) -> torch.Tensor:
    return kernel.blocks(calls, len(q), rotary.rotations, **given).attend(
        q, LAYER, scale or q.shape[2] ** -0.5, extras
    )


def exact(
    q: torch.Tensor, calls: list, rotary: Rotary, extras: Extras = PLAIN, scale: float | None = None
) -> torch.Tensor:
    plain = []
    for call in calls:
        if call.slots is not None:
            copy = KVView(call.span.source.data[:, :, :, call.slots])
            call = call._replace(span=call.span._replace(source=copy), slots=None)
        plain.append(call)
    return reference.attend(q, plain, scale or q.shape[2] ** -0.5, rotary.rotation, LAYER, extras)


def covered(calls: list) -> torch.Tensor:
    first = [call for call in calls if call.first]
    return torch.cat([torch.arange(call.rows.start, call.rows.stop) for call in first])


def in_bf16(call):
    return call._replace(span=call.span._replace(source=KVView(call.span.source.data.bfloat16())))


def long_step() -> tuple[torch.Tensor, list, Rotary]:
    """500 causal rows of 6 heads, and two chunks that rows from 200 and from 400 on see."""
    torch.manual_seed(2)
    own, one, other = (KVView(torch.randn(LAYERS, 2, 2, n, 64)) for n in (500, 576, 100))
    calls = [
        SpanCall(slice(0, 500), Span(own, 0, 500), causal=True, first=True),
        SpanCall(slice(200, 500), Span(one, 32, 576, 40)),
        SpanCall(slice(400, 500), Span(other, 0, 100, 616)),
    ]
    return torch.randn(6, 500, 64), calls, Rotary(32)


def alone(calls: list, row: int) -> list:
    """The calls of a long step as its row ``row``, of the last ones, would have them by itself."""
    own, *chunks = calls
    return [
        SpanCall(slice(0, 1), own.span._replace(hi=row + 1), first=True),
        *(SpanCall(slice(0, 1), call.span) for call in chunks),
    ]


def beyond_exponentials() -> tuple[torch.Tensor, list, Rotary]:
    """8 rows whose scores are 720,000 for token 70, which rows from 2 on see, and -720,000 for all others. The value of
    a token is its number."""
    kv = torch.zeros(LAYERS, 2, 1, 71, 64)
    kv[LAYER, 0], kv[LAYER, 0, :, 70] = -300.0, 300.0
    kv[LAYER, 1] = torch.arange(71.0)[:, None]
    calls = [
        SpanCall(slice(0, 8), Span(KVView(kv), 0, 8), causal=True, first=True),
        SpanCall(slice(2, 8), Span(KVView(kv), 8, 71)),
    ]
    return torch.full((1, 8, 64), 300.0), calls, Rotary(32)


def hidden_chunk() -> tuple[torch.Tensor, list, Rotary]:
    """8 causal rows, and a chunk of which a window hides more from each row, and everything from the last two."""
    torch.manual_seed(3)
    own, chunk = (KVView(torch.randn(LAYERS, 2, 2, n, 64)) for n in (8, 200))
    hidden = torch.tensor([0, 10, 63, 64, 130, 199, 200, 200])
    calls = [
        SpanCall(slice(0, 8), Span(own, 0, 8), causal=True, first=True),
        SpanCall(slice(0, 8), Span(chunk, 0, 200), visible=hidden),
    ]
    return torch.randn(4, 8, 64), calls, Rotary(32)


def sliding_window() -> tuple[torch.Tensor, list, Rotary]:
    """200 causal rows, each of which sees 20 tokens: of the tiles of keys that a block reads, many rows see only later
    ones."""
    torch.manual_seed(8)
    hidden = (torch.arange(200) - 19).clamp(min=0)
    own = Span(KVView(torch.randn(LAYERS, 2, 2, 200, 64)), 0, 200)
    return torch.randn(2, 200, 64), [SpanCall(slice(0, 200), own, True, True, hidden)], Rotary(32)


def small_heads() -> tuple[torch.Tensor, list, list, Rotary]:
    """20 rows of 2 key heads of 24 dimensions, in views that have 4 of 48 and are not numbers elsewhere; the calls, and
    the same ones over views that have no more than that. The last dimensions turn."""
    torch.manual_seed(0)
    kv = torch.full((LAYERS, 2, 4, 90, 48), NAN)
    kv[LAYER, :, :2, :, :24] = torch.randn(2, 2, 90, 24)
    calls = [
        SpanCall(slice(0, 20), Span(KVView(kv), 0, 20), causal=True, first=True),
        SpanCall(slice(5, 20), Span(KVView(kv), 20, 90, 31)),
    ]
    cut = [call._replace(span=call.span._replace(source=KVView(kv[:, :, :2, :, :24]))) for call in calls]
    return torch.randn(6, 20, 24), calls, cut, Rotary(4, start=16)


def unreadable_span(wrong: str, dtype: torch.dtype, other: torch.dtype) -> tuple[SpanCall, int]:
    """A call that a kernel for 64 dimensions in ``dtype`` cannot read, and the number of heads.

    Args:
        wrong: one of ``UNREADABLE_SPANS``.
        other: a dtype that the kernel does not read.
    """
    heads = 3 if wrong == "heads" else 4
    kv = torch.randn(LAYERS, 2, 2, 20, 64).to(other if wrong == "dtype" else dtype)
    if wrong == "dimension":
        kv = kv[..., :32]
    view = KVView(kv)
    call = SpanCall(slice(0, 20), Span(view, 0, 21 if wrong == "slots" else 20), first=True)
    if wrong == "rectangle":
        return call._replace(rows=slice(0, 5), causal=True), heads
    if wrong == "visible":
        return call._replace(visible=torch.zeros(19, dtype=torch.int64)), heads
    if wrong == "listed":
        return call._replace(slots=torch.arange(19)), heads
    return call, heads


def unreadable_queries(wrong: str, q: torch.Tensor, other: torch.dtype) -> torch.Tensor:
    """Queries that the kernel for a long step with queries ``q`` cannot read.

    Args:
        wrong: one of ``UNREADABLE_QUERIES``.
        other: a dtype that the kernel does not read.
    """
    return {
        "dtype": q.to(other),
        "heads": q[:4],
        "dimension": q[..., :32],
        "rows": q[:, :499],
        "strided": torch.randn(6, 500, 128).to(q.dtype)[..., ::2],
    }[wrong]


def miswritten(source: Path, folder: Path, right: str, wrong: str) -> Path:
    """Write a C file into a folder with something wrong in it, and beside it the files that it includes."""
    text, file = source.read_text(), folder / "wrong.c"
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))
    for header in source.parent.glob("*.h"):
        shutil.copy(header, folder)
    return file


class Subject(NamedTuple):
    """A kernel for blocks over all their spans that is tested.

    Args:
        load: makes it for a head dimension.
        dtype, other: what it reads, and what it does not.
        tolerance: for results near 1.
        weight: for results of which one weight decides.
    """

    load: Callable[[int], BlockSpanKernel]
    dtype: torch.dtype
    other: torch.dtype
    tolerance: float
    weight: float

    def step(self, step: tuple) -> tuple:
        """A step of this kit in the kernel's dtype."""
        q, calls, *rest = step
        return q.to(self.dtype), [_moved(call, self.dtype) for call in calls], *rest

    def attended(self, step: tuple, *given, **named) -> torch.Tensor:
        q, calls, rotary = self.step(step)
        return attended(self.load(q.shape[2]), q, calls, rotary, *given, **named)

    def exact(self, step: tuple, *given) -> torch.Tensor:
        """One softmax over the numbers that the kernel is given. The oracle turns queries without rounding them."""
        q, calls, rotary = self.step(step)
        return exact(q.float(), [_moved(call, torch.float32) for call in calls], rotary, *given)

    def assert_near(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        rtol = 0 if self.dtype is torch.float32 else self.tolerance
        torch.testing.assert_close(got, wanted, atol=self.tolerance, rtol=rtol)


def _moved(call: SpanCall, dtype: torch.dtype) -> SpanCall:
    return call._replace(span=call.span._replace(source=KVView(call.span.source.data.to(dtype))))


class BlockKernelTests:
    """Tests that every kernel for blocks over all their spans must pass; a module that inherits them has a fixture
    ``kernel``."""

    def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it(self, kernel):
        q, calls, rotary = long_step()
        whole = kernel.attended((q, calls, rotary))
        assert torch.equal(kernel.attended((q[:, 450:451], alone(calls, 450), rotary))[0], whole[450])
        for count in {1, 2, 5} - {torch.get_num_threads()}:  # blocks are cut by it, too
            with threads(count):
                assert torch.equal(kernel.attended((q, calls, rotary)), whole)

    def test_scores_beyond_the_range_of_exponentials_give_neither_nan_nor_infinity(self, kernel):
        out = kernel.attended(beyond_exponentials())
        assert (out[2:] / 70 - 1).abs().max() <= kernel.weight and out[0].eq(0).all()
        assert (out[1] - 0.5).abs().max() <= kernel.weight + 1e-6

    def test_a_row_that_a_window_hides_a_whole_chunk_from_keeps_what_it_has(self, kernel):
        q, calls, rotary = hidden_chunk()
        got = kernel.attended((q, calls, rotary))
        assert torch.equal(got[6:], kernel.attended((q, calls[:1], rotary))[6:])
        kernel.assert_near(got, kernel.exact((q, calls, rotary)))

    def test_rows_whose_window_hides_what_the_rows_before_them_see_first(self, kernel):
        kernel.assert_near(kernel.attended(sliding_window()), kernel.exact(sliding_window()))

    def test_fewer_and_smaller_heads_than_the_views_and_turning_last_dimensions(self, kernel):
        q, calls, cut, rotary = small_heads()
        kernel.assert_near(kernel.attended((q, calls, rotary), kv_heads=2), kernel.exact((q, cut, rotary)))

    @pytest.mark.parametrize("wrong", UNREADABLE_SPANS)
    def test_spans_that_it_cannot_read_are_refused_and_not_read(self, kernel, wrong):
        call, heads = unreadable_span(wrong, kernel.dtype, kernel.other)
        made = kernel.load(64)
        with pytest.raises(ValueError, match=f"{made.name} .* cannot read a span"):
            made.blocks([call], heads, Rotary(32).rotations)

    @pytest.mark.parametrize("wrong", UNREADABLE_QUERIES)
    def test_queries_that_it_cannot_read_are_refused_and_not_read(self, kernel, wrong):
        q, calls, rotary = kernel.step(long_step())
        made = kernel.load(64)
        with pytest.raises(ValueError, match=f"{made.name} .* cannot read queries"):
            made.blocks(calls, 6, rotary.rotations).attend(
                unreadable_queries(wrong, q, kernel.other), LAYER, 0.125
            )

    @pytest.mark.parametrize("scale, extras", [(0.125, Extras(30.0)), (0.0, PLAIN), (-0.125, PLAIN)])
    def test_a_softcap_and_a_scale_that_is_not_above_zero_are_refused(self, kernel, scale, extras):
        q, calls, rotary = kernel.step(long_step())
        made = kernel.load(64)
        with pytest.raises(ValueError, match=f"{made.name} .* does not cap scores"):
            made.blocks(calls, 6, rotary.rotations).attend(q, LAYER, scale, extras)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Has torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
