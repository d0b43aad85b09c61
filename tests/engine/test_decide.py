"""Dynamic policies: requests that wait for the same decision share one pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
from engine_kit import (
    TOKENS,
    assert_same,
    expected_of,
    ids,
    logits_of,
    prompt_of,
    request_of,
    submit,
    submit_together,
    text_chunk,
)
from extend_kit import chunks_of

from mpic.engine.native import decide

CHUNKS = [text_chunk(ids(30 + i, 20 + i)) for i in range(3)]
PROMPTS = [
    prompt_of(ids(40 + i, 3 + i), CHUNKS[i], ids(50, 2), CHUNKS[i - 1], ids(60 + i, 4)) for i in range(3)
]


def ask_together(engine, asked):
    requests = [request_of(prompt, policy, TOKENS, logprobs=300) for prompt, policy in asked]
    return [logits_of(stream, TOKENS) for stream in submit_together(engine, requests)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_vl"])
def test_requests_of_one_policy_are_decided_in_one_pass_and_answer_as_alone(name, make_engine):
    engine = make_engine(name)
    a, b, c = chunks_of(name)
    prompts = [prompt_of(ids(1, 6), a, ids(2, 3), b, ids(4, 4)), prompt_of(ids(5, 2), c, a, ids(6, 7))]
    for chunk in (a, b, c):
        engine.compile(chunk).result(60)
    for policy in ("cacheblend-25", "a3-25"):
        before = engine.decider.counters["deciding_passes"]
        got = ask_together(engine, [(prompt, policy) for prompt in prompts])
        assert engine.decider.counters["deciding_passes"] == before + 1
        for answer, prompt in zip(got, prompts, strict=True):
            assert_same(answer, expected_of(name, prompt, policy))


def test_what_has_been_decided_is_answered_before_the_next_prompt_is_looked_at(make_engine, monkeypatch):
    """Else every request of a long queue would wait for all of them to be looked at."""
    engine = make_engine()
    for chunk in CHUNKS:
        engine.compile(chunk).result(60)
    monkeypatch.setattr(decide, "MOST_ROWS", 1)
    events = []
    look, take = engine.decider._look, engine.outputs.take
    monkeypatch.setattr(engine.decider, "_look", lambda group: events.append("look") or look(group))
    monkeypatch.setattr(engine.outputs, "take", lambda *args: events.append("token") or take(*args))
    ask_together(engine, [(prompt, "cacheblend-15") for prompt in PROMPTS])
    looked = [at for at, event in enumerate(events) if event == "look"]
    assert len(looked) == len(PROMPTS) > 2
    assert all("token" in events[one:other] for one, other in pairwise(looked))


def test_policies_that_look_for_different_things_and_too_many_rows_take_passes_of_their_own(
    make_engine, monkeypatch
):
    engine = make_engine()
    for chunk in CHUNKS:
        engine.compile(chunk).result(60)
    policies = ["cacheblend-15", "a3-25", "cacheblend-40"]
    asked = list(zip(PROMPTS, policies, strict=True))
    expected = [expected_of("llama", *one) for one in asked]
    for most, passes in ((2048, 2), (60, 3)):
        monkeypatch.setattr(decide, "MOST_ROWS", most)
        before = engine.decider.counters["deciding_passes"]
        for got, one in zip(ask_together(engine, asked), expected, strict=True):
            assert_same(got, one)
        assert engine.decider.counters["deciding_passes"] - before == passes


def test_a_pass_that_fails_fails_its_own_requests_alone(make_engine, monkeypatch):
    engine = make_engine()
    for chunk in CHUNKS:
        engine.compile(chunk).result(60)
    look = engine.decider._look

    def broken(group):
        if group[0].spec.policy.name.startswith("a3"):
            raise RuntimeError("no memory for that")
        return look(group)

    monkeypatch.setattr(engine.decider, "_look", broken)
    good, bad = submit(engine, PROMPTS[0], "cacheblend-15"), submit(engine, PROMPTS[1], "a3-25")
    with pytest.raises(Exception, match="no memory for that"):
        bad.result()
    assert_same(logits_of(good, TOKENS), expected_of("llama", PROMPTS[0], "cacheblend-15"))
