"""Orders as they are checked on arrival, without an engine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mpic.engine.vllm.wire import MAX_CHUNKS, BadOrder, ChunkRef, LinkOrder, mapped, parse


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


def shared_order(length: int = 20, text: int = 3, base: int = 3) -> LinkOrder:
    """Text, a chunk of which two tokens are computed, text."""
    rows = (0, text + 2), (text + 9, length)
    return LinkOrder(length, length, rows, (ChunkRef("c", "k", text, 9, base),), shared=True)


def test_a_shared_link_comes_with_its_own_tokens_alone():
    order = shared_order()
    assert order.ids(range(20)) == [*range(5), *range(12, 20)] and order.own == 13
    assert parse(order.params(), 13) == order
    assert list(mapped(order)) == [(0, 5, 12, 5)]
    for tokens in (12, 14, 20):
        with pytest.raises(BadOrder, match="the prompt of a shared link has"):
            parse(order.params(), tokens)
    with pytest.raises(BadOrder, match="the order is for 20 tokens"):
        parse(order.params(), 21)
    bad = order.params()
    bad["mpic"]["link"]["shared"] = 1
    with pytest.raises(BadOrder, match="shared must be true or false"):
        parse(bad, 13)


def test_an_order_that_copies_is_as_it_was_before_chunks_were_shared():
    order = replace(shared_order(), shared=False)
    assert "shared" not in order.params()["mpic"]["link"] and order.salt("salt") == "salt"
    assert parse(order.params(), 20) == order and order.ids(range(20)) == list(range(20))


def test_the_salt_of_a_shared_link_says_where_its_tokens_stand():
    """Own tokens that are the same at other places have other keys; a longer prompt begins with the same ones."""
    salt = shared_order().salt("salt")
    assert shared_order(length=35).salt("salt") == salt
    assert salt not in {shared_order().salt("another"), shared_order(text=4, base=4).salt("salt")}
    assert shared_order(base=2).salt("salt") != salt
