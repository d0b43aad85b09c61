"""Requests, tombstones, loads, failures and the engine's end may happen at the same time without harm."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import transformers as tf
from engine_kit import MemoryStore, ids, pause, prompt_of, request_of, submit_together, text_chunk, until
from families import TEXT
from threads_kit import started

from mpic.engine.native.engine import NativeEngine
from mpic.engine.tombstones import Tombstones
from mpic.errors import (
    CompileFailed,
    ContextLengthExceeded,
    DeletedMeanwhile,
    EngineStopped,
    FileNotFound,
    IntegrityError,
    MPICError,
    OutOfMemory,
    UnsupportedParameter,
)
from mpic.library import Library
from mpic.model.loaded import LoadedModel

DOCUMENT = text_chunk(ids(1, 40))


def prepared(engine) -> None:
    """Wait until all running preparations have ended."""
    engine._preparation._ordinary.submit(lambda: None).result(60)


def ask(engine, prompt, policy="mpic-4", tokens=6, **options):
    return engine.submit(request_of(prompt, policy, tokens, **options)).result()


# ---- the device


def test_an_engine_whose_device_has_failed_for_good_is_not_ready_and_says_so(
    make_engine, monkeypatch, caplog
):
    engine = make_engine()
    monkeypatch.setattr(
        engine.executor, "run", Mock(side_effect=RuntimeError("device-side assert triggered"))
    )
    with pytest.raises(MPICError, match="assert"):
        ask(engine, prompt_of(ids(3, 5)))
    engine.ready()  # a step has failed, and the device takes the next
    monkeypatch.setattr(
        engine.executor, "wait", Mock(side_effect=RuntimeError("device-side assert triggered\nhelp"))
    )
    with pytest.raises(MPICError, match="assert"):
        ask(engine, prompt_of(ids(3, 5)))
    with pytest.raises(EngineStopped, match="restart the server: RuntimeError: device-side assert triggered"):
        engine.ready()
    assert "does not work any more" in caplog.text


def test_a_device_that_fails_while_tokens_are_drawn_is_noticed_too(make_engine, monkeypatch):
    engine = make_engine()
    broken = Mock(side_effect=RuntimeError("illegal memory access"))
    monkeypatch.setattr("mpic.engine.native.sampling._draw", broken)
    monkeypatch.setattr(engine.executor, "wait", broken)
    with pytest.raises(MPICError):
        ask(engine, prompt_of(ids(3, 5)))
    with pytest.raises(EngineStopped, match="illegal memory access"):
        engine.ready()


def test_a_device_that_fails_while_a_dynamic_policy_decides_is_noticed_too(make_engine, monkeypatch):
    engine = make_engine()
    broken = Mock(side_effect=RuntimeError("illegal memory access"))
    monkeypatch.setattr(engine.decider, "_look", broken)
    monkeypatch.setattr(engine.executor, "wait", broken)
    with pytest.raises(MPICError):
        ask(engine, prompt_of(ids(3, 5), DOCUMENT, ids(4, 9)), policy="cacheblend-15")
    with pytest.raises(EngineStopped, match="illegal memory access"):
        engine.ready()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (MemoryError(), OutOfMemory),
        (RuntimeError("can't allocate memory: you tried to allocate 10 bytes"), OutOfMemory),
        (RuntimeError("a size does not fit"), CompileFailed),
    ],
)
def test_an_upload_in_a_step_that_failed_learns_whether_it_may_try_again(
    raised, told, make_engine, monkeypatch
):
    engine = make_engine(store=MemoryStore())
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "run", Mock(side_effect=raised))
        with pytest.raises(told):
            engine.compile(DOCUMENT).result(60)
    assert engine.compile(DOCUMENT).result(60) == 40


def test_an_upload_on_a_device_that_has_failed_for_good_is_left_for_the_next_start(make_engine, monkeypatch):
    engine = make_engine(store=MemoryStore())
    for part in ("run", "wait"):
        monkeypatch.setattr(engine.executor, part, Mock(side_effect=RuntimeError("illegal memory access")))
    with pytest.raises(EngineStopped, match="illegal memory access"):
        engine.compile(DOCUMENT).result(60)


# ---- deletion


def test_a_chunk_deleted_in_the_step_that_compiles_it_is_not_stored(make_engine, monkeypatch):
    """The step ends before the engine's thread hears of the deletion."""
    engine = make_engine(store=(store := MemoryStore()))
    run = engine.executor.run

    def deleted_meanwhile(*args):
        monkeypatch.undo()
        deleting.append(started(lambda: engine.forget(DOCUMENT)))
        until(lambda: engine.tombstones._times)
        return run(*args)

    deleting: list[threading.Thread] = []
    monkeypatch.setattr(engine.executor, "run", deleted_meanwhile)
    ask(engine, prompt_of(ids(3, 5), DOCUMENT, ids(4, 9)))
    deleting[0].join(60)
    until(lambda: not engine.tombstones._unfinished)
    assert not store.chunks and not engine.device.chunks and not engine.tombstones._times
    assert engine.compile(DOCUMENT).result(60) == 40 and store.chunks


def test_a_chunk_deleted_under_a_request_that_mapped_its_turns_fails_nobody_and_leaves_nothing(make_engine):
    engine = make_engine()
    first = ask(engine, prompt_of(ids(3, 5), DOCUMENT, ids(4, 9)))
    follow_up = prompt_of(ids(3, 5), DOCUMENT, [*ids(4, 9), *first.token_ids, *ids(6, 4)])
    running = engine.submit(request_of(follow_up, "mpic-4", 60))
    next(iter(running))
    other = engine.submit(request_of(prompt_of(ids(9, 5)), "full", 80))
    engine.forget(DOCUMENT)
    assert running.result().finish_reason == "length"
    assert len(other.result().token_ids) == 80
    engine.check()
    assert ask(engine, follow_up).usage.prefix_hit == 0


def test_a_request_that_was_running_does_not_reinsert_a_deleted_chunks_turns(make_engine):
    engine = make_engine()
    prompt = prompt_of(ids(3, 5), DOCUMENT, ids(4, 9))
    running = engine.submit(request_of(prompt, "mpic-4", 60))
    next(iter(running))
    engine.forget(DOCUMENT)
    running.result()
    again = ask(engine, prompt).usage
    assert (again.prefix_hit, again.chunks[0].tier) == (0, "compiled")


def test_deletions_are_remembered_only_for_those_who_began_before_them_even_if_something_always_runs():
    tombstones, chunks = Tombstones(), [text_chunk(ids(i, 5)) for i in range(50)]
    first = arrived = tombstones.begin()
    for chunk in chunks:
        tombstones.mark(chunk)
        follower = tombstones.begin()
        assert tombstones.since(first, chunk.owner, chunk.key)
        assert not tombstones.since(follower, chunk.owner, chunk.key)
        if arrived != first:
            tombstones.end(arrived)
        arrived = follower
    assert len(tombstones._times) == len(chunks)  # the first one has not ended
    tombstones.end(first)
    assert not tombstones._times
    tombstones.mark(DOCUMENT)
    tombstones.begin(arrived)  # a compile that was begun for it
    tombstones.end(arrived)
    assert tombstones.since(arrived, DOCUMENT.owner, DOCUMENT.key)
    tombstones.end(arrived)
    assert not tombstones._times


def test_an_engine_that_is_never_idle_forgets_deletions(make_engine):
    engine = make_engine()
    running = engine.submit(request_of(prompt_of(ids(1, 5)), "full", 900))
    for i in range(5):
        engine.forget(text_chunk(ids(i, 5)))
        follower = engine.submit(request_of(prompt_of(ids(1, 5)), "full", 900))
        running.abort()
        running.result()
        running = follower
    assert not engine.tombstones._times
    running.abort()


def test_a_document_deleted_while_its_compile_waits_is_neither_served_nor_stored(make_engine, tmp_path):
    library = Library.open(tmp_path)
    library.files.tokenize = lambda text: tuple(10 + byte % 200 for byte in text.encode())
    engine = make_engine(store=library.store)
    file = library.files.add("local", b"a secret that is deleted at once", "secret.txt")
    go = threading.Event()
    engine._preparation._ordinary.submit(go.wait)  # somebody's image is being encoded
    [content] = library.files.chunks("local", file)
    future = engine.compile(content)
    [chunk] = library.files.delete("local", file.id).chunks
    engine.forget(chunk)
    go.set()
    assert future.exception(30) is not None
    engine.close()
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    assert not engine.device.chunks
    library.close()


def test_a_document_deleted_just_after_it_was_seen_to_exist_is_not_stored(make_engine, tmp_path):
    library = Library.open(tmp_path)
    engine = make_engine(store=library.store)
    with pytest.raises(DeletedMeanwhile):
        engine.compile(DOCUMENT, exists=lambda: engine.forget(DOCUMENT)).result(60)
    with pytest.raises(FileNotFound):
        engine.compile(DOCUMENT, exists=Mock(side_effect=FileNotFound("it was deleted")))
    engine.close()
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    assert not engine.tombstones._unfinished
    library.close()


def test_a_document_deleted_between_the_look_for_it_and_its_request_is_not_stored(make_engine, tmp_path):
    library = Library.open(tmp_path)
    engine = make_engine(store=library.store)
    request = request_of(prompt_of(ids(3, 5), DOCUMENT, ids(4, 9)), "mpic-4", 4)
    engine.submit(replace(request, exists=lambda: engine.forget(DOCUMENT))).result()
    with pytest.raises(FileNotFound):
        engine.submit(replace(request, exists=Mock(side_effect=FileNotFound("it was deleted"))))
    engine.close()
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    assert not engine.device.chunks and not engine.tombstones._unfinished
    library.close()


def test_a_document_deleted_while_a_request_is_prepared_is_not_remembered(make_engine, monkeypatch):
    engine = make_engine()
    make, inside, go = engine.linker._make, threading.Event(), threading.Event()

    def slow(chunk):
        inside.set()
        go.wait(60)
        return make(chunk)

    monkeypatch.setattr(engine.linker, "_make", slow)
    answers = []
    request = request_of(prompt_of(DOCUMENT, ids(1, 3)), "mpic-4", 2)
    thread = started(lambda: answers.append(engine.submit(request).result()))
    inside.wait(60)
    engine.forget(DOCUMENT)
    go.set()
    thread.join()
    assert answers and not engine.device.chunks and not engine.linker._inputs


def test_one_users_deletion_leaves_anothers_turns_over_equal_content(make_engine):
    engine = make_engine()
    prompt = prompt_of(text_chunk(ids(1, 40), "ben"), ids(1, 3))
    ask(engine, prompt, user="ben")
    engine.forget(text_chunk(ids(1, 40), "anna"))
    assert ask(engine, prompt, user="ben").usage.prefix_hit > 0


# ---- one request's trouble is its own


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"top_k": 2**63},
    ],
)
def test_sampling_that_means_nothing_is_refused_by_name(make_engine, field):
    with pytest.raises(UnsupportedParameter, match=next(iter(field))):
        make_engine().submit(request_of(prompt_of(ids(1, 5)), "full", 3, **field))


@pytest.mark.parametrize("tokens", [0, -20])
def test_an_answer_of_no_tokens_is_refused(make_engine, tokens):
    with pytest.raises(UnsupportedParameter, match="max_tokens"):
        make_engine().submit(request_of(prompt_of(ids(1, 5)), "full", tokens))


def test_a_temperature_close_to_zero_is_greedy(make_engine):
    engine, prompt = make_engine(), prompt_of(ids(2, 5))
    greedy = ask(engine, prompt, "full").token_ids
    assert ask(engine, prompt, "full", temperature=1e-45, seed=1).token_ids == greedy


def test_options_that_nothing_can_be_drawn_by_end_their_request_alone(make_engine, monkeypatch):
    monkeypatch.setattr("mpic.engine.native.builder.check_sampling", lambda sampling: None)
    engine = make_engine()
    go = pause(engine)
    other = engine.submit(request_of(prompt_of(ids(1, 5)), "full", 20))
    broken = engine.submit(request_of(prompt_of(ids(2, 5)), "full", 20, logprobs="many"))
    upload = engine.compile(DOCUMENT)
    go.set()
    with pytest.raises(MPICError, match="TypeError"):
        broken.result()
    assert len(other.result().token_ids) == 20 and upload.result(60) == 40


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_logits_that_are_not_numbers_end_their_request_alone(make_engine, monkeypatch, sampling):
    engine = make_engine()
    go = pause(engine)
    other = engine.submit(request_of(prompt_of(ids(1, 5)), "full", 20))
    broken = engine.submit(request_of(prompt_of(ids(2, 5)), "full", 20, **sampling))
    forward = engine.model.forward

    def spoiled(*args):
        logits = forward(*args).clone()
        if len(logits) == 2:
            logits[1, 7] = float("nan")
        return logits

    monkeypatch.setattr(engine.model, "forward", spoiled)
    go.set()
    with pytest.raises(IntegrityError, match="not numbers"):
        broken.result()
    assert len(other.result().token_ids) == 20


def test_a_prefix_hit_does_not_count_twice_against_a_sliding_window(make_engine):
    engine = make_engine("mistral", budget=2048, pages=512)
    prompt = prompt_of(ids(1, 700))
    ask(engine, prompt, "prefix", 4)
    assert ask(engine, prompt, "prefix", 4).usage.prefix_hit == 699


def test_a_chunk_that_fits_the_context_only_without_its_sink_is_refused_and_not_run():
    config = tf.MistralConfig(**{**TEXT, "max_position_embeddings": 64})
    engine = NativeEngine(LoadedModel(tf.MistralForCausalLM(config).float().eval()), pages=64, page_size=8)
    with pytest.raises(ContextLengthExceeded, match="61 tokens and 4 before it"):
        engine.submit(request_of(prompt_of(text_chunk(ids(1, 61)), ids(2, 2)), "legolink-0", 1))
    engine.close()


# ---- compiles


def test_a_compile_of_a_resident_chunk_ends_although_the_next_request_needs_its_pages(make_engine):
    engine = make_engine(pages=16)
    ask(engine, prompt_of(DOCUMENT, ids(1, 3)), "reuse", 2)
    go = pause(engine)
    future = engine.compile(DOCUMENT)
    prepared(engine)
    stream = engine.submit(request_of(prompt_of(ids(1, 100)), "full", 20))
    go.set()
    assert future.result(60) == 40
    assert len(stream.result().token_ids) == 20


def test_a_compile_of_a_chunk_that_is_being_loaded_ends_with_the_load(make_engine):
    store = MemoryStore()
    make_engine(store=store).compile(DOCUMENT).result(60)
    store.delay = 0.3
    engine = make_engine(store=store)
    stream = engine.submit(request_of(prompt_of(DOCUMENT, ids(1, 3)), "reuse", 2))
    find = store.open
    store.open = lambda key: None  # the compile does not see it stored
    future = engine.compile(DOCUMENT)
    prepared(engine)
    store.open = find
    stream.result()
    assert future.result(60) == 40


def test_nobody_can_cancel_a_compile_and_so_stop_the_engine(make_engine):
    engine = make_engine()
    go = pause(engine)
    future = engine.compile(DOCUMENT)
    assert not future.cancel()
    go.set()
    assert future.result(60) == 40


def test_a_chunk_that_could_not_be_saved_and_was_evicted_is_not_called_corrupt(make_engine):
    store = MemoryStore()
    store.full = True
    engine = make_engine(store=store, pages=16)
    prompt = prompt_of(DOCUMENT, ids(1, 3))
    ask(engine, prompt, "reuse", 2)
    requests = [request_of(prompt_of(ids(1, 100)), "full", 20), request_of(prompt, "reuse", 2)]
    big, again = submit_together(engine, requests)
    big.result()
    use = again.result().usage.chunks[0]
    assert (use.tier, use.reason) == ("compiled", "new")
    assert "load_failures" not in engine.stats()["counters"]


def test_a_chunk_linked_twice_is_compiled_and_counted_once(make_engine):
    usage = ask(make_engine(), prompt_of(DOCUMENT, ids(7, 2), DOCUMENT, ids(1, 3)), "reuse").usage
    assert usage.compiled == 40


# ---- the engine itself


def test_a_request_that_arrives_while_the_engine_stops_fails(make_engine):
    engine = make_engine()
    go = pause(engine)
    stream = engine.submit(request_of(prompt_of(ids(1, 5)), "full"))
    future = engine.compile(DOCUMENT)
    prepared(engine)
    closing = started(engine.close)
    until(lambda: engine._inbox.closed)
    go.set()
    closing.join(60)
    with pytest.raises(EngineStopped):
        stream.result()
    assert isinstance(future.exception(30), EngineStopped)
    with pytest.raises(EngineStopped):
        engine.compile(DOCUMENT)


def test_a_message_that_fails_does_not_take_others_with_it(make_engine):
    engine = make_engine()
    go = pause(engine)
    engine._post(lambda: 1 // 0)
    stream = engine.submit(request_of(prompt_of(ids(1, 5)), "full", 5))
    go.set()
    assert len(stream.result().token_ids) == 5


def test_requests_with_one_id_do_not_disturb_each_other(make_engine):
    engine = make_engine()
    request = request_of(prompt_of(ids(1, 5)), "full", 200)
    go = pause(engine)
    first, second = engine.submit(request), engine.submit(request)
    first.abort()
    go.set()
    assert first.result().finish_reason == "abort"
    assert len(second.result().token_ids) == 200


def test_a_stream_that_has_ended_can_be_read_again_and_is_empty(make_engine):
    stream = make_engine().submit(request_of(prompt_of(ids(1, 5)), "full", 3))
    stream.result()
    assert list(stream) == []


def test_a_lone_request_that_outgrows_its_extent_is_computed_again_once_at_most(make_engine):
    engine = make_engine(pages=64)
    usage = ask(engine, prompt_of(ids(1, 5)), "full", 500).usage
    assert usage.preemptions <= 1


def test_what_an_extent_and_the_prefix_cache_keep_is_bounded(make_engine):
    engine = make_engine()
    for k in range(1, 40):
        ask(engine, prompt_of(DOCUMENT, ids(1, 3)), f"random-{k}", 2)
    resident = next(iter(engine.device.chunks.values()))
    assert len(resident.extent.kept._cuts) <= 16
