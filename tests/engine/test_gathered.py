"""Chunks cut into many spans, through the engine: attended to together, they give the oracle's answers."""

from __future__ import annotations

import pytest
import torch
from engine_kit import TOKENS, assert_same, expected_of, family, ids, logits_of, prompt_of, submit, text_chunk
from families import FEATURES

from mpic.kernels.attention import SpanCall
from mpic.kernels.block_spans import BlockSpanKernel
from mpic.model.loaded import LoadedModel

LONG, OTHER = text_chunk(ids(80, 90)), text_chunk(ids(81, 61))
PROMPTS = [
    prompt_of(LONG, ids(5, 3), OTHER, ids(6, 2)),
    prompt_of(ids(3, 5), OTHER, LONG, ids(4, 4)),
    prompt_of(ids(5, 30), LONG, ids(1, 6), OTHER, LONG, ids(7, 1)),
]
"""Chunks that are first, in the middle, at the end, next to each other, and twice in a prompt."""

CASES = [(name, "random-30") for name in ("llama", *FEATURES, "gemma3_images", "paligemma2")]
CASES += [("llama", "cacheblend-25"), ("llama", "a3-25")]


@pytest.fixture
def gathered(monkeypatch) -> list[SpanCall]:
    """The calls over listed slots that kernels for all of a block's spans were given."""
    made, blocks = [], BlockSpanKernel.blocks

    def watched(kernel, calls, *arguments, **named):
        made.extend(call for call in calls if call.slots is not None)
        return blocks(kernel, calls, *arguments, **named)

    monkeypatch.setattr(BlockSpanKernel, "blocks", watched)
    return made


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_requests_in_one_step_or_in_many_give_the_oracles_answers(name, policy, make_engine, gathered):
    # in a chunk that begins a prompt nothing deviates, so CacheBlend's choice would be one of rounding errors
    prompts = PROMPTS[policy.startswith("cacheblend") :]
    expected = [expected_of(name, prompt, policy) for prompt in prompts]
    for budget in (512, 23):  # whole prompts in one step; slices of prompts, mixed with decoding rows
        engine = make_engine(name, budget=budget)
        gathered.clear()
        streams = [submit(engine, prompt, policy) for prompt in prompts]
        for stream, wanted in zip(streams, expected, strict=True):
            assert_same(logits_of(stream, TOKENS), wanted)
        assert bool(gathered) == bool(family(name).loaded.block_spans)


@pytest.mark.parametrize("policy", ["mpic-8", "legolink-4", "block-1", "attnlink-6"])
def test_policies_that_recompute_first_tokens_make_the_calls_that_they_made(
    policy, make_engine, gathered, monkeypatch
):
    answers = []
    for gathers in (True, False):
        monkeypatch.setattr(LoadedModel, "gathers_spans", gathers)
        engine = make_engine("llama")
        answers.append([logits_of(submit(engine, prompt, policy), TOKENS) for prompt in PROMPTS])
    assert not gathered
    for (_, got), (_, wanted) in zip(*answers, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("attention", ["cpu-flash", "reference"])
@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_torchs_attention_and_the_reference_attend_span_by_span(name, attention, make_engine, gathered):
    loaded = family(name).loaded
    loaded.choose_attention(attention)
    try:
        stream = submit(make_engine(name), PROMPTS[2], "random-30")
        assert_same(logits_of(stream, TOKENS), expected_of(name, PROMPTS[2], "random-30"))
    finally:
        loaded.choose_attention("auto")
    assert not gathered
