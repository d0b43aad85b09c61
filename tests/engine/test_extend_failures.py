"""Retrieval while decoding when searches fail, references are lost or deleted, and requests end or cross meanwhile."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from engine_kit import MemoryStore, assert_same, ids, image_chunk, logits_of, prompt_of, text_chunk
from extend_kit import SAID, Lookup, ask, begun, chunks_of, extended, searching, spell
from families import random_image
from threads_kit import started

from mpic.errors import FileNotFound, MPICError, UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link import BARE


@pytest.fixture(autouse=True)
def spelled(monkeypatch):
    spell(monkeypatch)


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, "nothing_found"), (FileNotFound("gone"), "file_not_found"), (OSError(), "internal_error")],
)
def test_a_search_that_finds_nothing_or_fails_goes_on_with_the_text_for_that(error, code, make_engine):
    engine = make_engine()
    prompt, call, _ = begun(engine)
    lookup = Lookup(call, error=error)
    answer = ask(engine, prompt, "reuse", SAID + 4, lookup).result()
    assert list(answer.token_ids[SAID:]) == extended("llama", prompt, "reuse", call, lookup)[0]
    assert [r.error for r in answer.usage.retrieval] == [code]


def test_a_model_that_cannot_go_on_without_a_reference_ends_its_answer_and_reports_it(make_engine):
    engine = make_engine()
    prompt, call, _ = begun(engine)
    lookup = Lookup(call)
    lookup.nothing = "Nothing was found."
    *_, last = ask(engine, prompt, "reuse", SAID + 4, lookup)
    assert (last.text, last.finish_reason, last.token_ids) == ("Nothing was found.", "stop", ())
    assert last.retrieval.error == last.usage.retrieval[0].error == "nothing_found"


def test_a_reference_that_cannot_be_read_is_left_out_and_the_others_are_linked(make_engine):
    engine = make_engine("llava")
    gone = Mock(side_effect=FileNotFound("deleted meanwhile"))
    lost = Chunk(image_chunk(random_image(77)).key, "local", load_image=gone, label="lost")
    prompt, call, (_, document, _) = begun(engine, "reuse", "llava")
    lookup = Lookup(call, lost, document)
    answer = ask(engine, prompt, "reuse", SAID + 4, lookup).result()
    assert list(answer.token_ids[SAID:]) == extended("llava", prompt, "reuse", call, lookup, document)[0]
    assert [c["id"] for c in answer.usage.retrieval[0].citations] == [document.label]


def test_references_that_do_not_fit_the_pool_are_dropped_from_the_end(make_engine):
    prompt, call, (_, document, _) = begun(make_engine())
    big = text_chunk(ids(30, 150))
    engine = make_engine(pages=20)
    answer = ask(engine, prompt, "reuse", 8, Lookup(call, document, big)).result()
    (round,) = answer.usage.retrieval
    assert [c["id"] for c in round.citations] == [document.label] and round.error is None
    answer = ask(engine, prompt, "reuse", 8, Lookup(call, big)).result()
    assert answer.usage.retrieval[0].error == "pool_too_small" and len(answer.token_ids) == 8


def test_cancelling_while_searching_frees_everything(make_engine):
    engine = make_engine()
    prompt, lookup, stream = searching(engine, "full", 9)
    stream.abort()
    assert stream.result().finish_reason == "abort"
    resident = sum(r.extent.pages for r in engine.device.chunks.values())
    assert engine.pool.free_pages == engine.pool.pages - resident
    lookup.gate.set()
    ask(engine, prompt, "full", 2).result()


def test_closing_the_engine_while_a_request_searches_fails_it(make_engine):
    engine = make_engine()
    _, lookup, stream = searching(engine, "full", 9)
    closing = started(engine.close)
    with pytest.raises(Exception, match="stopped"):
        stream.result()
    lookup.gate.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_request_that_cannot_be_extended_fails_alone_and_frees_everything(make_engine, monkeypatch):
    engine = make_engine()
    prompt, call, (_, document, _) = begun(engine, "mpic-5")
    monkeypatch.setattr("mpic.engine.native.outputs.apply", Mock(side_effect=ValueError("no")))
    with pytest.raises(MPICError, match="no"):
        ask(engine, prompt, "mpic-5", SAID + 2, Lookup(call, document)).result()
    engine.check()
    assert ask(engine, prompt, "full", 2).result().finish_reason == "length"


def test_a_reference_deleted_while_it_is_linked_is_seen_by_nobody_else(make_engine):
    engine = make_engine()
    _, lookup, stream = searching(engine, "reuse", 8)
    (b,) = lookup.chunks
    engine.forget(b)
    lookup.gate.set()
    assert len(stream.result().token_ids) == 8
    assert all(key.chunk != b.key for key in engine.device.chunks)


def test_a_chunk_deleted_while_its_prefetch_is_prepared_does_not_come_back(make_engine, monkeypatch):
    store = MemoryStore()
    document = chunks_of("llama")[1]
    make_engine(store=store).compile(document).result()
    engine = make_engine(store=store)
    stored = engine.linker.stored

    def deleted_meanwhile(chunk, key):
        found = stored(chunk, key)
        engine.forget(chunk)
        return found

    monkeypatch.setattr(engine.linker, "stored", deleted_meanwhile)
    engine.prefetch(document)
    engine.check()
    assert not engine.device.chunks


@pytest.mark.parametrize("policy", ["reuse-2step", "cacheblend-15"])
def test_a_policy_that_looks_at_the_whole_prompt_is_refused_with_retrieval(policy, make_engine):
    with pytest.raises(UnsupportedParameter, match=policy):
        ask(make_engine(), prompt_of(ids(1, 4)), policy, 4, Lookup([1, 2]))


@pytest.mark.parametrize("trouble", ["slow", "damaged"])
def test_a_slow_or_damaged_stored_reference_is_linked_as_a_resident_one(trouble, make_engine):
    store = MemoryStore(delay=0.05 if trouble == "slow" else 0.0)
    maker = make_engine(store=store)
    for chunk in chunks_of("llama")[1:]:
        maker.compile(chunk).result()
    engine = make_engine(store=store)
    prompt, call, (_, document, b) = begun(engine, "mpic-5")
    if trouble == "damaged":
        store.damage(engine.linker.key(b, BARE))
    lookup = Lookup(call, b, document)
    got_ids, got = logits_of(ask(engine, prompt, "mpic-5", SAID + 4, lookup), SAID + 4)
    expected = extended("llama", prompt, "mpic-5", call, lookup, b, document)
    assert_same((got_ids[SAID:], got[SAID:]), expected)


@pytest.mark.parametrize("policy", ["prefix", "mpic-5"])
def test_a_prefix_that_another_request_splits_during_the_search_stays_mapped_as_a_whole(policy, make_engine):
    engine = make_engine()
    a, _, b = chunks_of("llama")
    text = ids(1, 30)
    prompt = prompt_of(text, a, ids(4, 4))
    call, _ = logits_of(ask(engine, prompt, policy, SAID), SAID)  # its own tokens are one node from now on
    expected = logits_of(ask(make_engine(), prompt, policy, SAID + 4, Lookup(call, b)), SAID + 4)
    lookup = Lookup(call, b)
    lookup.gate.clear()
    paused = ask(engine, prompt, policy, SAID + 4, lookup)
    assert lookup.searching.wait(60)
    ask(engine, prompt_of([*text[:20], 7, 8, 9]), policy, 1).result()
    lookup.gate.set()
    assert_same(logits_of(paused, SAID + 4), expected)
