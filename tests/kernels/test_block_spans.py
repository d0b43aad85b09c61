"""Blocks of rows over all their spans in one call, against one softmax in double precision."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation_kit import Rotary

from mpic.kernels import block_spans, c_kernel, reference
from mpic.kernels.attention import PLAIN, Extras, GatheredCalls, KVView, SpanCall
from mpic.kernels.backends import block_spans as choose
from mpic.kernels.span import Span

COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler on this machine")
CPU = torch.device("cpu")
LAYER, LAYERS = 1, 2
DIMS = (24, 64, 80, 128)
NAN = float("nan")


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
            listed = SpanCall(seen, Span(span.source, tokens // 3, tokens, base))
            calls.append(GatheredCalls(span.source, slots, (listed,)))
        total += rows
    heads = kv_heads * group
    rotary = Rotary(draw(st.sampled_from([dim // 2, dim // 4])), draw(st.booleans()))
    extras = Extras(None, 2 * torch.randn(heads)) if draw(st.booleans()) else PLAIN
    q = torch.randn(total, heads, dim + 4).transpose(0, 1)[..., :dim]
    return q, calls, rotary, extras


def attended(q: torch.Tensor, calls: list, rotary: Rotary, extras: Extras = PLAIN, **given) -> torch.Tensor:
    kernel = block_spans.load(q.shape[2], q.dtype)
    return kernel.blocks(calls, len(q), rotary.rotations, **given).attend(
        q, LAYER, q.shape[2] ** -0.5, extras
    )


def exact(q: torch.Tensor, calls: list, rotary: Rotary, extras: Extras = PLAIN) -> torch.Tensor:
    plain = []
    for call in calls:
        if isinstance(call, GatheredCalls):
            copy = KVView(call.source.data[:, :, :, call.slots])
            plain += [part._replace(span=part.span._replace(source=copy)) for part in call.calls]
        else:
            plain.append(call)
    return reference.attend(q, plain, q.shape[2] ** -0.5, rotary.rotation, LAYER, extras)


def covered(calls: list) -> torch.Tensor:
    first = [call for call in calls if not isinstance(call, GatheredCalls) and call.first]
    return torch.cat([torch.arange(call.rows.start, call.rows.stop) for call in first])


def in_bf16(call):
    if isinstance(call, GatheredCalls):
        return call._replace(source=KVView(call.source.data.bfloat16()))
    return call._replace(span=call.span._replace(source=KVView(call.span.source.data.bfloat16())))


@needs_compiler
@settings(max_examples=80, deadline=None, derandomize=True)
@given(step=steps())
def test_every_row_equals_one_softmax_over_all_it_sees(step):
    q, calls, rotary, extras = step
    rows = covered(calls)
    expected = exact(q, calls, rotary, extras)[rows]
    assert (attended(q, calls, rotary, extras)[rows] - expected).abs().max() < 1e-5
    rounded = attended(q.bfloat16(), list(map(in_bf16, calls)), rotary, extras)[rows]
    assert (rounded - expected).norm() / expected.norm() < 1e-2


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


@needs_compiler
def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it():
    q, calls, rotary = long_step()
    whole = attended(q, calls, rotary)
    own, *chunks = calls
    alone = [
        SpanCall(slice(0, 1), own.span._replace(hi=451), first=True),
        *(SpanCall(slice(0, 1), call.span) for call in chunks),
    ]
    assert torch.equal(attended(q[:, 450:451], alone, rotary)[0], whole[450])
    threads = torch.get_num_threads()
    try:
        for count in {1, 2, 5} - {threads}:  # blocks are cut by it, too
            torch.set_num_threads(count)
            assert torch.equal(attended(q, calls, rotary), whole)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_scores_beyond_the_range_of_exponentials_give_neither_nan_nor_infinity():
    kv = torch.zeros(LAYERS, 2, 1, 71, 64)
    kv[LAYER, 0], kv[LAYER, 0, :, 70] = -300.0, 300.0
    kv[LAYER, 1] = torch.arange(71.0)[:, None]
    q = torch.full((1, 8, 64), 300.0)
    calls = [
        SpanCall(slice(0, 8), Span(KVView(kv), 0, 8), causal=True, first=True),
        SpanCall(slice(2, 8), Span(KVView(kv), 8, 71)),
    ]
    out = attended(q, calls, Rotary(32))
    assert out[2:].eq(70).all() and (out[1] - 0.5).abs().max() < 1e-6


@needs_compiler
def test_a_row_that_a_window_hides_a_whole_chunk_from_keeps_what_it_has():
    torch.manual_seed(3)
    own, chunk = (KVView(torch.randn(LAYERS, 2, 2, n, 64)) for n in (8, 200))
    hidden = torch.tensor([0, 10, 63, 64, 130, 199, 200, 200])
    first = SpanCall(slice(0, 8), Span(own, 0, 8), causal=True, first=True)
    calls = [first, SpanCall(slice(0, 8), Span(chunk, 0, 200), visible=hidden)]
    q = torch.randn(4, 8, 64)
    got = attended(q, calls, Rotary(32))
    assert torch.equal(got[6:], attended(q, [first], Rotary(32))[6:])
    assert (got[:6] - exact(q, calls, Rotary(32))[:6]).abs().max() < 1e-5


@needs_compiler
def test_fewer_and_smaller_heads_than_the_views_and_turning_last_dimensions():
    torch.manual_seed(0)
    kv = torch.full((LAYERS, 2, 4, 90, 48), NAN)
    kv[LAYER, :, :2, :, :24] = torch.randn(2, 2, 90, 24)
    calls = [
        SpanCall(slice(0, 20), Span(KVView(kv), 0, 20), causal=True, first=True),
        SpanCall(slice(5, 20), Span(KVView(kv), 20, 90, 31)),
    ]
    cut = [call._replace(span=call.span._replace(source=KVView(kv[:, :, :2, :, :24]))) for call in calls]
    q, rotary = torch.randn(6, 20, 24), Rotary(4, start=16)
    assert (attended(q, calls, rotary, kv_heads=2) - exact(q, cut, rotary)).abs().max() < 1e-5


@needs_compiler
@pytest.mark.parametrize("wrong", ["dtype", "rectangle", "heads", "dimension", "slots", "visible", "listed"])
def test_spans_that_it_cannot_read_are_refused_and_not_read(wrong):
    kv, call = (
        torch.randn(LAYERS, 2, 2, 20, 64),
        SpanCall(slice(0, 20), Span(KVView(torch.empty(0)), 0, 20), first=True),
    )
    heads = 3 if wrong == "heads" else 4
    if wrong == "dtype":
        kv = kv.bfloat16()
    elif wrong == "dimension":
        kv = kv[..., :32]
    elif wrong == "rectangle":
        call = call._replace(rows=slice(0, 5), causal=True)
    elif wrong == "visible":
        call = call._replace(visible=torch.zeros(19, dtype=torch.int64))
    span = call.span._replace(source=KVView(kv), hi=21 if wrong == "slots" else 20)
    call = call._replace(span=span)
    if wrong == "listed":
        call = GatheredCalls(span.source, torch.arange(19), (call,))
    with pytest.raises(ValueError, match=r"cpu-block-spans .* cannot read a span"):
        block_spans.load(64, torch.float32).blocks([call], heads, Rotary(32).rotations)


@needs_compiler
@pytest.mark.parametrize("wrong", ["dtype", "heads", "dimension", "rows", "strided", "softcap"])
def test_queries_that_it_cannot_read_are_refused_and_not_read(wrong):
    q, calls, rotary = long_step()
    blocks = block_spans.load(64, torch.float32).blocks(calls, 6, rotary.rotations)
    given = {
        "dtype": q.bfloat16(),
        "heads": q[:4],
        "dimension": q[..., :32],
        "rows": q[:, :499],
        "strided": torch.randn(6, 500, 128)[..., ::2],
        "softcap": q,
    }[wrong]
    with pytest.raises(ValueError, match="cpu-block-spans"):
        blocks.attend(given, LAYER, 0.125, Extras(30.0) if wrong == "softcap" else PLAIN)


# ---- where it is used


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no kernel loaded before or after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    block_spans.load.cache_clear()
    yield tmp_path
    block_spans.load.cache_clear()


def test_a_cpu_with_a_compiler_has_it_for_dtypes_and_heads_that_it_reads(fresh, monkeypatch):
    assert choose(torch.device("cuda"), torch.float32, [64]) == ([], "")
    assert "not float16" in choose(CPU, torch.float16, [64])[1]
    assert "up to 256 dimensions, not 576" in choose(CPU, torch.float32, [64, 576])[1]
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    assert choose(CPU, torch.float32, [72]) == ([], "no C compiler (cc, gcc, clang)")


@needs_compiler
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("l->scale * LOG2E", "l->scale * 1.4f"),
        ("row - c->first + 1", "row - c->first + 2"),
        ("x * cosine[i] - y * sine[i]", "x * cosine[i] + y * sine[i]"),
        ("if (t < from || t >= to || t >= count)", "if (0)"),
        ("load(out + r * PADDED + i * LANES) * fade[r]", "load(out + r * PADDED + i * LANES)"),
        ("c->hidden ? c->hidden[row - c->first] : 0", "0"),
        ("c->slots ? c->slots[first + t + j] : first + t + j", "first + t + j"),
        ("(vec){l->sinks ? 1 : 0}", "(vec){0}"),
    ],
    ids=["scale", "mask", "rotation", "rest", "fade", "hidden", "slots", "sink"],
)
def test_a_kernel_that_computes_something_else_is_refused(fresh, monkeypatch, right, wrong):
    text, file = block_spans.SOURCE.read_text(), fresh / "wrong.c"
    assert right in text
    file.write_text(text.replace(right, wrong))
    shutil.copy(block_spans.SOURCE.with_name("vectors.h"), fresh)
    monkeypatch.setattr(block_spans, "SOURCE", file)
    kernels, reason = choose(CPU, torch.float32, [64])
    assert kernels == [] and "the compiled kernel is wrong by" in reason
