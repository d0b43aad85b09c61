"""KV Packet on the engine: packets are compiled, found, and linked, and never confused with other chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_kit import (
    TOKENS,
    MemoryStore,
    adapter,
    expected_of,
    family,
    ids,
    image_chunk,
    logits_of,
    prompt_of,
    request_of,
    text_chunk,
)
from families import random_image

from mpic.errors import NoAdapter
from mpic.kv.chunk import KVKey
from mpic.link import Need, Wrapping
from mpic.packet.adapter import Adapter

PACKET = Wrapping(packet=True)
DOCUMENT, OTHER = text_chunk(ids(7, 21)), text_chunk(ids(8, 13))


def prompt_over(name: str):
    picture = [image_chunk(random_image(3))] if name in ("llava", "qwen3_vl") else [OTHER]
    return prompt_of(ids(1, 6), DOCUMENT, ids(2, 3), *picture, ids(3, 4), DOCUMENT, ids(4, 5))


def ask(engine, prompt, policy: str):
    return logits_of(engine.submit(request_of(prompt, policy, TOKENS, logprobs=300)), TOKENS)


@pytest.mark.parametrize("name", ["llama", "llava", "qwen3_vl"])
def test_an_adapter_of_no_tokens_equals_reuse_bit_for_bit(name, make_engine):
    soft = adapter(name)
    empty = Adapter(soft.header[:0], soft.trailer[:0], soft.model)
    engine = make_engine(name, adapter=empty)
    prompt = prompt_over(name)
    packet, reuse = ask(engine, prompt, "packet"), ask(engine, prompt, "reuse")
    assert packet[0] == reuse[0] and torch.equal(packet[1], reuse[1])


@pytest.mark.parametrize("policy, plain", [("packet", "reuse"), ("packet-7", "mpic-7")])
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_an_adapter_of_real_tokens_equals_a_chunk_with_those_tokens_written_around_it(
    name, policy, plain, make_engine
):
    before, after = ids(21, 4), ids(22, 3)
    table = family(name).stock.get_input_embeddings().weight.detach()
    real = Adapter(table[before], table[after], adapter(name).model)
    engine = make_engine(name, adapter=real)
    written = [text_chunk([*before, *chunk.token_ids, *after]) for chunk in (DOCUMENT, OTHER)]
    packet = ask(engine, prompt_of(ids(1, 6), DOCUMENT, ids(2, 3), OTHER, ids(4, 5)), policy)
    expected = ask(engine, prompt_of(ids(1, 6), written[0], ids(2, 3), written[1], ids(4, 5)), plain)
    assert packet[0] == expected[0] and (packet[1] - expected[1]).abs().max() < 1e-5


def test_packets_have_a_recipe_of_their_own_and_those_of_another_adapter_are_not_found(make_engine):
    store, prompt = MemoryStore(), prompt_of(ids(1, 6), DOCUMENT, ids(4, 5))
    engine = make_engine(store=store)
    for wrapping in (Wrapping(), PACKET):
        engine.compile(DOCUMENT, wrapping).result(60)
    keys = {key.recipe.packet: key for key in store.chunks}
    assert set(keys) == {"", adapter().digest}
    assert len(store.chunks[keys[adapter().digest]].inputs) == 21 + 8
    tiers = {}
    for number, soft in enumerate((adapter(), adapter("llama", 4, 4))):
        other = make_engine(store=store, adapter=soft)
        answer = other.submit(request_of(prompt, "packet", TOKENS)).result()
        tiers[number] = answer.usage.chunks[0].tier
    assert tiers == {0: "disk", 1: "compiled"}


@pytest.mark.parametrize("name", ["llama", "llava"])
def test_a_packet_that_is_read_again_from_the_store_answers_as_the_oracle(name, make_engine):
    store, prompt = MemoryStore(), prompt_over(name)
    first = make_engine(name, store=store)
    for chunk in prompt.chunks:
        first.compile(chunk, PACKET).result(60)
    expected_ids, expected = expected_of(name, prompt, "packet-7")
    for damaged in (False, True):  # a chunk that cannot be read is compiled again, from its embeddings
        engine = make_engine(name, store=store)
        if damaged:
            for chunk in prompt.chunks:
                store.damage(engine.linker.key(chunk, PACKET))
        answer = engine.submit(request_of(prompt, "packet-7", TOKENS, logprobs=300)).result()
        got_ids, got = logits_of(SimpleNamespace(result=lambda answer=answer: answer), TOKENS)
        assert {use.tier for use in answer.usage.chunks} == ({"compiled"} if damaged else {"disk"})
        assert got_ids == expected_ids and (got - expected).abs().max() < 1e-4


def test_usage_counts_the_adapters_tokens_apart(make_engine):
    engine = make_engine()
    prompt = prompt_of(ids(1, 6), DOCUMENT, ids(2, 3), OTHER, ids(4, 5))
    for policy, packet, recomputed in (("reuse", 0, 0), ("packet", 16, 0), ("packet-7", 16, 14)):
        usage = engine.submit(request_of(prompt, policy, TOKENS)).result().usage
        assert (usage.packet, usage.recomputed) == (packet, recomputed)
        assert usage.prompt_tokens == 6 + 21 + 3 + 13 + 5 + packet
        assert usage.prompt_tokens == usage.reused + usage.prefix_hit + usage.computed


def test_an_engine_without_an_adapter_refuses_packets_and_does_not_offer_them(make_engine):
    engine = make_engine(adapter=None)
    assert Need.PACKET not in engine.provides and not {"packet", "packet-K"} & set(engine.policies())
    assert {"packet", "packet-K"} <= set(make_engine().policies())
    with pytest.raises(NoAdapter, match=r"model llama has none.*mpic train packet --model"):
        engine.submit(request_of(prompt_of(ids(1, 6), DOCUMENT, ids(4, 5)), "packet"))
    with pytest.raises(NoAdapter):
        engine.compile(DOCUMENT, PACKET).result(60)


def test_a_deleted_chunk_takes_its_packet_along(make_engine):
    engine = make_engine()
    prompt = prompt_of(ids(1, 6), DOCUMENT, ids(4, 5))
    engine.submit(request_of(prompt, "packet-7", TOKENS)).result()
    assert any(isinstance(key, KVKey) and key.recipe.packet for key in engine.device.chunks)
    engine.forget(DOCUMENT)
    assert not engine.device.chunks
    usage = engine.submit(request_of(prompt, "packet-7", TOKENS)).result().usage
    assert usage.chunks[0].tier == "compiled" and usage.prefix_hit == 0
