"""The invariants of exactness (docs/design.md, "Exactness"), in fp32, for every verified family."""

from __future__ import annotations

import pytest
import torch
from engine_kit import TOKENS, assert_same, expected_of, family, ids, logits_of, prompt_of, submit
from extend_kit import chunks_of
from families import FAMILIES, IMAGE_TOKEN, TYPES
from oracle import Oracle

from mpic.errors import NoAdapter
from mpic.model.selftest import self_test
from mpic_lab.oracle import PREFIX_TYPES

POLICIES = ["full", "prefix", "reuse", "mpic-0", "mpic-5", "mpic-64", "legolink-4", "legolink-0"]
POLICIES += ["attnlink-6", "block-1", "random-30", "cacheblend-25", "nocache"]
POLICIES += ["packet", "packet-7", "a3-25"]
RECOMPUTE_ALL = "mpic-1000000"


def run(engine, prompt, policy: str):
    return logits_of(submit(engine, prompt, policy), TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_load_time_self_test_passes(name):
    assert self_test(family(name).loaded) < 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_full_prefill_equals_the_untouched_model(name, make_engine):
    fam = family(name)
    a, b, c = chunks_of(name)
    prompt = prompt_of(ids(1, 5), a, ids(2, 3), b, ids(3, 2), c, ids(4, 4))
    pictures = [chunk.load_image() for chunk in prompt.chunks if chunk.load_image is not None]
    counts = []
    for segment in prompt.segments:
        image = hasattr(segment, "chunk") and segment.chunk.load_image is not None
        counts.append(len(fam.loaded.image_inputs(segment.chunk.load_image())) if image else 0)
    processor = getattr(fam.loaded.processor, "image_processor", None)
    oracle = Oracle(fam.stock, fam.loaded.mrope, TYPES.get(name), fam.loaded.stand_ins)
    stock = torch.log_softmax(oracle.stock_logits(prompt, processor, pictures, IMAGE_TOKEN, counts), -1)
    for policy in ("full", RECOMPUTE_ALL):  # invariant 1
        _, got = run(make_engine(name), prompt, policy)
        assert (got[0] - stock).abs().max() < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_selective_attention_equals_the_oracle(name, policy, make_engine):
    a, b, c = chunks_of(name)
    prompt = prompt_of(ids(1, 6), a, ids(2, 3), b, c, ids(3, 2), a, ids(4, 4))
    engine = make_engine(name)
    if policy.startswith("packet") and not family(name).loaded.takes_packets:
        with pytest.raises(NoAdapter, match="cannot have packets"):
            run(engine, prompt, policy)
        return
    expected = expected_of(name, prompt, policy)
    for _ in range(2):  # chunks compiled in this request, then found on the device
        assert_same(run(engine, prompt, policy), expected)


EQUAL = [
    *(
        (policy, "full")
        for policy in ("cacheblend-100", "a3-100", RECOMPUTE_ALL, "attnlink-1000000", "random-100")
    ),
    *((policy, "reuse") for policy in ("mpic-0", "cacheblend-0", "a3-0", "attnlink-0", "random-0")),
    ("block-1", "mpic-16"),
    ("packet-0", "packet"),
]


@pytest.mark.parametrize("policy, other", EQUAL)
@pytest.mark.parametrize("name", ["llama", "llava", "qwen3_vl"])
def test_policies_meet_at_their_ends(name, policy, other, make_engine):
    a, b, c = chunks_of(name)
    prompt = prompt_of(ids(1, 6), a, ids(2, 3), b, c, ids(4, 4))
    engine = make_engine(name)
    assert_same(run(engine, prompt, policy), run(engine, prompt, other))


CAUSAL = [name for name in FAMILIES if TYPES.get(name) is not PREFIX_TYPES]
"""Families in which a token does not depend on what follows the text or image that it is of."""


@pytest.mark.parametrize("name", CAUSAL)
def test_a_chunk_that_starts_the_prompt_reused_is_prefix_caching(name, make_engine):
    a, _, _ = chunks_of(name)
    prompt = prompt_of(a, ids(4, 6))
    assert_same(run(make_engine(name), prompt, "reuse"), run(make_engine(name), prompt, "full"))


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_and_order_of_arrival_change_nothing_and_shared_chunks_are_never_written(name, make_engine):
    a, b, c = chunks_of(name)
    prompts = [
        (prompt_of(ids(1, 9), a, ids(2, 3), b, ids(4, 4)), "mpic-5"),
        (prompt_of(ids(5, 4), b, a, ids(2, 8)), "mpic-5"),
        (prompt_of(ids(6, 14)), "prefix"),
        (prompt_of(ids(7, 2), c, ids(8, 5)), "reuse"),
        (prompt_of(ids(9, 30), a, ids(1, 1)), "reuse"),
    ]
    alone = [run(make_engine(name), prompt, policy) for prompt, policy in prompts]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        engine = make_engine(name, budget=24)  # chunked prefill and mixed steps
        streams = {i: submit(engine, *prompts[i]) for i in order}
        for i, stream in streams.items():
            assert_same(logits_of(stream, TOKENS), alone[i])
        engine.check()
        kept = {key: engine.pool.view(r.extent).clone() for key, r in engine.device.chunks.items()}
        run(engine, prompts[1][0], "mpic-5")
        run(engine, prompts[0][0], "reuse")
        for key, before in kept.items():
            assert torch.equal(engine.pool.view(engine.device.chunks[key].extent), before)
