"""Orders as they are checked on arrival, without an engine."""

from __future__ import annotations

import random

import pytest

from mpic.engine.vllm.wire import MAX_CHUNKS, BadOrder, ChunkRef, LinkOrder, parse


def drawn(picked: random.Random) -> LinkOrder:
    """An order with random ranges and chunks, which may leave tokens out."""
    length, chunks, rows, at = 40, [], [], 0
    while (at := at + picked.choice([0, 0, 0, 0, 0, 0, 1, 3])) < length:
        n = min(picked.randint(1, 9), length - at)
        chunks.append(ChunkRef("a.kv", "key", at, n, at))
        at += n
    at = picked.choice([0, 2])
    while at < length - 1:
        rows.append((at, min(length - 1, at + picked.randint(1, 4))))
        at = rows[-1][1] + picked.randint(1, 6)
    if not rows or rows[-1][1] < length - 1:
        rows.append((length - 1, length))
    else:
        rows[-1] = (rows[-1][0], length)
    return LinkOrder(length, length, tuple(rows), tuple(chunks))


def test_an_order_is_taken_if_and_only_if_every_token_is_computed_or_in_a_chunk():
    picked, taken = random.Random(0), 0
    for _ in range(2000):
        order = drawn(picked)
        known = {t for lo, hi in order.rows for t in range(lo, hi)}
        known |= {t for chunk in order.chunks for t in range(chunk.start, chunk.start + chunk.length)}
        if len(known) == order.length:
            taken += 1
            assert parse(order.params(), order.length) == order
        else:
            with pytest.raises(BadOrder, match="neither computed nor in a chunk"):
                parse(order.params(), order.length)
    assert 100 < taken < 1900


@pytest.mark.timeout(120)
def test_an_order_with_as_many_ranges_and_chunks_as_possible_is_checked_in_one_pass():
    """Comparing every range with every chunk would take minutes."""
    length = 16 * MAX_CHUNKS
    chunks = tuple(ChunkRef("a.kv", "key", 16 * i, 16, 16 * i) for i in range(MAX_CHUNKS))
    order = LinkOrder(length, length, tuple((i, i + 1) for i in range(1, length, 2)), chunks)
    assert parse(order.params(), length) == order
