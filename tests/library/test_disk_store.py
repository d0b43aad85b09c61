"""The disk tier: it finds chunks again, stays within its budget, and tells why a chunk is gone."""

import os
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tools import (
    MODEL,
    Clock,
    chunks,
    drop,
    everything,
    kill,
    make_chunk,
    read,
    same_inputs,
    saved,
    size_of,
    text_key,
)

from mpic.durable import FileSystem
from mpic.errors import StorageFull
from mpic.kv.store import ChunkStore, StoredChunk
from mpic.library import Library, Limits


def test_the_disk_store_keeps_the_engines_contract(library):
    store: ChunkStore = library.store
    chunk = make_chunk(image=True)
    assert store.open(chunk.key) is None
    store.save(chunk)
    stored: StoredChunk | None = store.open(chunk.key)
    assert stored is not None and same_inputs(stored.inputs, chunk.inputs)
    assert torch.equal(read(stored, chunk.kv), chunk.kv)
    stats = library.store.stats()
    assert (stats["requested"], stats["hits"], stats["saved"], stats["chunks"]) == (2, 1, 1, 1)
    assert stats["bytes"] == stats["bytes_written"] == size_of(chunk)
    assert stats["bytes_read"] == chunk.kv.nbytes


def test_a_prompts_chunks_are_found_by_one_query_and_no_file_is_opened_before_it_is_read(open_library):
    files = FileSystem()
    files.open = Mock(wraps=files.open)
    library = open_library(filesystem=files)
    kept = chunks(3)
    saved(library, *kept[:2])
    queries, read_rows = [], library.catalog.read
    library.catalog.read = lambda *a, **k: queries.append(1) or read_rows(*a, **k)
    found = library.store.find([chunk.key for chunk in (*kept, kept[0])])
    assert set(found) == {kept[0].key, kept[1].key} and len(queries) == 1
    files.open.assert_not_called()
    assert torch.equal(read(found[kept[0].key], kept[0].kv), kept[0].kv)
    assert same_inputs(found[kept[1].key].inputs, kept[1].inputs)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_reading_ahead_advises_the_system_of_the_whole_file_and_never_fails(library, monkeypatch):
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: advice.append((os.fstat(fd).st_size, *rest)))
    chunk = saved(library, make_chunk())
    (stored,) = library.store.find([chunk.key]).values()
    path = library.store.path(chunk.key)
    stored.read_ahead()
    assert advice == [(path.stat().st_size, 0, 0, os.POSIX_FADV_WILLNEED)]
    path.rename(path.with_suffix(".away"))
    stored.read_ahead()
    assert len(advice) == 1 and library.store.stats()["corrupt"] == 0
    path.with_suffix(".away").rename(path)
    assert torch.equal(read(stored, chunk.kv), chunk.kv)


def test_names_hold_whole_digests_and_never_the_user(library):
    chunk = saved(library, make_chunk(text_key(owner="../ann@example.org")))
    (name,) = everything(library.root)
    model, owner, file = name.split("/")[1:]
    assert model == MODEL[:12] and len(owner) == 64 and "ann" not in name
    assert file == f"{chunk.key.digest}.safetensors"


@pytest.mark.parametrize("end", [Library.close, kill])
def test_stored_chunks_survive_a_restart_and_a_kill(open_library, end):
    library = open_library()
    kept = saved(library, *chunks(3))
    end(library)
    library = open_library()
    assert not any(library.recovered.values())
    for chunk in kept:
        assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_saving_twice_writes_once(library):
    chunk = saved(library, make_chunk())
    library.store.save(chunk)
    assert library.store.stats()["saved"] == 1


def test_the_reason_says_what_is_different(library):
    key = text_key()
    assert library.store.missing_reason(key) == "new"
    library.store.save(make_chunk(key))
    for other in (text_key(sink=4), text_key(dtype="bfloat16"), text_key(preprocessing="other")):
        assert library.store.open(other) is None
        assert library.store.missing_reason(other) == "recipe"
    assert library.store.missing_reason(text_key(model="b2" * 32)) == "model_changed"
    assert library.store.missing_reason(text_key("another text")) == "new"
    assert library.store.missing_reason(text_key(owner="bob")) == "new"


def test_two_models_and_recipes_live_side_by_side(library):
    kept = [make_chunk(text_key(model=m * 32, sink=s), seed=s) for m in ("a1", "b2") for s in (0, 4)]
    saved(library, *kept)
    for chunk in kept:
        assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


# The budget


def test_a_refused_save_loses_nobodys_last_use(open_library, clock):
    a, b, c = chunks(3)
    library = open_library(disk_bytes=2 * size_of(a))
    saved(library, a, b, clock=clock)
    clock.now += 1
    assert library.store.open(a.key)
    with pytest.raises(StorageFull):
        library.store.save(make_chunk(text_key("long"), n=500))
    saved(library, c, clock=clock)
    assert library.store.open(a.key) and library.store.missing_reason(b.key) == "evicted"


def test_last_uses_that_were_not_written_yield_to_later_ones(library, clock):
    a = saved(library, make_chunk())
    library.store.touch([a.key])
    with pytest.raises(StorageFull), library.catalog.write() as db:
        library.store._rows._write_touched(db)
        clock.now += 1
        library.store.touch([a.key])
        raise StorageFull("full")
    library.store.flush()
    assert library.catalog.one("SELECT last_used FROM chunks")["last_used"] == clock.now


def test_a_chunk_larger_than_the_budget_evicts_nothing(open_library):
    small, large = make_chunk(), make_chunk(text_key("large"), n=500)
    library = open_library(disk_bytes=size_of(small))
    library.store.save(small)
    with pytest.raises(StorageFull):
        library.store.save(large)
    assert library.store.open(small.key)
    assert everything(library.root) == {str(library.store.path(small.key).relative_to(library.root))}


def test_a_library_reopened_with_a_smaller_budget_is_whole_and_makes_room_at_the_next_save(
    open_library, clock
):
    a, b, c = chunks(3)
    library = open_library(disk_bytes=2 * size_of(a))
    saved(library, a, b, clock=clock)
    library.close()
    library = open_library(disk_bytes=size_of(a))
    library.check()
    assert library.store.open(a.key) and library.store.open(b.key)
    library.store.save(c)
    assert library.store.stats()["bytes"] == size_of(c) and library.store.open(c.key)


def test_reasons_of_missing_chunks_are_forgotten_after_their_time(open_library, clock):
    a, b = chunks(2)
    library = open_library(disk_bytes=size_of(a), tombstone_seconds=100)
    library.store.save(a)
    clock.now += 1
    library.store.save(b)
    for seconds, reason in ((50, "evicted"), (100, "new")):
        library.close()
        clock.now += seconds
        library = open_library(disk_bytes=size_of(a), tombstone_seconds=100)
        assert library.store.missing_reason(a.key) == reason
        assert library.store.open(b.key)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from(["save", "open", "delete", "restart"]), st.integers(0, 5))))
def test_the_disk_store_behaves_like_an_lru_dictionary(tmp_path_factory, steps):

    clock, known = Clock(), chunks(6)
    limits = Limits(disk_bytes=3 * size_of(known[0]))
    root = tmp_path_factory.mktemp("model")
    library = Library.open(root, limits, clock=clock)
    model = []  # indices, least recently used first
    for step, i in steps:
        clock.now += 1
        chunk = known[i]
        if step == "save":
            if i not in model:
                # as the engine does before it compiles a deleted chunk
                assert not library.store.find([chunk.key])
                model = [*model, i][-3:]
            library.store.save(chunk)
        elif step == "open":
            stored = library.store.open(chunk.key)
            assert (stored is not None) == (i in model)
            if stored:
                assert torch.equal(read(stored, chunk.kv), chunk.kv)
                model.remove(i)
                model.append(i)
        elif step == "delete":
            drop(library.store, chunk.key, library.catalog)
            assert library.store.missing_reason(chunk.key) == "new"
            model = [j for j in model if j != i]
        else:
            library.close()
            library = Library.open(root, limits, clock=clock)
        library.check()
    assert len(everything(root)) == len(model)
    library.close()
