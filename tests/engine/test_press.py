"""Compressed chunks on the engine: the link equals full-precision attention over what a press has kept, and chunks that
were compiled differently are never used instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_kit import (
    TOKENS,
    MemoryStore,
    adapter,
    assert_same,
    expected_of,
    family,
    ids,
    logits_of,
    prompt_of,
    submit,
    text_chunk,
    until,
)
from extend_kit import chunks_of
from families import FAMILIES
from oracle import Oracle

from mpic.engine.native.presser import refusal
from mpic.errors import UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link import parse_policy
from mpic.press import PRESSES, LayerKV, parse_press

DOCUMENT, OTHER = text_chunk(ids(7, 41)), text_chunk(ids(8, 33))
PRESSED = [
    "random-50-5",
    "knorm-50-5",
    "streaming-50-5",
    "cur-50-5",
    "leverage-50-5",
    "tova-50-5",
    "snapkv-30-5",
    "knorm-50-5-7",
    "tova-50-5-7",
]
REASONS = dict.fromkeys(
    ("mistral", "gemma3", "gemma2", "gpt_oss", "llama4", "qwen2_vl_window"), "see a window"
)
REASONS |= {"deepseek": "keep latents", "paligemma": "in both directions"}
"""Why some families are refused; others may be too."""


def pressed(chunk: Chunk, press: str) -> Chunk:
    return replace(chunk, press=press)


def prompt_over(name: str, press: str):
    a, b, c = (pressed(chunk, press) for chunk in chunks_of(name))
    return prompt_of(ids(1, 6), a, ids(2, 3), b, c, ids(3, 2), a, ids(4, 4))


def kv_of(engine, chunk: Chunk, policy: str) -> torch.Tensor:
    """``[layers, 2, kv_heads, slots, head_dim]`` of a chunk as the engine keeps it, compiled if it is not there."""
    wrapping = parse_policy(policy).wrapping
    engine.compile(chunk, wrapping).result(60)
    resident = engine.device.chunks[engine.linker.key(chunk, wrapping)]
    return engine.pool.view(resident.extent)[:, :, :, resident.first :].clone()


def kept_of(engine, name: str, chunk: Chunk, policy: str) -> list[torch.Tensor]:
    """Find the tokens of a chunk that are left in each layer and head: those with the same keys and values."""
    whole, left = kv_of(engine, replace(chunk, press=""), policy), kv_of(engine, chunk, policy)
    model, found = family(name).loaded, []
    for layer, kind in enumerate(model.kind_of):
        heads, dim = model.kinds[kind].kv_heads, model.kinds[kind].dim
        now, before = (x[layer, :, :heads, :, :dim] for x in (left, whole))
        same = ((now[:, :, :, None] - before[:, :, None]).abs() < 1e-3).all(-1).all(0)
        assert (same.sum(-1) == 1).all(), "every slot holds one token of the chunk"
        found.append(same.long().argmax(-1))
        assert (found[-1].diff(dim=-1) > 0).all()
    return found


@pytest.mark.parametrize("policy", ["mpic-5", "legolink-0", "packet-5"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_link_of_compressed_chunks_equals_the_oracle_with_the_removed_keys_masked(
    name, policy, make_engine
):
    loaded, engine = family(name).loaded, make_engine(name)
    press = "knorm-50-5" if loaded.mrope > 1 else "leverage-50-5"
    prompt = prompt_over(name, press if policy != "packet-5" else "snapkv-50-5")
    reason = refusal(loaded, parse_press("snapkv-50"))
    assert REASONS.get(name, "") in (reason or "")
    if reason is not None:
        with pytest.raises(UnsupportedParameter, match=f"does not run on model {name}: {reason}"):
            submit(engine, prompt, policy)
        return
    if policy.startswith("packet") and not loaded.takes_packets:
        return
    first = logits_of(submit(engine, prompt, policy), TOKENS)  # compiled in this request
    kept = [kept_of(engine, name, chunk, policy) for chunk in prompt.chunks]
    lengths = [kv_of(engine, replace(chunk, press=""), policy).shape[3] for chunk in prompt.chunks]
    for one, n in zip(kept, lengths, strict=True):
        assert all(tokens.shape[1] == max(n - n // 2, min(n, 5)) for tokens in one)
    assert sum(lengths) > sum(one[0].shape[1] for one in kept)
    expected = expected_of(name, prompt, policy, kept=kept)
    assert_same(first, expected)
    assert_same(logits_of(submit(engine, prompt, policy), TOKENS), expected)


def layers_of(token_ids: tuple[int, ...], observed: int) -> list[LayerKV]:
    """Return every layer of a chunk as a press sees it, from the stock model. A token's unrotated key is its key when
    the chunk is compiled with that token at position 0."""
    loaded = family("llama").loaded
    oracle, inputs = Oracle(family("llama").stock, loaded.mrope), loaded.text_inputs(token_ids)
    moved = [oracle.compile(inputs, 0, loaded.bos_id, -j) for j in range(len(token_ids))]
    compiled, cache, found = oracle.compile(inputs, 0, loaded.bos_id), oracle.cache, []
    for layer, (keys, values) in enumerate(compiled):
        plain = torch.stack([at[layer][0][:, j] for j, at in enumerate(moved)], 1)
        queries = cache.queries[layer][:, len(token_ids) - observed :]
        found.append(LayerKV(layer, keys, values, lambda plain=plain: plain, queries, cache.scaling))
    return found


@pytest.mark.parametrize("press", PRESSED)
def test_the_engine_keeps_of_every_layer_and_head_what_the_press_chooses(press, make_engine):
    engine, chosen = make_engine(pages=64), parse_press(press)
    prompt = prompt_of(ids(1, 6), pressed(DOCUMENT, press), ids(4, 5))
    kept = [kept_of(engine, "llama", chunk, "mpic-5") for chunk in prompt.chunks]
    for tokens, kv in zip(kept[0], layers_of(DOCUMENT.token_ids, chosen.observed(41, 0)), strict=True):
        assert tokens.shape == (2, chosen.slots(41))
        scores, choice = chosen.score(kv), chosen.kept(kv)  # the same token twice has the same key: a tie
        got, best = (scores.gather(1, which).sort(-1).values for which in (tokens, choice))
        assert (got - best).abs().max() < 1e-5 and (tokens[:, :5] == torch.arange(5)).all()
        assert (tokens[:, tokens.shape[1] - chosen.l :] == torch.arange(41 - chosen.l, 41)).all()
    alike = [torch.equal(*tokens) for tokens in kept[0]]
    assert all(alike) if press.startswith(("streaming", "tova")) else not any(alike)
    assert_same(
        logits_of(submit(engine, prompt, "mpic-5"), TOKENS), expected_of("llama", prompt, "mpic-5", kept=kept)
    )


@pytest.mark.parametrize("cls", PRESSES)
def test_every_layer_and_head_of_a_packet_keeps_the_filler_under_keep_filler_alone(cls, make_engine):
    """KV Packet, section 4.4: Keep Filler against Normal, which may remove any token of the wrapped chunk."""
    soft = adapter("llama")
    header, trailer = len(soft.header), len(soft.trailer)
    filler = [*range(header), *range(header + 41, header + 41 + trailer)]
    assert len(filler) == 8
    engine, lost = make_engine(pages=128), 0
    for r in (50, 90):
        chunk = pressed(DOCUMENT, cls(r, header, trailer).name)
        for tokens in kept_of(engine, "llama", chunk, "packet"):
            for head in tokens.tolist():
                assert set(filler) <= set(head)
                assert len(head) == max(49 - 49 * r // 100, len(filler))
        normal = kept_of(engine, "llama", pressed(DOCUMENT, cls(r, 0).name), "packet")
        lost += sum(len(set(filler) - set(head)) for tokens in normal for head in tokens.tolist())
    assert lost > 0
    prompt = prompt_of(ids(1, 6), pressed(DOCUMENT, cls(50, header, trailer).name), ids(4, 5))
    kept = [kept_of(engine, "llama", chunk, "packet") for chunk in prompt.chunks]
    expected = expected_of("llama", prompt, "packet", kept=kept)
    assert_same(logits_of(submit(engine, prompt, "packet"), TOKENS), expected)


@pytest.mark.parametrize("press", [f"{cls.syntax.removesuffix('R')}0" for cls in PRESSES])
def test_nothing_removed_equals_uncompressed_bit_for_bit(press, make_engine):
    prompt = prompt_of(ids(1, 6), DOCUMENT, ids(2, 3), OTHER, ids(4, 5))
    same = prompt_of(ids(1, 6), pressed(DOCUMENT, press), ids(2, 3), pressed(OTHER, press), ids(4, 5))
    for policy in ("mpic-7", "packet"):
        got, expected = (logits_of(submit(make_engine(), p, policy), TOKENS) for p in (same, prompt))
        assert got[0] == expected[0] and torch.equal(got[1], expected[1])


def test_a_short_chunk_of_protected_tokens_alone_stays_whole(make_engine):
    engine = make_engine()
    assert kv_of(engine, text_chunk(ids(3, 12)), "reuse").shape[3] == 12
    assert kv_of(engine, pressed(text_chunk(ids(3, 12)), "tova-90"), "reuse").shape[3] == 12
    assert kv_of(engine, pressed(text_chunk(ids(3, 18)), "tova-90"), "reuse").shape[3] == 16


def test_a_chunk_of_which_only_recomputed_tokens_are_left_is_linked(make_engine):
    engine, chunk = make_engine(), pressed(text_chunk(ids(3, 18)), "tova-90")
    prompt = prompt_of(ids(1, 6), chunk, ids(2, 3), DOCUMENT, ids(4, 5))
    kept = [kept_of(engine, "llama", one, "mpic-16") for one in prompt.chunks]
    expected = expected_of("llama", prompt, "mpic-16", kept=kept)
    assert_same(logits_of(submit(engine, prompt, "mpic-16"), TOKENS), expected)


def test_compiling_in_many_steps_observes_the_same_queries(make_engine):
    chunk = pressed(DOCUMENT, "snapkv-60-4")
    at_once, in_steps = (kv_of(make_engine(budget=budget), chunk, "reuse") for budget in (512, 7))
    assert (at_once - in_steps).abs().max() < 1e-4


def test_compressed_chunks_free_their_pages_and_are_read_again_as_they_were(make_engine):
    store, prompt = MemoryStore(), prompt_of(ids(1, 6), pressed(DOCUMENT, "knorm-50-5"), ids(4, 5))
    first = make_engine(store=store)
    expected = logits_of(submit(first, prompt, "mpic-5"), TOKENS)
    (resident,) = first.device.chunks.values()
    assert resident.extent.tokens == 21 and resident.extent.pages == 3  # pages of 8 tokens; 41 tokens take 6
    first.check()
    until(lambda: store.chunks)
    ((key, chunk),) = store.chunks.items()
    assert key.recipe.press == "knorm-50-5" and chunk.kv.shape[3] == 21 and len(chunk.inputs) == 41
    for damaged in (False, True):  # a chunk that cannot be read is compiled and compressed again
        engine = make_engine(store=store)
        if damaged:
            store.damage(key)
        assert_same(logits_of(submit(engine, prompt, "mpic-5"), TOKENS), expected)
        (resident,) = engine.device.chunks.values()
        until(lambda resident=resident: resident.ready)
        assert resident.extent.tokens == 21 and resident.extent.pages == 3
        engine.check()


def test_presses_share_nothing_with_each_other_or_with_uncompressed_chunks(make_engine):
    engine = make_engine()
    for press in ("", "knorm-50-5", "tova-50-5", "knorm-50-6"):
        prompt = prompt_of(ids(1, 6), pressed(DOCUMENT, press), ids(4, 5))
        usage = submit(engine, prompt, "mpic-5").result().usage
        assert usage.chunks[0].tier == "compiled" and usage.prefix_hit <= 11
    assert len(engine.device.chunks) == 4


def test_one_prompt_may_link_chunks_under_several_presses(make_engine):
    engine = make_engine()
    chunks = [pressed(DOCUMENT, "tova-40-5"), OTHER, pressed(OTHER, "knorm-50-5")]
    prompt = prompt_of(ids(1, 6), chunks[0], ids(2, 3), chunks[1], chunks[2], ids(4, 5))
    kept = [kept_of(engine, "llama", chunk, "mpic-5") for chunk in chunks]
    expected = expected_of("llama", prompt, "mpic-5", kept=kept)
    assert_same(logits_of(submit(engine, prompt, "mpic-5"), TOKENS), expected)


@pytest.mark.parametrize(
    "policy", ["cacheblend-15", "a3-15", "random-15", "attnlink-16", "mpic-17", "legolink-17", "block-2"]
)
def test_policies_that_take_tokens_which_a_press_may_have_removed_are_refused(policy, make_engine):
    prompt = prompt_of(ids(1, 6), pressed(DOCUMENT, "snapkv-50"), ids(4, 5))
    with pytest.raises(UnsupportedParameter, match=f"policy {policy} .*recompute.*press snapkv-50"):
        submit(make_engine(), prompt, policy)


def test_policies_that_read_no_compiled_chunk_do_not_mind_a_press(make_engine):
    engine = make_engine()
    prompt = prompt_of(ids(1, 6), pressed(DOCUMENT, "snapkv-50"), ids(4, 5))
    for policy in ("full", "prefix", "nocache"):
        assert_same(logits_of(submit(engine, prompt, policy), TOKENS), expected_of("llama", prompt, policy))


def test_leverage_scores_are_refused_where_positions_have_several_axes(make_engine):
    engine, chunk = make_engine("qwen2_vl"), pressed(DOCUMENT, "leverage-50")
    with pytest.raises(UnsupportedParameter, match="several axes"):
        engine.compile(chunk).result(60)
    assert parse_press("leverage-50").needs_positions
