"""Retrieval while decoding: references linked in the middle of an answer equal references that were there from the
start."""

from __future__ import annotations

import random
import threading

import pytest
from engine_kit import MemoryStore, assert_same, expected_of, ids, logits_of, prompt_of, until
from extend_kit import (
    NAMES,
    POLICIES,
    SAID,
    Lookup,
    ask,
    begun,
    chunks_of,
    extended,
    from_the_start,
    searching,
    spell,
)

from mpic.engine.base import Hit
from mpic.engine.detokenize import FIRST_TOKENS


@pytest.fixture(autouse=True)
def spelled(monkeypatch):
    spell(monkeypatch)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_the_middle_of_an_answer_equals_one_from_the_start_and_the_oracle(
    name, policy, make_engine
):
    engine = make_engine(name)
    prompt, call, (a, document, b) = begun(engine, policy, name)
    lookup = Lookup(call, b, document, a)
    got_ids, got = logits_of(ask(engine, prompt, policy, SAID + 4, lookup), SAID + 4)
    assert got_ids[:SAID] == call and len(lookup.calls) == 1
    linked = got_ids[SAID:], got[SAID:]
    assert_same(linked, extended(name, prompt, policy, call, lookup, b, document, a))
    whole = from_the_start(prompt, call, lookup.insert([Hit(c, {}) for c in (b, document, a)], 1))
    assert_same(linked, logits_of(ask(make_engine(name), whole, policy, 4), 4))


@pytest.mark.parametrize("trigger", ["prompted", "confidence"])
@pytest.mark.parametrize("policy", ["full", "mpic-5"])
def test_a_link_by_another_trigger_equals_one_from_the_start_too(policy, trigger, make_engine):
    engine = make_engine()
    prompt, call, (a, document, _) = begun(engine, policy)
    lookup = Lookup(call, a, document)
    lookup.trigger, said = trigger, SAID
    if trigger == "confidence":
        lookup.confidence, said = 1.0, FIRST_TOKENS
        call = logits_of(ask(engine, prompt, policy, said), said)[0]
    else:  # a line that is complete at once
        lookup.opens, said = f"[{call[0]}]", 1
        engine.builder._model.tokenizer.newline = call[0]
        call = call[:1]
    got_ids, got = logits_of(ask(engine, prompt, policy, said + 4, lookup), said + 4)
    assert got_ids[:said] == call and len(lookup.calls) == 1
    linked = got_ids[said:], got[said:]
    whole = from_the_start(prompt, call, lookup.insert([Hit(c, {}) for c in (a, document)], 1))
    assert_same(linked, logits_of(ask(make_engine(), whole, policy, 4), 4))


def test_the_usage_counts_what_was_inserted_as_prompt_and_says_what_was_found(make_engine):
    engine = make_engine()
    prompt, call, (_, document, b) = begun(engine, "mpic-5")
    deltas = list(ask(engine, prompt, "mpic-5", SAID + 2, Lookup(call, b, document)))
    usage = deltas[-1].usage
    inserted = 2 + 12 + 2 + 21 + 3
    assert usage.prompt_tokens == 6 + 17 + 4 + inserted
    assert usage.prompt_tokens == usage.reused + usage.prefix_hit + usage.computed
    assert usage.completion_tokens == SAID + 2 and usage.recomputed == 3 * 5
    (round,) = usage.retrieval
    assert (round.query, round.at, round.tokens, round.reused) == ("what?", SAID, inserted, 12 + 21 - 10)
    assert [c["id"] for c in round.citations] == [b.label, document.label] and round.error is None
    assert round.search_ms > 0 and round.link_ms > 0
    assert [len(use.key) > 0 and use.tokens for use in usage.chunks] == [17, 12, 21]
    (event,) = [d for d in deltas if d.retrieval is not None]
    assert event.retrieval.citations == round.citations and deltas.index(event) == SAID
    assert "".join(d.text for d in deltas) == "".join(f"[{i}]" for d in deltas[SAID:] for i in d.token_ids)


def test_only_the_new_own_tokens_are_computed(make_engine):
    engine = make_engine()
    a, document, b = chunks_of("llama")
    for future in [engine.compile(c) for c in (a, b, document)]:
        future.result()
    prompt = prompt_of(ids(1, 60), a, ids(4, 4))
    call, _ = logits_of(ask(engine, prompt, "reuse", SAID), SAID)
    before = engine.stats()["counters"]["rows"]
    ask(engine, prompt, "reuse", SAID + 2, Lookup(call, b, document)).result()
    # the prompt's last token (the rest is a prefix hit), two of the call, then the last of the call and 7 markers, one
    assert engine.stats()["counters"]["rows"] - before == 1 + 2 + (1 + 7) + 1


def test_other_requests_go_on_while_one_searches(make_engine):
    engine = make_engine()
    _, document, _ = chunks_of("llama")
    _, lookup, paused = searching(engine, "reuse", SAID + 2)
    other, _ = logits_of(ask(engine, prompt_of(ids(5, 9), document, ids(6, 3)), "reuse", 30), 30)
    assert len(other) == 30 and engine.stats()["searching"] == 1
    lookup.gate.set()
    assert len(paused.result().token_ids) == SAID + 2
    assert engine.stats()["searching"] == 0


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_batches_and_preemption_change_nothing(name, make_engine):
    a, document, b = chunks_of(name)
    prompts = [prompt_of(ids(i, 9 + i), a if i % 2 else document, ids(20 + i, 3)) for i in range(4)]
    plain = make_engine(name)
    calls = [logits_of(ask(plain, p, "mpic-5", SAID), SAID)[0] for p in prompts]
    alone = []
    for p, call in zip(prompts, calls, strict=True):
        alone.append(logits_of(ask(make_engine(name), p, "mpic-5", 12, Lookup(call, b, document)), 12))
    tight = 20
    preempted = 0
    for pages, order in ((tight, [0, 1, 2, 3]), (tight + 4, [3, 1, 0, 2]), (256, [2, 3, 0, 1])):
        engine = make_engine(name, pages=pages, budget=24)
        streams = {}
        for i in order:
            retrieval = Lookup(calls[i], b, document) if i != 2 else None
            streams[i] = ask(engine, prompts[i], "mpic-5", 12, retrieval)
        for i, stream in streams.items():
            if i == 2:
                stream.result()
                continue
            assert_same(logits_of(stream, 12), alone[i])
        engine.check()
        preempted += engine.stats()["counters"].get("preemptions", 0)
    assert preempted


def test_a_request_that_is_preempted_while_it_searches_goes_on_where_it_was(make_engine):
    engine = make_engine()
    prompt, lookup, stream = searching(engine, "reuse", 8)
    _, call, (_, _, b) = begun(make_engine())
    expected, _ = logits_of(ask(make_engine(), prompt, "reuse", 8, Lookup(call, b)), 8)
    done = threading.Event()

    def make_way() -> None:
        (sequence,) = engine.scheduler.running
        engine.scheduler.preempt(sequence)
        done.set()

    engine._post(make_way)
    assert done.wait(60)
    engine.check()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0 and engine.stats()["searching"] == 1
    lookup.gate.set()
    answer = stream.result()
    assert list(answer.token_ids) == expected and answer.usage.preemptions == 1


def test_several_rounds_up_to_the_limit_and_a_call_beyond_ends_the_answer(make_engine):
    engine = make_engine()
    a, _, b = chunks_of("llama")
    prompt = prompt_of(ids(1, 6), a, ids(4, 4))
    first, _ = logits_of(ask(engine, prompt, "reuse", 1), 1)
    token = first[0]

    class Always(Lookup):
        """A tokenizer with which every token is a call."""

        def __init__(self, rounds):
            super().__init__([token, token], b, rounds=rounds)

    lookup = Always(2)
    lookup.opens, lookup.closes = "[", "]"
    answer = ask(engine, prompt, "reuse", 20, lookup).result()
    assert len(answer.token_ids) == 3 and answer.finish_reason == "stop" and answer.text == ""
    assert [r.error for r in answer.usage.retrieval] == [None, None, "rounds"]
    assert [r.at for r in answer.usage.retrieval] == [1, 2, 3] and lookup.calls[0] == str(token)
    one = from_the_start(prompt, [token], lookup.insert([Hit(b, {})], 1))
    second = int(answer.token_ids[1])
    two = from_the_start(one, [second], lookup.insert([Hit(b, {})], 2))
    assert expected_of("llama", one, "reuse", 1)[0] == [second]
    assert expected_of("llama", two, "reuse", 1)[0] == [int(answer.token_ids[2])]


def test_a_stored_reference_is_read_and_a_missing_one_compiled_while_it_is_linked(make_engine):
    store = MemoryStore()
    make_engine(store=store).compile(chunks_of("llama")[1]).result()
    engine = make_engine(store=store)
    prompt, call, (_, document, b) = begun(engine)
    steps = engine.stats()["counters"]["steps"]
    answer = ask(engine, prompt, "reuse", SAID + 2, Lookup(call, b)).result()
    # prefill, two of the call, compile and link in one, one more token
    assert engine.stats()["counters"]["steps"] - steps == 1 + 2 + 1 + 1
    assert answer.usage.chunks[1].tier == "compiled"
    answer = ask(engine, prompt, "reuse", SAID + 2, Lookup(call, document)).result()
    assert answer.usage.chunks[1].tier == "disk"


def test_prefetch_brings_a_stored_chunk_to_the_device_and_ignores_others(make_engine):
    store = MemoryStore()
    _, document, b = chunks_of("llama")
    make_engine(store=store).compile(document).result()
    engine = make_engine(store=store)
    for chunk in (document, document, b):
        engine.prefetch(chunk)
    until(lambda: any(r.ready for r in list(engine.device.chunks.values())))
    assert [key.chunk for key in engine.device.chunks] == [document.key] and store.reads == 1
    answer = ask(engine, prompt_of(ids(1, 3), document, ids(2, 3)), "reuse", 2).result()
    assert answer.usage.chunks[0].tier == "device"


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_of_requests_that_search_equal_the_oracle(seed, make_engine):
    rng = random.Random(seed)
    name = ["llama", "llava", "qwen2_vl", "qwen3_vl"][seed]
    pool = chunks_of(name)
    plain, jobs = make_engine(name), []
    for _ in range(5):
        parts = [ids(rng.randrange(99), rng.randint(1, 9)) for _ in "ab"]
        prompt = prompt_of(parts[0], rng.choice(pool), parts[1])
        policy = rng.choice(POLICIES)
        call, _ = logits_of(ask(plain, prompt, policy, rng.randint(2, 4)), 4)
        jobs.append((prompt, policy, call, [rng.choice(pool) for _ in range(rng.randint(0, 3))]))
    engine = make_engine(name, pages=rng.choice([44, 256]), budget=rng.choice([9, 40, 512]))
    streams = [ask(engine, p, policy, len(c) + 4, Lookup(c, *found)) for p, policy, c, found in jobs]
    for (prompt, policy, call, found), stream in zip(jobs, streams, strict=True):
        got_ids, got = logits_of(stream, len(call) + 4)
        assert got_ids[: len(call)] == call
        rest = got_ids[len(call) :], got[len(call) :]
        assert_same(rest, extended(name, prompt, policy, call, Lookup(call), *found))


def test_repetition_is_penalized_of_references_that_came_in_the_middle_of_an_answer(make_engine):
    engine, (a, document, _) = make_engine(), chunks_of("llama")
    prompt, penalty = prompt_of(ids(1, 6), a, ids(4, 4)), {"repetition_penalty": 0.1}  # repeats
    call = logits_of(ask(engine, prompt, "full", SAID, **penalty), SAID)[0]
    lookup = Lookup(call, document)
    found = ask(engine, prompt, "full", SAID + 8, lookup, **penalty).result().token_ids[SAID:]
    whole = from_the_start(prompt, call, lookup.insert([Hit(document, {})], 1))
    assert found == ask(make_engine(), whole, "full", 8, **penalty).result().token_ids
    assert found != ask(make_engine(), whole, "full", 8).result().token_ids
