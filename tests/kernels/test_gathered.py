"""Many spans of one chunk attended to together, against one softmax over the same spans one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation_kit import Rotary
from spans_kit import in_bf16, needs_compiler

from mpic.kernels import block_spans, reference
from mpic.kernels.attention import PLAIN, Extras, KVView, SpanCall
from mpic.kernels.gathered import LEAST, calls_over
from mpic.kernels.span import Span

DIM = 32
SCALE = DIM**-0.5


def cut(
    view: KVView, recomputed: list[int], tokens: int, base: int, own: int, ahead: int | None
) -> list[Span]:
    """The spans of a chunk in slots ``[1, 1 + tokens)``, whose first recomputed token is own token ``own``. Slots that
    no span has are not numbers."""
    spans, lo = [], 0
    for count, hi in enumerate([*recomputed, tokens]):
        if hi > lo:
            spans.append(Span(view, 1 + lo, 1 + hi, base, own + count, ahead=ahead))
        lo = hi + 1
    kept = [slot for span in spans for slot in range(span.lo, span.hi)]
    outside = [slot for slot in range(view.data.shape[3]) if slot not in kept]
    view.data[:, :, :, outside] = float("nan")
    return spans


@st.composite
def steps(draw):
    """A step of some requests: own tokens before, inside and behind chunks that are cut at random; a step has a slice
    of each request's tokens, which may begin or end anywhere."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8)]))
    parts, random = draw(st.sampled_from([1, 2])), draw(st.randoms(use_true_random=False))
    view = lambda slots: KVView(torch.randn(1, parts, kv_heads, slots, DIM))
    apart, together, total = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        own, spans = draw(st.integers(0, 5)), []
        for number in range(draw(st.integers(1, 3))):
            tokens = draw(st.sampled_from([5, 40, 200]))
            share = draw(st.sampled_from([0.0, 0.05, 0.15, 0.5, 1.0]))
            recomputed = sorted(random.sample(range(tokens), round(tokens * share)))
            ahead = own if draw(st.booleans()) else None
            spans += cut(view(tokens + 2), recomputed, tokens, number * 300, own, ahead)
            own += len(recomputed) + draw(st.integers(0, 3))
        own += draw(st.sampled_from([1, 9]))
        lo = draw(st.integers(0, own - 1))
        hi = draw(st.integers(lo + 1, own))
        rows = slice(total, total + hi - lo)
        fresh = view(hi - lo)
        in_blocks = draw(st.booleans())
        for calls, gathers in ((apart, False), (together, True)):
            calls.append(SpanCall(rows, Span(fresh, 0, hi - lo), causal=hi - lo > 1, first=True))
            calls += calls_over(spans, lo, hi, total, in_blocks, gathers)
        total += hi - lo
    extras = Extras(None, torch.randn(kv_heads * group) if draw(st.booleans()) else None)
    return torch.randn(kv_heads * group, total, DIM), apart, together, extras


def attended(q, calls, rotary, extras=PLAIN, layer=0, kv_heads=None):
    kernel = block_spans.load(q.shape[2], q.dtype)
    return kernel.blocks(calls, len(q), rotary.rotations, kv_heads).attend(q, layer, SCALE, extras)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(step=steps(), interleaved=st.booleans())
def test_equals_one_softmax_over_the_spans_one_by_one(step, interleaved):
    q, apart, together, extras = step
    rotary = Rotary(DIM // 4, interleaved)
    expected = reference.attend(q, apart, SCALE, rotary.rotation, extras=extras)
    assert (attended(q, together, rotary, extras) - expected).abs().max() < 1e-5
    rounded = attended(q.bfloat16(), [in_bf16(call) for call in together], rotary, extras)
    assert (rounded - expected).norm() / expected.norm() < 2e-2


@needs_compiler
@pytest.mark.parametrize("dim", [16, DIM])
def test_layers_with_fewer_or_smaller_heads_read_their_part_of_the_slots(dim):
    view = KVView(torch.randn(2, 2, 3, 60, DIM))
    spans = cut(view, list(range(3, 58, 5)), 58, 7, 2, None)
    own = KVView(torch.randn(2, 2, 3, 20, DIM))
    first = SpanCall(slice(0, 20), Span(own, 0, 20), causal=True, first=True)
    apart, together = ([first, *calls_over(spans, 0, 20, 0, False, gathers)] for gathers in (False, True))
    q, rotary = torch.randn(4, 20, dim), Rotary(dim // 2)
    one, other = (attended(q, calls, rotary, layer=1, kv_heads=2) for calls in (apart, together))
    assert any(call.slots is not None for call in together)
    assert (one - other).abs().max() < 1e-5


def test_few_spans_of_a_chunk_stay_calls_of_their_own_and_many_are_read_in_a_few_calls():
    chunks = [KVView(torch.randn(1, 2, 1, 400, DIM)) for _ in range(2)]
    few = cut(chunks[0], [7 * i for i in range(1, LEAST - 1)], 300, 5, 0, None)
    many = cut(chunks[1], [2 * i for i in range(1, 190)], 398, 9, len(few) - 1, None)
    own = len(few) - 1 + 189 + 10
    calls = list(calls_over([*few, *many], 0, own, 3, False, True))
    assert calls[: len(few)] == [SpanCall(slice(3 + span.row, 3 + own), span) for span in few]
    *inside, behind = calls[len(few) :]
    assert len(few) == LEAST - 1 and all(call.slots is behind.slots is not None for call in inside)
    assert len(inside) == 3 and behind.rows == slice(3 + many[-1].row, 3 + own) and behind.visible is None
    # the same chunk at another place, and what a step's rows do not reach, are not part of it
    again = [span._replace(base=90, row=span.row + own) for span in many]
    apart = list(calls_over([*many, *again], 0, many[2].row + 1, 0, False, True))
    assert [call.span for call in apart] == many[:3]
    listed = {id(call.slots) for call in calls_over([*many, *again], 0, 2 * own, 0, False, True)}
    assert len(listed) == 2
