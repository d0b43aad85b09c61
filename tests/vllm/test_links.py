"""Links inside vLLM compared with the oracle, one engine per family."""

from __future__ import annotations

import copy

import pytest
import torch
import vllm_kit as kit
from engine_kit import ids, prompt_of
from oracle import Oracle
from vllm_links import BOS, Linker, assert_close, chunks_of, engine, prompt_for, random_adapter

from mpic.link import BARE, Wrapping
from mpic.model.loaded import LoadedModel

FAMILIES = kit.quick_or_parity(("llama", "llava", "qwen2_5_vl", "qwen3_vl"))
POLICIES = ["mpic-0", "mpic-4", "mpic-16", "legolink-4", "legolink-0", "attnlink-4", "block-1"]
POLICIES += ["random-30", "reuse", "packet", "packet-7"]
RECOMPUTE_ALL = "mpic-1000000"


@pytest.fixture(scope="module", params=FAMILIES)
def linker(request, tmp_path_factory):
    files = tmp_path_factory.mktemp("chunks")
    soft, path = random_adapter(request.param), tmp_path_factory.mktemp("packet") / "adapter.safetensors"
    soft.save(path)
    with engine(kit.checkpoint(request.param), files, {"packet": str(path)}) as llm:
        yield Linker(llm, request.param, files, soft)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_link_equals_the_oracle(linker, policy):
    prompt = prompt_for(linker.name)
    (answer,) = linker.run(*zip(linker.link(prompt, policy)))
    assert_close(answer, linker.expected(prompt, policy))
    assert answer.cached > 0


def test_a_plain_request_is_answered_as_transformers_does(linker):
    kit.assert_as_transformers(linker.llm, linker.name)


def plain(linker: Linker) -> dict:
    """Return the same prompt as vLLM's own users send it, images included."""
    prompt = prompt_for(linker.name)
    request, pictures = [], []
    for segment in prompt.segments:
        chunk = getattr(segment, "chunk", None)
        if chunk is None:
            request += segment.token_ids
        elif chunk.token_ids is not None:
            request += chunk.token_ids
        else:
            request += [kit.IMAGE_TOKEN]
            pictures.append(chunk.load_image())
    made = {"prompt_token_ids": request}
    return {**made, "multi_modal_data": {"image": pictures}} if pictures else made


def test_a_link_that_recomputes_all_equals_a_plain_prefill_exactly(linker):
    (full,) = linker.run([plain(linker)], [None])
    (answer,) = linker.run(*zip(linker.link(prompt_for(linker.name), RECOMPUTE_ALL)))
    assert answer.ids == full.ids and answer.prompt == full.prompt
    torch.testing.assert_close(answer.logprobs, full.logprobs, atol=1e-5, rtol=0)
    if linker.name not in kit.VISION:  # the other images in an encoder's batch only change rounding
        assert torch.equal(answer.logprobs, full.logprobs)


def test_links_and_plain_requests_share_a_batch(linker):
    _, b, c = chunks_of(linker.name)
    first, second = prompt_for(linker.name), prompt_of([1, *ids(5, 47)], c, ids(2, 6), b, ids(4, 9))
    (full,) = linker.run([plain(linker)], [None])
    asked = [linker.link(first, "mpic-4"), (plain(linker), None), linker.link(second, "random-30")]
    asked += [linker.link(first, "mpic-16"), ({"prompt_token_ids": [1, *ids(6, 40)]}, None)]
    (alone,) = linker.run([asked[-1][0]], [None])
    answers = linker.run(*zip(*asked, strict=True))
    assert_close(answers[0], linker.expected(first, "mpic-4"))
    assert_close(answers[1], (full.ids, full.logprobs))
    assert_close(answers[2], linker.expected(second, "random-30"))
    assert_close(answers[3], linker.expected(first, "mpic-16"))
    assert_close(answers[4], (alone.ids, alone.logprobs))


def test_blocks_of_links_are_never_found_by_plain_requests(linker):
    prompt = prompt_for(linker.name)
    text = {"prompt_token_ids": linker.order(prompt, "mpic-4")[0]}  # the very ids of the link
    (before,) = linker.run([{**text, "cache_salt": "another"}], [None])
    linker.run(*zip(linker.link(prompt, "mpic-0"), linker.link(prompt, "reuse")))
    (after,) = linker.run([text], [None])
    assert_close(after, (before.ids, before.logprobs))


def test_a_later_turn_with_the_same_salt_finds_its_own_blocks(linker):
    a, b, _ = chunks_of(linker.name)
    start = [[1, *ids(1, 40)], a, ids(2, 30), b, ids(3, 30)]
    first = prompt_of(*start)
    (answer,) = linker.reported(*zip(linker.link(first, "mpic-4", "conversation")))
    assert answer.report["prefix_hit"] == 0 and answer.report["reused"] > 0
    second = prompt_of(*start[:-1], start[-1] + answer.ids + ids(4, 9))
    (answer,) = linker.reported(*zip(linker.link(second, "mpic-4", "conversation")))
    length = len(linker.order(second, "mpic-4")[0])
    assert answer.report["prefix_hit"] >= length - 64 and answer.report["prefix_hit"] % kit.BLOCK == 0
    assert answer.report["recomputed"] < 64 and answer.report["reused"] == 0
    assert answer.ids == linker.expected(second, "mpic-4")[0]
    again = [linker.link(second, "mpic-4", "conversation") for _ in range(3)]
    for answer in linker.run(*zip(*again, strict=True)):
        assert_close(answer, linker.expected(second, "mpic-4"))


@pytest.mark.parametrize("wrapping", [BARE, Wrapping(sink=4), Wrapping(packet=True)])
def test_a_compiled_chunk_is_what_the_native_engine_compiles(linker, wrapping):
    model, processor = kit.stock(linker.name)
    loaded = LoadedModel(copy.deepcopy(model), processor, linker.name)
    oracle = Oracle(model, loaded.mrope)
    for chunk in chunks_of(linker.name):
        given, kv = linker.compiled(chunk, wrapping)
        image = chunk.token_ids is None
        own = loaded.image_inputs(chunk.load_image()) if image else loaded.text_inputs(chunk.token_ids)
        if wrapping.packet:
            own = linker.adapter.wrap(own, loaded.embed)
        assert torch.equal(given.token_ids, own.token_ids) and given.rotary_length == own.rotary_length
        assert torch.equal(given.positions, own.positions) and given.positions.dtype == torch.int64
        for name in ("embeds", "deepstack"):
            torch.testing.assert_close(getattr(given, name), getattr(own, name), atol=1e-4, rtol=0)
        for layer, (keys, values) in zip(kv, oracle.compile(own, wrapping.sink, BOS), strict=True):
            torch.testing.assert_close(layer, torch.stack([keys, values]), atol=1e-4, rtol=0)
