"""The behaviour of the engine that users see: isolation, preemption, cancellation, refusals, sampling."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from engine_kit import (
    MemoryChunk,
    MemoryStore,
    fail_a_compile,
    family,
    ids,
    image_chunk,
    pause,
    prompt_of,
    request_of,
    submit_together,
    text_chunk,
    until,
)
from families import random_image

from mpic.engine.base import GenerationRequest, Sampling
from mpic.engine.detokenize import Detokenizer
from mpic.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    EngineStopped,
    MPICError,
    PoolTooSmall,
    UnsupportedModality,
)
from mpic.link import parse_policy


def answer(engine, prompt, policy="mpic-4", tokens=6, **options):
    return engine.submit(request_of(prompt, policy, tokens, **options)).result()


DOCUMENT, OTHER = text_chunk(ids(1, 40)), text_chunk(ids(2, 33))
PROMPT = prompt_of(ids(3, 5), DOCUMENT, ids(4, 3), OTHER, ids(5, 6))


def test_usage_accounts_for_every_prompt_token(make_engine):
    engine = make_engine()
    first = answer(engine, PROMPT).usage
    assert first.prompt_tokens == 5 + 40 + 3 + 33 + 6
    assert first.prompt_tokens == first.reused + first.prefix_hit + first.computed
    assert (first.reused, first.recomputed, first.compiled) == (65, 8, 73)
    assert [(c.tier, c.reason) for c in first.chunks] == [("compiled", "new"), ("compiled", "new")]
    again = answer(engine, prompt_of(ids(9, 2), OTHER, ids(4, 3))).usage
    assert [(c.tier, c.reason, c.recomputed) for c in again.chunks] == [("device", "policy", 4)]
    assert again.compiled == 0


def test_a_conversations_next_turn_finds_its_own_linked_turns_and_answers_the_same(make_engine):
    engine = make_engine()
    first = answer(engine, PROMPT)
    turn = [*ids(5, 6), *first.token_ids, *ids(6, 4)]
    follow_up = prompt_of(ids(3, 5), DOCUMENT, ids(4, 3), OTHER, turn)
    second = answer(engine, follow_up)
    # the old prompt and the old answer, of which the last token was never computed
    assert second.usage.prefix_hit == first.usage.computed + len(first.token_ids) - 1
    assert second.token_ids == answer(make_engine(), follow_up).token_ids


def test_exact_and_linked_kv_never_find_each_other_and_users_do_not_either(make_engine):
    engine = make_engine()
    answer(engine, PROMPT, "prefix")
    assert answer(engine, PROMPT, "mpic-4").usage.prefix_hit == 0
    assert answer(engine, PROMPT, "mpic-5").usage.prefix_hit == 0
    assert answer(engine, PROMPT, "prefix", user="ben").usage.prefix_hit == 0
    assert answer(engine, PROMPT, "prefix").usage.prefix_hit > 0
    assert answer(engine, PROMPT, "full").usage.prefix_hit == 0


def test_equal_content_of_two_owners_is_never_shared(make_engine):
    engine = make_engine()
    answer(engine, prompt_of(ids(1, 3), text_chunk(ids(1, 40), "anna"), ids(2, 2)))
    theirs = answer(engine, prompt_of(ids(1, 3), text_chunk(ids(1, 40), "ben"), ids(2, 2)), user="ben")
    assert theirs.usage.chunks[0].tier == "compiled"


def test_requests_that_do_not_fit_together_run_one_after_the_other_without_loss(make_engine):
    prompts = [prompt_of(ids(i, 30), DOCUMENT, ids(40 + i, 9)) for i in range(6)]
    alone = [answer(make_engine(), p, tokens=40).token_ids for p in prompts]
    engine = make_engine(pages=22)  # each needs about 10 pages of its own beside 5 shared ones
    streams = [engine.submit(request_of(p, "mpic-4", 40)) for p in prompts]
    assert [s.result().token_ids for s in streams] == alone


def test_preemption_loses_nothing(make_engine, monkeypatch):
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 4)  # answers outgrow what they reserved
    prompts = [prompt_of(ids(i, 20), DOCUMENT, ids(40 + i, 9)) for i in range(4)]
    requests = [request_of(p, "mpic-4", 60, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
    alone = [make_engine().submit(request).result().token_ids for request in requests]
    engine = make_engine(pages=30)
    streams = [engine.submit(request) for request in requests]
    results = [s.result() for s in streams]
    assert [r.token_ids for r in results] == alone
    assert sum(r.usage.preemptions for r in results) > 0


def test_a_preempted_request_without_a_limit_comes_back_beside_others_and_leaves_the_caches(
    make_engine, monkeypatch
):
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 8)
    engine = make_engine()
    answer(engine, PROMPT)
    requests = [request_of(prompt_of(ids(60 + i, 9)), "full", None) for i in range(2)]
    streams = submit_together(engine, requests)
    for stream in streams:
        next(iter(stream))
    go = pause(engine)
    engine.scheduler.preempt(engine.scheduler.running[-1])
    go.set()
    later = answer(engine, PROMPT)
    assert {use.tier for use in later.usage.chunks} == {"device"}
    assert len(engine.scheduler.running) == 2 and engine.device.counters["evicted_chunks"] == 0
    for stream in streams:
        stream.abort()
    assert [stream.result().usage.preemptions for stream in streams] == [0, 1]


def test_requests_without_limits_that_outgrow_the_pool_together_all_end_with_their_answers(
    make_engine, monkeypatch
):
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 4)
    engine = make_engine(pages=24)
    requests = [request_of(prompt_of(ids(60 + i, 9)), "full", None) for i in range(4)]
    results = [stream.result() for stream in submit_together(engine, requests)]
    for request, result in zip(requests, results, strict=True):
        assert len(result.token_ids) == 24 * 8 - 9
        alone = answer(make_engine(), request.prompt, "full", 24 * 8 - 9)
        assert result.token_ids == alone.token_ids
    assert max(result.usage.preemptions for result in results) <= 8


def test_an_aborted_request_frees_its_pages_and_disturbs_nobody(make_engine):
    engine = make_engine()
    free = engine.pool.free_pages
    long = engine.submit(request_of(prompt_of(ids(1, 20)), "full", 900))
    other = engine.submit(request_of(prompt_of(ids(2, 20)), "full", 20))
    next(iter(long))
    long.abort()
    long.abort()
    *_, last = long
    assert last.finish_reason == "abort"
    assert other.result().token_ids == answer(make_engine(), prompt_of(ids(2, 20)), "full", 20).token_ids
    engine.check()
    assert engine.pool.free_pages == free


def test_what_can_never_fit_is_refused_at_once_with_the_number_of_pages(make_engine):
    engine = make_engine(pages=8)
    running = engine.submit(request_of(prompt_of(ids(1, 9)), "full", 30))
    with pytest.raises(PoolTooSmall, match=r"needs 15 pages of 8 tokens; the pool has 8") as caught:
        engine.submit(request_of(prompt_of(ids(2, 3), DOCUMENT, OTHER, ids(3, 4)), "reuse", 30))
    assert caught.value.details["pages_needed"] == 15
    assert len(running.result().token_ids) == 30


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(make_engine):
    with pytest.raises(ContextLengthExceeded, match=r"2100 tokens.*2048"):
        make_engine(pages=600).submit(request_of(prompt_of(ids(1, 2100)), "full", 1))


def test_a_prompt_without_a_question_is_refused(make_engine):
    with pytest.raises(EmptyPrompt):
        make_engine().submit(request_of(prompt_of(ids(1, 3), DOCUMENT), "mpic-4"))


def test_a_text_model_refuses_images_by_name(make_engine):
    with pytest.raises(UnsupportedModality, match="llama"):
        make_engine().submit(request_of(prompt_of(image_chunk(random_image(1)), [4]), "mpic-4"))


def test_a_sampled_answer_depends_on_its_seed_alone(make_engine):
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 3}
    alone = answer(make_engine(), PROMPT, tokens=12, **options).token_ids
    engine = make_engine()
    crowd = [engine.submit(request_of(prompt_of(ids(i, 12)), "full", 12, temperature=1.0)) for i in range(5)]
    assert answer(engine, PROMPT, tokens=12, **options).token_ids == alone
    assert answer(engine, PROMPT, tokens=12, **{**options, "seed": 4}).token_ids != alone
    for stream in crowd:
        stream.result()


def test_top_k_one_and_a_tiny_top_p_are_greedy(make_engine):
    greedy = answer(make_engine(), PROMPT).token_ids
    assert answer(make_engine(), PROMPT, temperature=1.0, top_k=1, seed=1).token_ids == greedy
    assert answer(make_engine(), PROMPT, temperature=1.0, top_p=1e-9, seed=1).token_ids == greedy


def test_logprobs_are_those_of_the_models_distribution(make_engine):
    result = answer(make_engine(), PROMPT, logprobs=300, temperature=0.5, seed=1)
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        assert logprob.token_id == token
        assert abs(sum(torch.tensor(value).exp() for _, value in logprob.top) - 1) < 1e-4
        assert dict(logprob.top)[token] == pytest.approx(logprob.logprob)


def test_generation_ends_at_the_end_token_and_does_not_show_it(make_engine, monkeypatch):
    greedy = answer(make_engine(), PROMPT).token_ids
    loaded = family("llama").loaded
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [greedy[2]])
    request = GenerationRequest("eos", PROMPT, parse_policy("mpic-4"), Sampling(max_tokens=9))
    result = make_engine().submit(request).result()
    assert result.finish_reason == "stop"
    assert result.token_ids == greedy[:3]


def test_a_compiled_chunk_is_saved_and_found_again_by_another_engine(make_engine):
    store = MemoryStore()
    engine = make_engine(store=store)
    assert engine.compile(DOCUMENT).result(60) == 40
    assert engine.compile(DOCUMENT).result(60) == 40
    assert len(store.chunks) == 1
    expected = answer(engine, PROMPT).token_ids
    until(lambda: len(store.chunks) == 2)
    other = make_engine(store=store)
    result = answer(other, PROMPT)
    assert result.token_ids == expected
    assert [c.tier for c in result.usage.chunks] == ["disk", "disk"]


@pytest.mark.parametrize("policy", ["mpic-4", "legolink-0"])
def test_a_damaged_file_is_recompiled_within_the_same_request(make_engine, policy):
    store = MemoryStore(delay=0.01)
    expected = answer(make_engine(store=store), PROMPT, policy).token_ids
    engine = make_engine(store=store)
    until(lambda: len(store.chunks) == 2)
    store.damage(next(iter(store.chunks)))
    result = answer(engine, PROMPT, policy)
    assert result.token_ids == expected
    assert next((c.tier, c.reason) for c in result.usage.chunks) == ("compiled", "corrupt")


def test_a_full_disk_fails_the_compile_with_its_error_and_the_chunk_still_serves(make_engine):
    store = MemoryStore()
    store.full = True
    engine = make_engine(store=store)
    with pytest.raises(Exception, match="disk is full"):
        engine.compile(DOCUMENT).result(60)
    assert answer(engine, PROMPT).usage.chunks[0].tier == "device"
    store.full = False
    assert engine.compile(DOCUMENT).result(60) == 40
    assert DOCUMENT.key in {key.chunk for key in store.chunks}


def test_a_forgotten_chunk_is_invisible_at_once_with_everything_linked_to_it(make_engine):
    engine = make_engine()
    answer(engine, PROMPT)
    running = engine.submit(request_of(prompt_of(ids(8, 3), DOCUMENT, ids(9, 4)), "mpic-4", 80))
    engine.forget(DOCUMENT)
    again = answer(engine, PROMPT)
    assert again.usage.prefix_hit == 0
    assert [c.tier for c in again.usage.chunks] == ["compiled", "device"]
    assert len(running.result().token_ids) == 80


def test_pages_of_a_forgotten_chunk_are_those_of_a_chunk_as_long_as_a_request_links_it(make_engine):
    engine = make_engine()
    running = engine.submit(request_of(prompt_of(ids(8, 3), DOCUMENT, ids(9, 4)), "mpic-4", 200))
    next(iter(running))
    go = pause(engine)
    engine.memory.forget(DOCUMENT.owner, DOCUMENT.key)
    found = engine.stats()
    go.set()
    assert (found["pages"]["chunks"], found["pages"]["prefix"], found["chunks_resident"]) == (5, 0, 0)
    running.result()
    until(lambda: engine.stats()["pages"]["chunks"] == 0)


def test_idle_chunks_are_evicted_least_recently_used_first(make_engine):
    engine = make_engine(pages=18, store=MemoryStore())
    chunks = [text_chunk(ids(20 + i, 40)) for i in range(4)]
    for chunk in chunks:
        answer(engine, prompt_of(ids(1, 3), chunk, ids(2, 2)), "reuse", 2)
    resident = {key.chunk for key in engine.device.chunks}
    assert chunks[3].key in resident and chunks[0].key not in resident
    assert engine.stats()["counters"]["evicted_chunks"] > 0


def test_a_request_that_has_to_wait_evicts_nothing(make_engine, monkeypatch):
    """It would take its own pages and those of two missing chunks from the caches before it found out."""
    engine = make_engine(pages=24)
    cached = [text_chunk(ids(20 + i, 40)) for i in range(2)]  # 5 pages each
    for chunk in cached:
        answer(engine, prompt_of(ids(1, 3), chunk, ids(2, 2)), "reuse", 2)
    seen, run = [], engine.executor.run

    def watched(*args):
        resident = {key.chunk for key in engine.device.chunks}
        seen.append((engine.scheduler.blocked, engine.device.counters["evicted_chunks"], resident))
        return run(*args)

    monkeypatch.setattr(engine.executor, "run", watched)
    wanted = [text_chunk(ids(30 + i, 40)) for i in range(4)]
    both = [
        request_of(prompt_of(ids(9, 14)), "full", 50),  # 8 pages
        request_of(prompt_of(ids(1, 3), *wanted, ids(2, 2)), "reuse", 2),
    ]
    assert [len(stream.result().token_ids) for stream in submit_together(engine, both)] == [50, 2]
    _, evicted, resident = next(step for step in seen if step[0])
    assert evicted == 0 and {chunk.key for chunk in cached} <= resident


def test_a_closed_engine_fails_what_waits_and_refuses_what_comes(make_engine):
    engine = make_engine()
    stream = engine.submit(request_of(prompt_of(ids(1, 20)), "full", 1900))
    next(iter(stream))
    engine.close()
    with pytest.raises(EngineStopped):
        stream.result()
    with pytest.raises(EngineStopped):
        engine.submit(request_of(PROMPT, "full"))


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(make_engine, monkeypatch):
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "run", Mock(side_effect=RuntimeError("device lost")))
        with pytest.raises(Exception, match="device lost"):
            answer(engine, PROMPT)
    assert answer(engine, PROMPT).token_ids == answer(make_engine(), PROMPT).token_ids


@pytest.mark.parametrize("others", [0, 1])
def test_a_chunk_whose_compile_cannot_begin_holds_nothing_and_keeps_nobody_waiting(
    make_engine, monkeypatch, others
):
    """Memory may fail between reserving a request's pages and its first step."""
    engine = make_engine()
    beside = [engine.submit(request_of(prompt_of(ids(9, 5)), "full", 1900)) for _ in range(others)]
    for stream in beside:
        next(iter(stream))
    failing = fail_a_compile(engine, monkeypatch)
    first = engine.submit(request_of(PROMPT, "mpic-4", 4))
    if others:  # the failing step ends what runs, and the head of the queue is tried again
        assert len(first.result().token_ids) == 4
        with pytest.raises(MPICError, match="memory"):
            beside[0].result()
    else:
        with pytest.raises(MPICError, match="memory"):
            first.result()
    assert not failing and len(answer(engine, PROMPT).token_ids) > 0
    engine.check()


def test_an_engine_with_nothing_to_do_keeps_no_request(make_engine):
    engine = make_engine()
    answer(engine, PROMPT)
    stream = engine.submit(request_of(PROMPT, "mpic-4", 1900))
    next(iter(stream))
    stream.abort()
    until(lambda: engine.scheduler.idle and not engine.executor.tables._last)


async def test_a_stream_can_be_read_asynchronously(make_engine):
    stream = make_engine().submit(request_of(PROMPT, "mpic-4", 5))
    deltas = [delta async for delta in stream]
    assert sum(len(d.token_ids) for d in deltas) == 5
    assert deltas[-1].finish_reason == "length"


class Letters:
    """A tokenizer whose token i is the i-th byte of UTF-8."""

    def decode(self, token_ids, **options):
        return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", [(), ("nothing",), ("d o",), ("o", "wor")])
def test_streamed_text_is_never_taken_back_and_ends_before_a_stop_string(stop):
    text = "hällo wörld of ✓ signs"
    detokenizer = Detokenizer(Letters(), stop)
    out = ""
    for byte in text.encode():
        out += detokenizer.push(byte)
        assert text.startswith(out)
        if detokenizer.stopped:
            break
    out += detokenizer.finish()
    ends = [text.find(s) for s in stop if s in text]
    assert out == (text[: min(ends)] if ends else text)


def test_special_tokens_do_not_show_in_the_text():
    tokenizer = Mock(**{"decode.return_value": "x"})
    Detokenizer(tokenizer, ()).push(1)
    assert all(call.kwargs["skip_special_tokens"] for call in tokenizer.decode.mock_calls)


def test_a_resident_chunk_touches_neither_disk_nor_encoder(make_engine, monkeypatch):
    store = MemoryStore()
    picture = image_chunk(random_image(5))
    engine = make_engine("llava", store=store)
    prompt = prompt_of(ids(1, 3), picture, ids(2, 3))
    first = answer(engine, prompt)
    monkeypatch.setattr(engine.model, "image_inputs", lambda image: pytest.fail("the vision encoder ran"))
    for question in ("open", "find"):
        monkeypatch.setattr(store, question, lambda key: pytest.fail("the disk was read"))
    assert answer(engine, prompt).token_ids == first.token_ids
    assert answer(engine, prompt, "prefix").usage.computed == first.usage.prompt_tokens


def test_a_resident_chunk_that_is_evicted_before_its_turn_is_read_again(make_engine):
    store = MemoryStore()
    engine = make_engine(pages=18, store=store)
    prompt = prompt_of(ids(3, 5), DOCUMENT, ids(5, 6))
    expected = answer(engine, prompt, "reuse", 2).token_ids
    blocker = engine.submit(request_of(prompt_of(ids(9, 20)), "full", 100))  # 15 pages: evicts the chunk
    next(iter(blocker))
    later = engine.submit(request_of(prompt, "reuse", 2))
    blocker.result()
    assert later.result().token_ids == expected


def test_a_chunk_that_is_evicted_before_its_turn_is_counted_under_the_tier_that_it_is_read_from(make_engine):
    class InHostMemory(MemoryChunk):
        tier = "host"

    engine = make_engine(pages=18, store=MemoryStore(kind=InHostMemory))
    prompt = prompt_of(ids(3, 5), DOCUMENT, ids(5, 6))
    answer(engine, prompt, "reuse", 2)
    requests = [request_of(prompt_of(ids(9, 20)), "full", 100), request_of(prompt, "reuse", 2)]
    for stream in submit_together(engine, requests):
        stream.result()
    until(lambda: engine.device.counters["chunks_from_host"] == 1)
    assert engine.device.counters["chunks_from_compiled"] == 1
    assert engine.device.counters["chunks_from_disk"] == 0


def test_memory_for_the_next_step_is_provided_after_a_step_and_only_while_nothing_is_to_do(
    make_engine, monkeypatch
):
    engine, asked = make_engine(), []

    def provide(tokens: int) -> bool:
        asked.append((tokens, engine._has_work() or bool(engine._inbox)))
        return len(asked) < 3

    monkeypatch.setattr(engine.pool, "provide", provide)
    engine._post(lambda: None)
    assert not asked  # before a first step the memory may never be needed
    answer(engine, PROMPT, tokens=2)
    until(lambda: len(asked) >= 3)
    assert set(asked) == {(512, False)}
    engine.close()


@pytest.mark.parametrize(
    ("changes", "processors"),
    [
        ({"repetition_penalty": 3.0}, []),
        ({"presence_penalty": -2.0, "frequency_penalty": -0.5}, [(-2.0, -0.5)]),
        ({"repetition_penalty": 1.5, "frequency_penalty": -1.5}, [(0.0, -1.5)]),
    ],
)
def test_penalties_count_what_transformers_does_the_words_of_chunks_too(make_engine, changes, processors):
    whole = [token for segment in PROMPT.segments for token in getattr(segment, "chunk", segment).token_ids]

    def penalized(presence, frequency):
        def process(read, logits):
            times = torch.bincount(read[0, len(whole) :], minlength=logits.shape[1])
            return logits - frequency * times - presence * (times > 0)

        return process

    plain = answer(make_engine(), PROMPT, "full", 16)
    stock = copy.deepcopy(family("llama").stock)
    stock.set_attn_implementation("eager")  # tests that came before may have given it the oracle's
    expected = stock.generate(
        torch.tensor([whole]),
        attention_mask=torch.ones(1, len(whole)),
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=changes.get("repetition_penalty"),
        logits_processor=[penalized(*one) for one in processors],
    )
    found = answer(make_engine(), PROMPT, "full", 16, **changes)
    assert list(found.token_ids) == expected[0, len(whole) :].tolist()
    assert found.token_ids != plain.token_ids


def test_penalties_go_on_where_a_request_is_decoded_ahead_and_beside_others(make_engine):
    engine, changes = make_engine(), {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    alone = answer(engine, PROMPT, "full", 16, **changes)
    together = [request_of(PROMPT, "full", 16, **options) for options in (changes, {}, changes)]
    found = [stream.result().token_ids for stream in submit_together(engine, together)]
    assert found == [alone.token_ids, answer(engine, PROMPT, "full", 16).token_ids, alone.token_ids]
