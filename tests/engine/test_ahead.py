"""Decoding one step ahead gives the answers, usages and caches of decoding step by step, and reads a step's tokens only
when the next step has been launched."""

from __future__ import annotations

from dataclasses import fields
from unittest.mock import Mock

import pytest
from engine_kit import family, ids, prompt_of, request_of, submit_together, text_chunk, until
from extend_kit import Lookup, Words
from threads_kit import started

from mpic.engine.base import GenerationRequest, GenerationUsage, Sampling
from mpic.engine.native import sampling, static_decode
from mpic.engine.native.cuda_executor import CudaExecutor
from mpic.engine.native.sampling import Drawing
from mpic.errors import EngineStopped
from mpic.link import parse_policy

SHARED, OTHER = text_chunk(ids(70, 40)), text_chunk(ids(71, 23))
PROMPTS = [
    prompt_of(ids(1, 5), SHARED, ids(2, 4), OTHER, ids(3, 3)),
    prompt_of(ids(4, 5), SHARED, ids(5, 4)),
    prompt_of(ids(6, 9)),
    prompt_of(ids(7, 3), OTHER, ids(8, 3)),
]
TOKENS = (14, 6, 3, 9)
VARYING = {field.name for field in fields(GenerationUsage) if field.name.endswith("_ms")} | {
    "chunks",
    "compiled",
}
"""Times, and which of several requests compiles a chunk for all of them."""


@pytest.fixture(autouse=True)
def spelled(monkeypatch):
    monkeypatch.setattr(family("llama").loaded, "tokenizer", Words())


def counts(usage: GenerationUsage) -> dict:
    found = {field.name: getattr(usage, field.name) for field in fields(usage) if field.name not in VARYING}
    return found | {"reused_of": [use.reused for use in usage.chunks]}


def asked(prompts=PROMPTS, tokens=TOKENS, policy="mpic-4", **options):
    """Requests that join at once and leave at different steps."""
    return [request_of(p, policy, n, **options) for p, n in zip(prompts, tokens, strict=True)]


def run(engine, requests) -> list:
    answers = [stream.result() for stream in submit_together(engine, requests)]
    engine.check()
    return [(a.text, list(a.token_ids), a.finish_reason, counts(a.usage)) for a in answers]


@pytest.fixture
def both(make_engine):
    """Answers of an engine that decodes step by step, of one that goes ahead, and the second one's counters."""

    def compare(requests, **options) -> dict:
        usual = options | {"cuda_graphs": "off"}  # static steps take long where Triton is interpreted
        expected = run(make_engine(ahead=False, **usual), requests)
        engine = make_engine(ahead=True, **options)
        assert run(engine, requests) == expected
        return engine.stats()["counters"]

    return compare


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "seed": 6},
        {"temperature": 1.3, "top_k": 7, "seed": 7},
    ],
    ids=str,
)
def test_answers_and_usages_are_those_of_single_steps(both, options):
    counters = both(asked(**options))
    assert counters["steps_ahead"] >= 8


def test_tokens_that_the_host_has_to_draw_again_are_not_gone_ahead_with(both, monkeypatch):
    """Too few candidates for a wide distribution: the device says so instead of a token."""
    monkeypatch.setattr(sampling, "CANDIDATES", 3)
    monkeypatch.setattr(sampling, "_WIDE", 2)
    counters = both(asked(temperature=3.0, top_p=0.9, seed=8))
    assert counters["steps_ahead"] and counters["rows_ahead_discarded"]


def test_a_stop_string_ends_one_answer_and_no_token_behind_it_is_seen(both, make_engine):
    plain = make_engine()
    words = [request_of(prompt, "mpic-4", 14) for prompt in PROMPTS]
    fifth = plain.submit(words[0]).result().token_ids[4]
    stop = (f"[{fifth}]",)
    requests = [request_of(PROMPTS[0], "mpic-4", 14, stop=stop), *words[1:]]
    counters = both(requests)
    assert counters["rows_ahead_discarded"] >= 1


def test_an_answer_that_ends_by_its_own_token_is_not_continued(both, make_engine, monkeypatch):
    fifth = make_engine().submit(request_of(PROMPTS[0], "mpic-4", 14)).result().token_ids[4]
    monkeypatch.setattr(type(family("llama").loaded), "eos_ids", frozenset({fifth}))
    requests = [
        GenerationRequest(f"r{i}", prompt, parse_policy("mpic-4"), Sampling(max_tokens=14))
        for i, prompt in enumerate(PROMPTS)
    ]
    assert both(requests)["rows_ahead_discarded"] >= 1


def test_what_an_answer_left_in_the_prefix_cache_is_found_and_right(make_engine):
    """The discarded row has written KV of a token that the answer does not have."""
    found = []
    for ahead in (False, True):
        engine = make_engine(ahead=ahead)
        first = engine.submit(request_of(PROMPTS[0], "prefix", 14)).result()
        stop = (f"[{first.token_ids[6]}]",)
        engine = make_engine(ahead=ahead)
        (stopped,) = run(engine, [request_of(PROMPTS[0], "prefix", 14, stop=stop)])
        again = prompt_of(ids(1, 5), SHARED, ids(2, 4), OTHER, [*ids(3, 3), *stopped[1], *ids(9, 30)])
        found.append((stopped, run(engine, [request_of(again, "prefix", 8)])))
    assert found[0] == found[1]


def test_log_probabilities_take_one_step_after_the_other(both):
    assert "steps_ahead" not in both(asked(logprobs=3))


def test_answers_that_outgrow_their_memory_are_moved_and_preempted_as_before(both, monkeypatch):
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 4)
    prompts = [prompt_of(ids(i, 20), SHARED, ids(40 + i, 9)) for i in range(4)]
    requests = asked(prompts, (60,) * 4, temperature=1.0, seed=3)
    counters = both(requests, pages=30)
    assert counters["preemptions"] and counters["steps_ahead"]


def test_a_request_that_arrives_meanwhile_is_scheduled_after_the_step_that_was_launched(make_engine):
    alone = [run(make_engine(ahead=False), [request])[0][:3] for request in asked()]
    engine = make_engine(ahead=True)
    streams = []
    for request in asked():
        streams.append(iter(engine.submit(request)))
        next(streams[-1])
    rest = [list(stream) for stream in streams]
    assert [deltas[-1].finish_reason for deltas in rest] == [reason for _, _, reason in alone]
    for deltas, (text, tokens, _) in zip(rest, alone, strict=True):
        assert text.endswith("".join(delta.text for delta in deltas))
        assert tokens[1:] == [token for delta in deltas for token in delta.token_ids]


def test_a_request_that_arrives_does_not_wait_for_the_answers_that_run(make_engine, monkeypatch):
    """It comes when the next step has been launched already."""
    engine, choices, asked, generated = make_engine(ahead=True), Drawing.choices, [], []

    def read(self):
        counters = engine.stats()["counters"]
        if engine.ahead._launched is not None and not asked:
            asked.append(engine.submit(request_of(PROMPTS[1], "full", 4)))
        elif counters.get("finished_length") and not generated:
            generated.append(counters["generated"])
        return choices(self)

    monkeypatch.setattr(Drawing, "choices", read)
    first = engine.submit(request_of(PROMPTS[2], "full", 240))
    assert len(first.result().token_ids) == 240 and len(asked[0].result().token_ids) == 4
    assert generated[0] < 200, "when the second answer had ended"
    assert engine.stats()["counters"]["steps_ahead"] > 100


def test_an_aborted_answer_disturbs_nobody_and_frees_its_memory(make_engine):
    (expected,) = run(make_engine(ahead=False), [request_of(PROMPTS[1], "full", 60)])
    engine = make_engine(ahead=True)
    requests = [request_of(PROMPTS[2], "full", 900), request_of(PROMPTS[1], "full", 60)]
    aborted, stays = submit_together(engine, requests)
    for _, _ in zip(range(3), aborted, strict=False):
        pass
    aborted.abort()
    assert list(stays.result().token_ids) == expected[1]
    until(lambda: engine.scheduler.idle)


def test_an_answer_that_searches_is_paused_behind_its_call(make_engine):
    answers = []
    call = list(make_engine().submit(request_of(PROMPTS[1], "mpic-4", 3)).result().token_ids)
    for ahead in (False, True):
        engine = make_engine(ahead=ahead)
        lookup = Lookup(call, OTHER)
        settings = Sampling(max_tokens=12, ignore_eos=True)
        request = GenerationRequest("r", PROMPTS[1], parse_policy("mpic-4"), settings, retrieval=lookup)
        answer = engine.submit(request).result()
        assert len(lookup.calls) == 1
        answers.append((answer.text, list(answer.token_ids), answer.usage.prompt_tokens))
        engine.check()
    assert engine.stats()["counters"]["rows_ahead_discarded"] == 1
    assert answers[0] == answers[1]


def test_a_steps_tokens_are_read_when_the_next_step_has_been_launched(make_engine, monkeypatch):
    engine = make_engine(ahead=True)
    events, launch, choices = [], engine.executor.run, Drawing.choices

    def launched(*args, **options):
        events.append("launch")
        return launch(*args, **options)

    def read(self):
        events.append("read")
        return choices(self)

    monkeypatch.setattr(engine.executor, "run", launched)
    monkeypatch.setattr(Drawing, "choices", read)
    run(engine, [request_of(PROMPTS[2], "full", 6)])
    # the prompt's step, and the last one, which is known to be the last, have nothing launched behind them
    assert events == ["launch", "read", *["launch"] * 2, "read", *["launch", "read"] * 3, "read"]


def test_a_failed_step_is_not_gone_ahead_from(make_engine, monkeypatch):
    engine = make_engine(ahead=True)
    launch, failed = engine.executor.run, []

    def failing(slices, barrier=None, ids=None):
        if ids is not None and not failed:
            failed.append(1)
            raise RuntimeError("the device is lost")
        return launch(slices, barrier, ids)

    monkeypatch.setattr(engine.executor, "run", failing)
    with pytest.raises(Exception, match="the device is lost"):
        engine.submit(request_of(PROMPTS[2], "full", 6)).result()
    assert len(engine.submit(request_of(PROMPTS[2], "full", 6)).result().token_ids) == 6


def test_an_engine_that_is_closed_with_a_step_launched_ends_its_answers_with_the_reason(
    make_engine, monkeypatch
):
    engine, choices, closing = make_engine(ahead=True), Drawing.choices, []

    def read(self):
        if engine.ahead._launched is not None and not closing:
            closing.append(started(engine.close))
            until(lambda: engine._inbox.closed)
        return choices(self)

    monkeypatch.setattr(Drawing, "choices", read)
    for stream in submit_together(engine, [request_of(prompt, "full", 900) for prompt in PROMPTS[1:3]]):
        with pytest.raises(EngineStopped):
            stream.result()
    closing[0].join(60)
    assert not closing[0].is_alive() and not engine._thread.is_alive()
    engine.device.check()  # no extent is left to a request


def test_a_step_whose_tokens_cannot_be_read_ends_its_answers_and_the_next_are_right(make_engine, monkeypatch):
    """The device fails while the tokens of a step are on their way, behind which another one has been launched."""
    (expected,) = run(make_engine(ahead=False), [request_of(PROMPTS[2], "full", 6)])
    engine, draw, fetch, failing = make_engine(ahead=True), sampling._draw, sampling._fetch, []
    broken = Mock(side_effect=RuntimeError("the device is lost"))

    def fetched(tokens):
        failing.append(engine.ahead._launched is None and len(failing) == 3)
        return broken if failing[-1] else fetch(tokens)

    def drawn(logits, *rest):
        return broken() if failing and failing[-1] else draw(logits, *rest)

    monkeypatch.setattr(sampling, "_fetch", fetched)
    monkeypatch.setattr(sampling, "_draw", drawn)
    with pytest.raises(Exception, match="the device is lost"):
        engine.submit(request_of(PROMPTS[2], "full", 9)).result()
    assert any(failing) and engine.stats()["counters"]["steps_ahead"] > 1
    failing.clear()
    monkeypatch.setattr(sampling, "_fetch", fetch)
    monkeypatch.setattr(sampling, "_draw", draw)
    assert run(engine, [request_of(PROMPTS[2], "full", 6)]) == [expected]
    assert engine.ahead._launched is None


def test_static_steps_go_ahead_too(both, monkeypatch):
    """Their logits lie where the next step writes its own, and are needed again where the host draws."""
    monkeypatch.setattr(sampling, "CANDIDATES", 3)
    monkeypatch.setattr(sampling, "_WIDE", 1)
    monkeypatch.setattr(static_decode, "bucket_sizes", lambda most: [4, 1])
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 16)
    given = lambda model, pool, budget, most, choice: CudaExecutor(model, pool, budget, 4, choice)
    monkeypatch.setattr("mpic.engine.native.engine.executor_for", given)
    requests = asked(PROMPTS[1:3], (5, 3), temperature=3.0, top_p=0.9, seed=5)
    counters = both(requests, cuda_graphs="on", pages=64, page_size=16)
    assert counters["static_steps"] >= 3 and counters["steps_ahead"] >= 2


def test_a_discarded_steps_logits_are_those_of_the_rows_that_go_on(make_engine):
    """Three answers of which the middle one stops unforeseen: the others' rows keep their order."""
    engine = make_engine(ahead=False)
    tokens = [engine.submit(request_of(p, "mpic-4", 12)).result().token_ids for p in PROMPTS[:3]]
    stop = (f"[{tokens[1][3]}]",)
    engine = make_engine(ahead=True)
    requests = [request_of(p, "mpic-4", 12, stop=stop if i == 1 else ()) for i, p in enumerate(PROMPTS[:3])]
    answers = run(engine, requests)
    assert [answers[0][1], answers[2][1]] == [list(tokens[0]), list(tokens[2])]
    assert answers[1][2] == "stop" and answers[1][1] == list(tokens[1][: len(answers[1][1])])
    assert engine.stats()["counters"]["rows_ahead_discarded"] >= 1
