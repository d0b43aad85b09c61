"""Requests on the engine's event loop, with a stub in vLLM's place that computes nothing."""

from __future__ import annotations

import errno
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine_kit import ids, prompt_of, request_of, text_chunk, until
from extend_kit import Lookup
from threads_kit import started
from vllm_stub import CHUNK, Stub, hold, request, stubbed_engine

from mpic.config import EngineConfig
from mpic.engine import detokenize
from mpic.engine.detokenize import FIRST_TOKENS
from mpic.engine.vllm.frontend import compiled as exported
from mpic.engine.vllm.frontend import engine as module
from mpic.engine.vllm.frontend import spool
from mpic.errors import (
    CompileFailed,
    EngineStopped,
    MPICError,
    NoAdapter,
)
from mpic.kv.chunk import ChunkInputs
from mpic.link import Wrapping
from mpic.packet.adapter import Adapter


@pytest.fixture
def engine(monkeypatch):
    with stubbed_engine(monkeypatch) as engine:
        yield engine


def test_a_request_aborted_before_its_first_step_ends_its_stream(engine):
    go = hold(engine)
    stream = engine.submit(request())
    stream.abort()
    go.set()
    assert stream.result().finish_reason == "abort"
    assert engine.counters["finished_abort"] == 1


def test_a_request_that_comes_while_the_engine_closes_ends_with_an_error(engine):
    go = hold(engine)
    stream = engine.submit(request())
    closing = started(engine.close)
    until(lambda: engine._stopping)
    go.set()
    with pytest.raises(EngineStopped):
        stream.result()
    closing.join()


def test_an_answer_that_ends_by_a_stop_string_says_which_chunks_were_computed_instead(engine):
    engine.client.go.set()
    prompt = prompt_of(ids(1, 9), CHUNK, ids(2, 3))
    answer = engine.submit(request_of(prompt, "reuse", 8, stop=("cd",))).result()
    assert (answer.text, answer.finish_reason, answer.stop) == ("ab", "stop", "cd")
    [use] = answer.usage.chunks
    assert (use.tier, use.reason, use.reused) == ("none", "corrupt", 0) and answer.usage.reused == 0


def test_a_chunk_that_was_computed_before_a_search_is_not_reported_as_reused_after_it(engine):
    engine.client.go.set()
    found = text_chunk(ids(6, 5))
    lookup = Lookup([0, 0], found)
    lookup.opens, lookup.closes = "b", "c"
    asked = request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 4)
    answer = engine.submit(replace(asked, retrieval=lookup, trace=True)).result()
    usage = answer.usage
    assert len(usage.retrieval) == 1 and len(lookup.calls) == 1
    uses = [(use.tier, use.reason, use.reused, use.recomputed) for use in usage.chunks]
    assert uses == [("none", "corrupt", 0, 5), ("compiled", "new", 5, 0)]
    assert (usage.reused, usage.recomputed) == (5, 5)
    assert "recomputed" in {span.state for span in usage.trace}


@pytest.mark.parametrize("trigger", ["prompted", "confidence"])
def test_a_line_or_improbable_first_tokens_search_on_this_engine_too(
    trigger, engine, interrupted, monkeypatch
):
    interrupted.times = 0
    monkeypatch.setattr(detokenize, "_LONGEST_LINE", 2)
    found = text_chunk(ids(6, 5))
    lookup = Lookup([0, 0], found)
    lookup.trigger, lookup.opens, lookup.confidence = trigger, "AB", 0.5
    said = 3 if trigger == "prompted" else FIRST_TOKENS
    request = request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", said + 2, logprobs=0)
    answer = engine.submit(replace(request, retrieval=lookup)).result()
    [round] = answer.usage.retrieval
    assert (round.trigger, round.at, len(round.citations)) == (trigger, said, 1)
    assert lookup.calls == ["abc" if trigger == "prompted" else "abcd"]


@pytest.fixture
def interrupted(engine, monkeypatch):
    """Let vLLM answer two tokens a request and then, after each, miss a chunk's file, as often as ``times`` says;
    ``asked`` has the prompts and parameters of its requests."""
    seen = SimpleNamespace(times=1, asked=[])

    async def generate(self, prompt, params):
        seen.asked.append((list(prompt.ids), params))
        begun = 2 * (len(seen.asked) - 1)
        cut = len(seen.asked) <= seen.times
        answer = [[token] for token in self.answer[begun : begun + 2 if cut else begun + params.max_tokens]]
        for i, ids_ in enumerate([*answer, []] if cut else answer):
            ends = cut and i == len(answer)
            probabilities = [{token: SimpleNamespace(rank=1, logprob=-token)} for token in ids_]
            one = SimpleNamespace(
                token_ids=ids_, finish_reason="error" if ends else None, logprobs=probabilities
            )
            report = {
                "mpic": {"error": "missing", "message": "gone"} if ends else {"error": None, "prefix_hit": 4}
            }
            metrics = SimpleNamespace(num_preemptions=1, scheduled_ts=1.0, queued_ts=1.0)
            yield SimpleNamespace(
                outputs=[one], kv_transfer_params=report, metrics=metrics, num_cached_tokens=0
            )

    monkeypatch.setattr(Stub, "generate", generate)
    engine.client.go.set()
    return seen


def test_an_answer_whose_chunk_was_lost_when_it_was_preempted_goes_on_where_it_was(engine, interrupted):
    prompt = prompt_of(ids(1, 9), CHUNK, ids(2, 3))
    request = request_of(prompt, "reuse", 6, seed=7, logprobs=1, stop=("f",))
    deltas = list(engine.submit(replace(request, trace=True)))
    given = Stub.answer[:6]
    assert "".join(delta.text for delta in deltas) == "abcde" and deltas[-1].finish_reason == "stop"
    assert [one.token_id for delta in deltas for one in delta.logprobs] == given
    (first, before), (second, after) = interrupted.asked
    assert second == first + given[:2], "the answer so far is part of the prompt"
    assert (before.max_tokens, after.max_tokens) == (6, 4) and before.seed != after.seed
    usage = deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reused, usage.prefix_hit) == (17, 6, 5, 4)
    assert usage.preemptions == 2 and usage.ttft_ms > 0
    assert usage.trace[-1].end == 17
    assert engine.client.compiles == 1, (
        "the file was still there, and the request has a name of its own for it"
    )


def test_an_answer_that_was_taken_up_again_in_a_call_searches_and_goes_on(engine, interrupted):
    found = text_chunk(ids(6, 5))
    lookup = Lookup([0, 0], found)
    lookup.opens, lookup.closes = "b", "c"
    request = request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 5, seed=7)
    usage = engine.submit(replace(request, retrieval=lookup)).result().usage
    first, again, after = (tokens for tokens, _ in interrupted.asked)
    assert len(lookup.calls) == 1 and again == first + Stub.answer[:2]
    assert after[: len(again) + 1] == [*again, Stub.answer[2]] and str(found.token_ids)[1:-1] in str(after)
    assert len({params.seed for _, params in interrupted.asked}) == 3
    assert (usage.completion_tokens, usage.prompt_tokens) == (5, len(after) - 3)


def test_a_file_system_without_hard_links_costs_a_compile_and_no_answer(engine, interrupted, monkeypatch):
    monkeypatch.setattr(spool.os, "link", Mock(side_effect=OSError(errno.EPERM, "there are none")))
    answer = engine.submit(request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 6)).result()
    assert answer.token_ids == tuple(Stub.answer[:6]) and engine.client.compiles == 2


def test_an_answer_whose_chunks_are_lost_again_and_again_ends(engine, interrupted):
    interrupted.times = 3
    with pytest.raises(MPICError, match="gone"):
        engine.submit(request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 8)).result()
    assert len(interrupted.asked) == 2


def test_an_engine_without_an_adapter_refuses_packets_and_does_not_offer_them(engine, monkeypatch):
    assert {"legolink-K"} == {"packet", "packet-K", "legolink-K"} & set(engine.policies())
    with pytest.raises(NoAdapter, match=r"model m has none.*mpic train packet --model"):
        engine.submit(request_of(prompt_of(ids(1, 6), CHUNK, ids(4, 5)), "packet"))
    with pytest.raises(NoAdapter):
        engine.compile(CHUNK, Wrapping(packet=True)).result(60)
    with pytest.raises(NoAdapter, match="mpic train packet"):
        module.VLLMEngine(EngineConfig(engine="vllm", policy="packet-16"), None, cpu=True)


def test_a_packet_of_an_adapter_that_was_replaced_after_the_start_is_not_kept(engine, monkeypatch):
    """The workers read the adapter's file themselves."""
    soft = Adapter(torch.ones(2, 4), torch.ones(1, 4), "0" * 64)
    monkeypatch.setattr(engine.compiler, "_model", replace(engine.model, adapter=soft))
    bare = ChunkInputs(torch.tensor(CHUNK.token_ids), torch.arange(5)[None], 5, torch.zeros(5, 4))
    engine.client.go.set()
    for header, reason in ((soft.header, None), (soft.header + 1, "another adapter")):
        given = bare.wrap(header, soft.trailer)
        monkeypatch.setattr(
            exported, "read_compiled", lambda *_, given=given, **__: (given, torch.zeros(3, 2, 2, 8, 4))
        )
        compiled = engine.compile(CHUNK, Wrapping(packet=True))
        if reason is None:
            assert compiled.result(60) == 8
            engine.forget(CHUNK)
            continue
        with pytest.raises(CompileFailed, match=reason):
            compiled.result(60)
