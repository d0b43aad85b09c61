"""Links that run beside the loads of their chunks: the same answers, whatever the disk does meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
from engine_kit import (
    MemoryChunk,
    MemoryStore,
    assert_oracle,
    fail_a_compile,
    family,
    ids,
    image_chunk,
    prompt_of,
    submit,
    text_chunk,
    until,
)
from families import VISION_FAMILIES, random_image
from threads_kit import started

from mpic.engine.native.engine import NativeEngine
from mpic.errors import CorruptFile, DatabaseBusy, EngineStopped, MPICError, NotFound
from mpic.kv.barrier import LoadProgress
from mpic.link import BARE, Wrapping, parse_policy

STORED, OTHER, MISSING = (text_chunk(ids(70 + i, n)) for i, n in enumerate((23, 17, 11)))
PROMPT = prompt_of(ids(1, 6), STORED, ids(4, 5))
POLICIES = ["reuse", "mpic-4", "legolink-3", "legolink-0", "attnlink-6", "block-1", "random-30"]
FOREVER = 1000.0


class GatedStore(MemoryStore):
    """Delivers every chunk's layers one at a time, when the test allows it.

    ``allowed`` layers of each chunk are delivered; the layer ``fails_at`` is damaged.
    """

    def __init__(self, allowed: int = 0) -> None:
        super().__init__()
        self.allowed, self.fails_at = allowed, -1
        self._changed = threading.Condition()

    def allow(self, layers: int) -> None:
        with self._changed:
            self.allowed = max(self.allowed, layers)
            self._changed.notify_all()

    def find(self, keys):
        return {key: GatedChunk(self, self.chunks[key]) for key in keys if key in self.chunks}


class GatedChunk(MemoryChunk):
    def read_layers(self, destination) -> Iterator[int]:
        store = self._store
        for layer, values in enumerate(self._chunk.kv):
            with store._changed:
                assert store._changed.wait_for(lambda layer=layer: layer < store.allowed, 60)
            if layer == store.fails_at:
                destination[layer].fill_(float("nan"))
                store.chunks.pop(self._chunk.key, None)
                raise CorruptFile(f"layer {layer} is damaged")
            destination[layer].copy_(values)
            yield layer


def layers_of(name: str) -> int:
    return family(name).loaded.shape.layers


@pytest.fixture
def stored(make_engine):
    """A gated store that holds some chunks, and an engine over it with endless patience unless the test says
    otherwise."""

    def make(
        name: str, chunks, wrapping: Wrapping = BARE, allowed: int = 1, patience: float = FOREVER, **options
    ):
        store = GatedStore(allowed)
        first = make_engine(name, store=store)
        for chunk in chunks:
            first.compile(chunk, wrapping).result(60)
        first.close()
        engine = make_engine(name, store=store, loaders=4, **options)
        engine.transfers.patience = patience
        stores.append(store)
        return engine, store

    stores: list[GatedStore] = []
    yield make
    for store in stores:
        store.allow(99)  # or the engine could not be closed


@pytest.fixture
def asked(monkeypatch) -> queue.Queue:
    """Record the layers that a step had to wait for, in order."""
    layers: queue.Queue = queue.Queue()
    wait = LoadProgress.wait

    def record(self, layer, seconds):
        layers.put(layer)
        return wait(self, layer, seconds)

    monkeypatch.setattr(LoadProgress, "wait", record)
    return layers


def beside(engine: NativeEngine, links: int = 1) -> None:
    """Wait until this many links run beside their loads."""
    until(lambda: engine.stats()["counters"].get("links_beside_loads", 0) == links)


def from_tiers(engine: NativeEngine) -> dict[str, int]:
    """Return how many linked chunks came from where."""
    return {name: n for name, n in engine.stats()["counters"].items() if name.startswith("chunks_from_")}


def all_ready(engine: NativeEngine) -> None:
    """Wait until every chunk on the device is ready, which a load may report after the answer that followed it."""
    until(lambda: all(resident.ready for resident in list(engine.device.chunks.values())))


# ---- the same answers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_a_link_follows_its_loads_layer_by_layer_while_a_missing_chunk_compiles_and_equals_the_oracle(
    name, policy, stored, asked
):
    picture = [image_chunk(random_image(60))] if name in VISION_FAMILIES else []
    engine, store = stored(name, [STORED, *picture], parse_policy(policy).wrapping)
    prompt = prompt_of(ids(1, 6), STORED, ids(2, 3), MISSING, *picture, ids(3, 4), STORED, ids(4, 5))
    stream = submit(engine, prompt, policy)
    for layer in range(1, layers_of(name)):
        while (now := asked.get(timeout=60)) < layer:
            pass  # another chunk's progress asked for the layer before
        assert now == layer  # it may be delivered only now that a step has asked for it
        store.allow(layer + 1)
    assert_oracle(name, prompt, policy, stream)
    counters = engine.stats()["counters"]
    assert counters["links_beside_loads"] >= 1 and "rows_thrown_away" not in counters


@pytest.mark.parametrize("policy", ["reuse-2step", "cacheblend-25"])
def test_policies_of_two_passes_answer_as_over_resident_chunks(policy, stored):
    engine, store = stored("llama", [STORED])
    prompt = prompt_of(ids(1, 6), STORED, ids(2, 3), MISSING, ids(4, 5))
    stream = submit(engine, prompt, policy)
    until(lambda: engine.transfers.loading == 1)
    store.allow(99)
    first = stream.result()
    assert [use.tier for use in first.usage.chunks] == ["disk", "compiled"]
    resident, _ = stored("llama", [STORED, MISSING], allowed=99)
    for chunk in (STORED, MISSING):
        submit(resident, prompt_of(chunk, ids(9, 2)), "reuse").result()
    all_ready(resident)
    again = submit(resident, prompt, policy).result()
    assert [use.tier for use in again.usage.chunks] == ["device", "device"]
    assert first.token_ids == again.token_ids


def test_loads_compile_and_link_share_one_step(stored):
    engine, store = stored("llama", [STORED])
    start = engine.scheduler.memory._load

    def started(linked, order):
        start(linked, order)
        until(lambda: linked.resident.progress.ready > 0)

    engine.scheduler.memory._load = started  # the first layer is there before the step is put together
    stream = submit(engine, prompt_of(ids(1, 6), STORED, MISSING, ids(3, 4)), tokens=1)
    beside(engine)
    store.allow(99)
    uses = stream.result().usage.chunks
    assert [use.tier for use in uses] == ["disk", "compiled"]
    assert engine.stats()["counters"]["steps"] == 1


def test_two_requests_link_a_loading_chunk_at_different_bases(stored):
    engine, store = stored("llama", [STORED], allowed=0)
    prompts = [prompt_of(ids(5, n), STORED, ids(6, 4)) for n in (3, 19)]
    streams = [submit(engine, prompt) for prompt in prompts]
    until(lambda: len(engine.scheduler.running) == 2)
    store.allow(1)
    beside(engine, 2)
    store.allow(99)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert_oracle("llama", prompt, "mpic-4", stream)
    until(lambda: engine.stats()["counters"].get("chunks_from_disk") == 2)


def test_requests_that_follow_anothers_load_report_and_count_the_same_tier(stored, monkeypatch):
    engine, store = stored("llama", [STORED], allowed=0)
    find = store.find

    def in_host(keys):
        found = find(keys)
        for chunk in found.values():
            chunk.tier = "host"
        return found

    monkeypatch.setattr(store, "find", in_host)
    prompts = [prompt_of(ids(5, n), STORED, ids(6, 4)) for n in (3, 19)]
    streams = [submit(engine, prompt, tokens=60) for prompt in prompts]
    until(lambda: len(engine.scheduler.running) == 2)
    store.allow(99)
    assert [stream.result().usage.chunks[0].tier for stream in streams] == ["host", "host"]
    assert from_tiers(engine) == {"chunks_from_host": 2}


# ---- loads that fail


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_load_that_fails_at_any_layer_costs_a_compile_and_nothing_wrong_is_served_or_remembered(
    layer, stored, caplog
):
    engine, store = stored("llama", [STORED, OTHER], allowed=0)
    store.fails_at = layer
    prompts = [prompt_of(ids(5, n), STORED, ids(8, 3), MISSING, ids(6, 4)) for n in (3, 19)]
    streams = [submit(engine, prompt) for prompt in prompts]
    until(lambda: len(engine.scheduler.running) == 2)
    store.allow(1)
    if layer > 0:
        beside(engine, 2)
    store.allow(99)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert_oracle("llama", prompt, "mpic-4", stream)
    counters = engine.stats()["counters"]
    assert counters["load_failures"] == 1
    # each of them once
    assert counters["tokens_compiled"] == sum(len(c.token_ids) for c in (STORED, MISSING))
    assert ("rows_thrown_away" in counters) == (layer > 0)
    for prompt in prompts:  # from the prefix cache now
        assert_oracle("llama", prompt, "mpic-4", submit(engine, prompt))
    engine.check()
    assert "is compiled again" in caplog.text


def test_the_reason_is_reported_to_every_request_that_had_to_wait_for_the_compile(stored):
    engine, store = stored("llama", [STORED], allowed=0)
    store.fails_at = 1
    prompts = [prompt_of(ids(5, n), STORED, ids(6, 4)) for n in (3, 19)]
    streams = [submit(engine, prompt, tokens=60) for prompt in prompts]
    until(lambda: len(engine.scheduler.running) == 2)
    store.allow(99)
    for stream in streams:
        use = stream.result().usage.chunks[0]
        assert (use.tier, use.reason) == ("compiled", "corrupt")
    assert from_tiers(engine) == {"chunks_from_compiled": 2}


def test_a_chunk_is_compiled_although_the_store_cannot_say_why_it_is_missing(stored, monkeypatch, caplog):
    engine, store = stored("llama", [STORED], allowed=99)

    def gone(chunk, destination):
        raise NotFound("the file is not there")
        yield

    def busy(key):
        raise DatabaseBusy("the catalogue is busy")

    monkeypatch.setattr(GatedChunk, "read_layers", gone)
    monkeypatch.setattr(store, "missing_reason", busy)
    stream = submit(engine, PROMPT)
    until(lambda: not engine.outputs.unfinished)
    use = stream.result().usage.chunks[0]
    assert (use.tier, use.reason) == ("compiled", "corrupt") and "could not say why" in caplog.text
    assert_oracle("llama", PROMPT, "mpic-4", submit(engine, PROMPT))


def test_a_chunk_that_can_neither_be_read_nor_compiled_fails_those_who_wait_and_nobody_after_them(
    stored, monkeypatch
):
    engine, store = stored("llama", [STORED], allowed=0)
    store.fails_at = 0
    fail_a_compile(engine, monkeypatch)
    stream = submit(engine, PROMPT)
    until(lambda: engine.scheduler.running)
    store.allow(99)
    with pytest.raises(MPICError, match="memory"):
        stream.result()
    assert_oracle("llama", PROMPT, "mpic-4", submit(engine, PROMPT))
    engine.check()


def test_a_chunk_whose_copy_cannot_be_completed_is_compiled(stored, monkeypatch):
    engine, _ = stored("llama", [STORED], allowed=99)
    monkeypatch.setattr(LoadProgress, "settle", Mock(side_effect=RuntimeError("the copy failed")))
    assert_oracle("llama", PROMPT, "mpic-4", submit(engine, PROMPT))
    until(lambda: not engine.transfers.busy)
    engine.check()


def test_a_load_gives_its_chunk_back_although_those_who_wait_for_it_could_not_be_told(stored):
    engine, _ = stored("llama", [STORED], allowed=99)
    engine.transfers._emit = lambda event: 1 // 0
    engine.prefetch(STORED)
    until(lambda: engine.device.chunks)
    all_ready(engine)
    engine.check()  # behind the message
    [resident] = engine.device.chunks.values()
    assert resident.refs == 0


# ---- a slow disk


def test_a_request_that_computes_is_not_held_up_by_anothers_loads(stored):
    engine, store = stored("llama", [STORED])
    plain = submit(engine, prompt_of(ids(9, 7)), "full", 200)
    next(iter(plain))
    link = submit(engine, PROMPT)
    assert len(plain.result().token_ids) == 199  # although the link's loads do not move
    assert engine.stats()["counters"]["finished_length"] == 1
    store.allow(99)
    assert_oracle("llama", PROMPT, "mpic-4", link)


def test_a_step_loses_its_patience_and_the_link_is_computed_again_when_its_chunk_is_there(stored):
    engine, store = stored("llama", [STORED], patience=0.01)
    link = submit(engine, PROMPT)
    until(lambda: engine.stats()["counters"].get("rows_thrown_away", 0) > 0)
    plain = prompt_of(ids(9, 7))
    assert_oracle("llama", plain, "full", submit(engine, plain, "full"))
    store.allow(99)
    assert_oracle("llama", PROMPT, "mpic-4", link)
    counters = engine.stats()["counters"]
    assert counters["links_beside_loads"] == 1 and "load_failures" not in counters


def test_a_link_whose_other_load_has_not_begun_does_not_hold_the_step(stored):
    engine, store = stored("llama", [STORED, OTHER], allowed=0)
    prompt = prompt_of(ids(1, 6), STORED, OTHER, ids(4, 5))
    link = submit(engine, prompt)
    until(lambda: engine.transfers.loading == 2)
    plain = prompt_of(ids(9, 7))
    assert_oracle("llama", plain, "full", submit(engine, plain, "full"))
    assert "links_beside_loads" not in engine.stats()["counters"]
    store.allow(99)
    assert_oracle("llama", prompt, "mpic-4", link)


# ---- deletions, aborts and preemptions meanwhile


def test_a_chunk_deleted_during_its_load_serves_earlier_requests_and_nobody_else(stored):
    engine, store = stored("llama", [STORED])
    link = submit(engine, PROMPT)
    beside(engine)
    store.chunks.clear()
    deleting = started(lambda: engine.forget(STORED))
    store.allow(99)
    assert_oracle("llama", PROMPT, "mpic-4", link)
    deleting.join(60)
    assert not engine.device.chunks
    again = submit(engine, PROMPT).result().usage
    assert (again.prefix_hit, again.chunks[0].tier) == (0, "compiled")


def test_a_chunk_deleted_during_a_load_that_then_fails_still_serves_earlier_requests(stored):
    engine, store = stored("llama", [STORED])
    store.fails_at = 2
    link = submit(engine, PROMPT)
    beside(engine)
    engine.tombstones.mark(STORED)
    engine._post(lambda: engine.scheduler.memory.forget(STORED.owner, STORED.key))
    store.allow(99)
    assert_oracle("llama", PROMPT, "mpic-4", link)
    until(lambda: not engine.device.chunks)
    assert not store.chunks


def test_a_request_aborted_while_its_step_waits_leaves_the_chunk_for_the_next(stored):
    engine, store = stored("llama", [STORED])
    link = submit(engine, PROMPT)
    beside(engine)
    link.abort()
    store.allow(99)
    link.result()
    all_ready(engine)
    stream = submit(engine, PROMPT)
    assert_oracle("llama", PROMPT, "mpic-4", stream)
    assert engine.stats()["counters"].get("chunk_hits", 0) == 1


def test_closing_does_not_wait_for_the_loads_that_a_step_waits_for(stored):
    engine, store = stored("llama", [STORED])
    link = submit(engine, PROMPT)
    beside(engine)
    closing = started(engine.close)
    with pytest.raises(EngineStopped):
        link.result()
    store.allow(99)  # the read under way is the only thing left
    closing.join(60)
    assert not closing.is_alive()


def test_files_are_read_ahead_before_a_missing_image_is_encoded_and_not_without_one(stored, monkeypatch):
    engine, _ = stored("qwen2_vl", [STORED, image_chunk(random_image(60))], allowed=99)
    done: list[str] = []
    monkeypatch.setattr(GatedChunk, "read_ahead", lambda self: done.append("file"), raising=False)

    def missing(number: int):
        chunk = image_chunk(random_image(number))
        return replace(chunk, load_image=lambda: done.append("encoder") or chunk.load_image())

    def ask(*chunks, policy="mpic-4"):
        done.clear()
        submit(engine, prompt_of(ids(1, 6), *chunks, ids(4, 5)), policy).result()
        return done

    picture = image_chunk(random_image(60))
    assert ask(STORED, missing(61), picture) == ["file", "file", "encoder"]
    assert ask(STORED, MISSING, picture) == []  # all is on the device, or text
    engine, _ = stored("qwen2_vl", [STORED], allowed=99)
    assert ask(STORED, MISSING) == []  # compiled text needs no encoder
    assert ask(missing(62), STORED, policy="full") == ["encoder"]  # no KV is read


def test_requests_that_preempt_each_other_while_loads_run_keep_their_answers(stored):
    """Both fit only one after the other once they grow; one of them is preempted."""
    engine, store = stored("llama", [STORED], pages=24)
    prompts = [prompt_of(ids(5, n), STORED, ids(6, 4)) for n in (30, 33)]
    streams = [submit(engine, prompt, tokens=60) for prompt in prompts]
    store.allow(99)
    alone, _ = stored("llama", [STORED], allowed=99)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.result().token_ids == submit(alone, prompt, tokens=60).result().token_ids
