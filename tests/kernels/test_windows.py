"""Windows: calls cut to what their rows see, against a mask over the whole prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.kernels import cpu
from mpic.kernels.attention import Extras, KVView, attend
from mpic.kernels.span import Span
from mpic.kernels.windows import Stretch, Window, own_calls, span_calls

HEADS, KV_HEADS, DIM = 6, 2, 16


def seen(window: Window, row: int, key: int) -> bool:
    """The windows of transformers' masks (``masking_utils.py``: sliding_window_overlay, chunked_overlay)."""
    near = row // window.size == key // window.size if window.chunked else key > row - window.size
    return near and key <= row


def dense(q, kv, rows, window, extras):
    """Compute one softmax over the prompt, as the reference."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 0) for x in kv)
    scores = q.double() @ keys.transpose(1, 2) * 0.25
    if extras.softcap is not None:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    mask = torch.tensor([[seen(window, row, key) for key in range(kv.shape[2])] for row in rows])
    scores = scores.masked_fill(~mask, float("-inf"))
    if extras.sinks is not None:
        scores = torch.cat([scores, extras.sinks.double()[:, None, None].expand(-1, len(rows), 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    return (torch.softmax(scores, -1) @ values).transpose(0, 1).float()


@settings(max_examples=50, deadline=None)
@given(
    size=st.sampled_from([1, 2, 5, 8, 17, 64, 70, 1000]),
    chunked=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=6),
    cached=st.integers(0, 40),
    softcap=st.sampled_from([None, 0.8]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_links_through_windows_equal_a_mask_over_the_prompt(
    size, chunked, lengths, cached, softcap, sinks, seed
):
    """Segments are computed, or mapped from extents of their own; of what is computed, some was computed before."""
    torch.manual_seed(seed)
    window = Window(size, chunked)
    total = sum(n for n, _ in lengths) + 1
    kv = torch.randn(2, KV_HEADS, total, DIM)
    places, mapped, start = [], [], 0
    for n, is_chunk in [*lengths, (1, False)]:
        if is_chunk:
            mapped.append((len(places), start, n))
        else:
            places += range(start, start + n)
        start += n
    own = np.array(places)
    lo = min(cached, len(own) - 1)
    extent = KVView(kv[:, :, own].clone()[None])
    extent.data[..., : _unseen(window, own[:lo], own[lo]), :] = float("nan")
    fresh = Span(extent, lo, len(own))
    before = [Stretch(Span(extent, 0, lo), own[:lo])] if lo else []
    calls = own_calls(window, 0, own[lo:], fresh, before)
    for row, place, n in mapped:
        data = torch.full((1, 2, KV_HEADS, n + 4, DIM), float("nan"))
        hidden = _unseen(window, np.arange(place, place + n), own[max(lo, row)])
        data[0, :, :, 2 + hidden : 2 + n] = kv[:, :, place + hidden : place + n]
        stretch = Stretch(Span(KVView(data), 2, 2 + n), place)
        first = max(lo, row)
        calls += span_calls(window, first - lo, own[first:], stretch)
    q = torch.randn(HEADS, len(own) - lo, DIM)
    extras = Extras(softcap, torch.randn(HEADS) if sinks else None)
    got = attend(q, calls, 0.25, cpu.partial, lambda base: None, extras=extras)
    assert torch.allclose(got, dense(q, kv, own[lo:].tolist(), window, extras), atol=2e-5)


def _unseen(window: Window, keys: np.ndarray, row: int) -> int:
    """Return how many first keys no row from ``row`` on sees; reading one of them gives NaN."""
    return sum(not any(seen(window, r, key) for r in (row, row + 1)) for key in keys.tolist())


@pytest.mark.parametrize("window", [Window(8), Window(8, chunked=True)])
def test_a_row_that_stands_alone_sees_a_suffix(window):
    for row in range(40):
        floor = int(window.floor(np.array([row]))[0])
        assert [seen(window, row, key) for key in range(row + 1)] == [key >= floor for key in range(row + 1)]
