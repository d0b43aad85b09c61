"""Presses: their names, and the tokens they keep, against slow and obvious implementations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpic.errors import UnknownPress, UnsupportedParameter
from mpic.kv.chunk import Recipe
from mpic.link import POLICIES, parse_policy
from mpic.link.pressing import check_presses
from mpic.press import PRESSES, LayerKV, parse_press

HEADS, KV_HEADS, N, DIM = 4, 2, 37, 8


def layer(w: int = 0) -> LayerKV:
    """A layer of a random chunk whose last w tokens are observed."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = drawn(KV_HEADS, N, DIM), drawn(KV_HEADS, N, DIM)
    return LayerKV(3, keys, values, lambda: keys.flip(-1), drawn(HEADS, w, DIM), 0.3)


def attention_of(kv: LayerKV) -> torch.Tensor:
    """``[heads, w, n]``, one row at a time."""
    w = kv.queries.shape[1]
    rows = torch.zeros(HEADS, w, N)
    for head in range(HEADS):
        keys = kv.keys[head // (HEADS // KV_HEADS)]
        for i in range(w):
            seen = N - w + i + 1
            rows[head, i, :seen] = torch.softmax(keys[:seen] @ kv.queries[head, i] * kv.scale, 0)
    return rows


def best(scores: torch.Tensor, m: int, first: int) -> list[int]:
    """The first tokens, and of the others those with the highest scores."""
    others = sorted(range(first, N), key=lambda i: -float(scores[i]))
    return sorted([*range(first), *others[: m - first]])


def test_knorm_keeps_small_keys():
    kv, press = layer(), parse_press("knorm-40-3")
    for head, kept in enumerate(press.kept(kv).tolist()):
        assert kept == best(-kv.keys[head].norm(dim=-1), 23, 3)


def test_streaming_keeps_the_first_and_the_last_tokens():
    assert parse_press("streaming-40-3").kept(layer()).tolist() == [[0, 1, 2, *range(17, 37)]] * 2


def test_cur_keeps_what_is_large_among_its_neighbours():
    kv, press = layer(), parse_press("cur-40-3")
    for head, kept in enumerate(press.kept(kv).tolist()):
        scores = torch.zeros(N)
        for i in range(N):
            window = slice(i // 16 * 16, i // 16 * 16 + 16)
            key, value = (x[head].square().sum(-1) for x in (kv.keys, kv.values))
            scores[i] = key[i] / key[window].sum() * value[i] / value[window].sum()
        assert kept == best(scores, 23, 3)


def test_leverage_is_that_of_the_hat_matrix_of_unrotated_keys():
    kv, press = layer(), parse_press("leverage-40-3")
    for head, kept in enumerate(press.kept(kv).tolist()):
        rows = kv.unrotated()[head].double()
        q, _ = torch.linalg.qr(rows - rows.mean(0))
        assert kept == best(q.square().sum(-1), 23, 3)


def test_leverage_of_large_heads_is_sketched_and_repeatable():
    keys = torch.randn(2, N, 64, generator=torch.Generator().manual_seed(1))
    kv = layer()._replace(keys=keys, values=keys, unrotated=lambda: keys)
    scores = parse_press("leverage-40").score(kv)
    assert torch.equal(scores, parse_press("leverage-40").score(kv)) and scores.isfinite().all()


def test_tova_keeps_what_the_last_token_attends_to_in_all_heads_alike():
    kv, press = layer(1), parse_press("tova-40-3")
    expected = best(attention_of(kv)[:, 0].mean(0), 23, 3)
    assert press.kept(kv).tolist() == [expected, expected]


@pytest.mark.parametrize("w", [5, 16])
def test_snapkv_keeps_its_window_and_what_it_attends_to_with_neighbours(w):
    kv, press = layer(w), parse_press("snapkv-40-3")
    attention = attention_of(kv).mean(1)
    for head, kept in enumerate(press.kept(kv).tolist()):
        mine = attention[2 * head : 2 * head + 2].mean(0)[: N - w]
        pooled = [float(mine[max(0, i - 2) : i + 3].mean()) for i in range(N - w)]
        assert kept == best(torch.tensor([*pooled, *[9.0] * w]), 23, 3)
        assert set(range(N - w, N)) <= set(kept)


def test_what_is_observed_is_a_packets_trailer_or_the_end_of_a_chunk():
    assert parse_press("snapkv-50").observed(100, 0) == 16
    assert parse_press("snapkv-50").observed(9, 0) == 4
    assert parse_press("snapkv-50").observed(1, 0) == 1
    assert parse_press("snapkv-50").observed(100, 8) == 8
    assert parse_press("tova-50").observed(100, 8) == 1
    assert {cls.syntax for cls in PRESSES if cls(50).observed(100, 0)} == {"tova-R", "snapkv-R"}
    assert all(cls.needs_queries == (cls(50).observed(100, 0) > 0) for cls in PRESSES)


@pytest.mark.parametrize("cls", PRESSES)
def test_every_press_keeps_the_first_and_the_last_tokens_that_its_name_protects(cls):
    for r, p, last in ((50, 8, 8), (50, 0, 3), (99, 5, 7), (90, 0, 36), (30, 20, 20), (50, 1000, 1000)):
        press = cls(r, p, last)
        kv = layer(press.observed(N, 0))
        kept, scores = press.kept(kv).tolist(), press.score(kv)
        safe = {i for i in range(N) if i < p or i >= N - last}
        size = max(N - N * r // 100, len(safe))
        assert press.slots(N) == size and len(kept) == KV_HEADS
        for head, tokens in enumerate(kept):
            others = sorted(set(range(N)) - safe, key=lambda i, head=head: -float(scores[head, i]))
            assert tokens == sorted([*safe, *others[: size - len(safe)]])
        assert parse_press(press.name) == press


def test_what_attention_to_the_end_or_the_order_decides_keeps_the_end_unasked():
    """Keep Filler and Normal of a packet are the same tokens under these, once its header is protected."""
    for name, w in (("streaming-40-8", 0), ("snapkv-40-8", 8)):
        kv = layer(w)
        assert torch.equal(parse_press(name).kept(kv), parse_press(f"{name}-8").kept(kv))


@pytest.mark.parametrize("cls", PRESSES)
def test_every_press_leaves_the_same_number_in_every_head_and_the_protected_tokens(cls):
    for r, p in ((0, 16), (10, 16), (50, 5), (99, 2), (50, 1000)):
        press = cls(r, p)
        kept = press.kept(layer(press.observed(N, 0)))
        assert kept.shape == (KV_HEADS, max(N - N * r // 100, min(N, p)))
        assert kept[:, : min(p, N)].tolist() == [list(range(min(p, N)))] * KV_HEADS
        assert parse_press(press.name) == press


def test_names_are_short_where_the_usual_number_is_protected():
    assert parse_press("snapkv-50-16").name == "snapkv-50" and parse_press("snapkv-050").name == "snapkv-50"
    assert parse_press("snapkv-50-4").name == "snapkv-50-4"
    assert parse_press("snapkv-50-16-0").name == "snapkv-50" and parse_press("cur-30-8-0").name == "cur-30-8"
    assert parse_press("cur-30-16-8").name == "cur-30-16-8" and parse_press("cur-30-0").name == "cur-30-0"
    assert parse_press("none") is None and parse_press("") is None


@pytest.mark.parametrize(
    "name", ["snapkv", "snapkv-100", "snapkv--1", "best-50", "snapkv-50-2-3-4", "cur-50--8", "knorm-50 "]
)
def test_unknown_presses_are_refused_with_the_list_or_the_bound(name):
    with pytest.raises(UnknownPress, match=r"available: none, random-R.* last L\)|at most 99 percent"):
        parse_press(name)


def test_more_protected_tokens_than_a_chunk_can_have_are_refused():
    with pytest.raises(UnknownPress, match="at most 1000000 tokens") as refused:
        parse_press("cur-50-8-1000001")
    assert (refused.value.code, refused.value.param) == ("unknown_press", "mpic.press")


def test_a_recipe_without_a_press_keeps_its_digest_and_one_with_it_has_another():
    recipe = Recipe("float32", "raw", 4, "abc")
    assert "press" not in recipe.fields()
    pressed = replace(recipe, press="snapkv-50")
    assert pressed.fields() == {**recipe.fields(), "press": "snapkv-50"} and pressed.digest != recipe.digest
    assert Recipe(**pressed.fields()) == pressed
    assert (recipe.slots(100), pressed.slots(100), pressed.slots(20)) == (100, 50, 16)
    filler = replace(recipe, press="snapkv-50-8-8", packet="def")
    assert (filler.slots(100), filler.slots(20), filler.slots(12)) == (50, 16, 12)


@pytest.mark.parametrize(
    ("press", "packet", "digest"),
    [
        ("", "", "0507066ce7641a4d8b66b51acea67fdc159529be3eb392537ebf9899a1505358"),
        ("snapkv-50", "", "41d2ad349219827a0cc1842f34a7d1349ad711b454fd54b4cffae09bea43ed25"),
        ("knorm-30-0", "abc", "0417362d111498ae3b6795ccb49ecf77b0bb84f18374689c7c10377b718b2279"),
        ("cur-30-5", "abc", "51dabe6e98bed566c590e193132dec9d5497002037e6dfed6615bd21587c85b6"),
    ],
)
def test_chunks_compiled_before_last_tokens_could_be_protected_keep_their_digests(press, packet, digest):
    found = parse_press(press)
    recipe = Recipe("float32", "raw", 4, "abc", packet, press="" if found is None else found.name)
    assert recipe.digest == digest


def test_policies_say_which_first_tokens_they_recompute_and_others_do_not_go_with_presses():
    heads = {"mpic-7": 7, "legolink-9": 9, "legolink-0": 0, "block-2": 32, "reuse": 0, "reuse-2step": 0}
    heads |= {"packet": 0, "packet-4": 4, "cacheblend-15": None, "a3-15": None, "random-15": None}
    heads |= {"attnlink-16": None}
    for name, head in heads.items():
        policy = parse_policy(name)
        assert policy.head == head
        if head is not None and head <= 16:
            check_presses(policy, ["snapkv-50", ""])
            continue
        with pytest.raises(UnsupportedParameter, match="press snapkv-50"):
            check_presses(policy, ["snapkv-50"])
    known = {parse_policy(name).__class__ for name in heads}
    assert known >= {cls for cls in POLICIES if cls.uses_chunks}
    for name, ask in (("snapkv-50", "snapkv-50-17"), ("cur-50-8-8", "cur-50-17-8")):
        with pytest.raises(UnsupportedParameter, match=rf"protects \d+: ask for {ask}$"):
            check_presses(parse_policy("mpic-17"), [name])
        check_presses(parse_policy("mpic-17"), [ask])
    for policy in ("cacheblend-15", "a3-15", "random-15", "attnlink-16"):
        with pytest.raises(UnsupportedParameter, match="press cur-50-8-8 removes some"):
            check_presses(parse_policy(policy), ["cur-50-8-8"])


def test_every_press_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "compression.md").read_text()
    for cls in PRESSES:
        paper = f"[{cls.paper.name}]({cls.paper.url})" if cls.paper else ""
        assert f"| `{cls.syntax}` | {cls.summary} | {paper}".rstrip() in page
