"""Host memory before the disk and a remote tier behind it: look-ups, copies and deletions."""

import random
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch
from engine_kit import family, ids, prompt_of, request_of, text_chunk
from library_tools import Remote, drop, flip, make_chunk, read, saved, size_of, text_key
from page_locking import page_locked
from threads_kit import in_threads

from mpic.engine.native.engine import NativeEngine
from mpic.errors import CorruptFile, IntegrityError
from mpic.kv.chunk import KVKey, Recipe
from mpic.library import HostTier, Library, Limits
from mpic.library.store import host
from mpic.library.store.shares import TierBounds
from mpic.library.store.tombstones import DeletedContents


def kv_bytes(chunk):
    return chunk.kv.nbytes + chunk.inputs.nbytes


@pytest.fixture
def tiered(tmp_path):
    opened = []

    def open_one(remote=(), **limits):
        opened.append(Library.open(tmp_path, Limits(**limits), host="plain", remote=remote))
        return opened[-1]

    yield open_one
    for library in opened:
        library.check()
        library.close()


def test_saved_chunks_are_served_from_host_memory(tiered):
    library, chunk = tiered(), make_chunk(image=True)
    library.store.save(chunk)
    stored = library.store.find([chunk.key, text_key("other")])
    assert list(stored) == [chunk.key] and stored[chunk.key].tier == "host"
    assert torch.equal(read(stored[chunk.key], chunk.kv), chunk.kv)
    tiers = library.stats()["tiers"]
    assert list(tiers) == ["host", "disk"]
    assert (tiers["host"]["requested"], tiers["host"]["hits"]) == (2, 1)
    assert (tiers["disk"]["requested"], tiers["disk"]["hits"]) == (1, 0)
    assert tiers["host"]["bytes"] == kv_bytes(chunk) and tiers["host"]["bytes_read"] == chunk.kv.nbytes


def test_chunks_read_from_disk_are_copied_to_host_memory(tiered):
    library, chunk = tiered(), make_chunk()
    library.store.disk.save(chunk)
    first = library.store.open(chunk.key)
    assert first.tier == "disk" and torch.equal(read(first, chunk.kv), chunk.kv)
    second = library.store.open(chunk.key)
    assert second.tier == "host" and torch.equal(read(second, chunk.kv), chunk.kv)
    assert torch.equal(second.inputs.token_ids, chunk.inputs.token_ids)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_host_memory_that_cannot_be_had_costs_neither_a_save_nor_a_read(tiered, monkeypatch, error):
    remote, chunk = Remote(), make_chunk()
    library = tiered(remote=[remote])
    monkeypatch.setattr(host, "memory_for", Mock(side_effect=error))
    library.store.save(chunk)
    assert chunk.key in remote.chunks  # the tiers behind it have the chunk
    tiers = library.stats()["tiers"]
    assert (tiers["host"]["failed"], tiers["host"]["bytes"], tiers["remote"]["failed"]) == (1, 0, 0)
    found = library.store.find([chunk.key])[chunk.key]
    assert found.tier == "disk" and torch.equal(read(found, chunk.kv), chunk.kv)


def test_an_abandoned_read_promotes_nothing(tiered):
    library, chunk = tiered(), make_chunk()
    library.store.disk.save(chunk)
    layers = library.store.open(chunk.key).read_layers(torch.empty_like(chunk.kv))
    next(layers)
    layers.close()
    assert library.store.open(chunk.key).tier == "disk"


def test_a_damaged_file_is_never_promoted(tiered):
    library, chunk = tiered(), make_chunk()
    library.store.disk.save(chunk)
    flip(library.store.path(chunk.key), 4096 + 100)
    with pytest.raises(CorruptFile):
        read(library.store.find([chunk.key])[chunk.key], chunk.kv)
    assert library.store.find([chunk.key]) == {} and library.store.missing_reason(chunk.key) == "corrupt"


def test_a_deleted_content_leaves_every_tier(tiered):
    remote = Remote()
    library = tiered(remote=[remote])
    file = library.files.add("ann", b"text", "t")
    chunk = saved(library, make_chunk(KVKey("ann", file.key, "a1" * 32, Recipe("float32"))))
    assert remote.chunks
    reading = library.store.find([chunk.key])[chunk.key]
    library.files.delete("ann", file.id)
    assert torch.equal(read(reading, chunk.kv), chunk.kv)  # a holder can still read it
    assert library.store.find([chunk.key]) == {} and not remote.chunks
    library.store.disk.save(make_chunk(text_key("late")))


def test_a_read_under_way_does_not_bring_a_deleted_content_back(tiered):
    library, chunk = tiered(), make_chunk()
    file = library.files.add("ann", b"some text", "t")
    assert file.key == chunk.key.chunk
    library.store.disk.save(chunk)
    layers = library.store.open(chunk.key).read_layers(torch.empty_like(chunk.kv))
    next(layers)
    library.files.delete("ann", file.id)
    list(layers)
    assert library.store.find([chunk.key]) == {}


def test_a_chunk_evicted_from_the_disk_comes_back_from_a_remote_tier(tiered):
    remote, chunk = Remote(), make_chunk()
    library = tiered(remote=[remote], host_bytes=0)
    library.store.save(chunk)
    drop(library.store.disk, chunk.key, library.catalog)
    found = library.store.find([chunk.key])[chunk.key]
    assert found.tier == "remote" and torch.equal(read(found, chunk.kv), chunk.kv)
    assert library.store.open(chunk.key).tier == "disk"
    assert torch.equal(read(library.store.disk.open(chunk.key), chunk.kv), chunk.kv)


def test_host_memory_keeps_its_budget_and_the_shares_of_users(tiered):
    names = ("a1", "a2", "b1", "b2", "b3", "b4")
    chunks = {name: make_chunk(text_key(name, owner=name[0])) for name in names}
    size = kv_bytes(chunks["a1"])
    library = tiered(host_bytes=4 * size)
    saved(library, *chunks.values())
    tiers = {name: library.store.open(chunk.key).tier for name, chunk in chunks.items()}
    assert tiers == {"a1": "host", "a2": "host", "b1": "disk", "b2": "disk", "b3": "host", "b4": "host"}
    stats = library.stats()["tiers"]["host"]
    assert (stats["evicted"], stats["evicted_budget"], stats["bytes"]) == (2, 2, 4 * size)


def test_a_pinned_file_stays_in_host_memory(tiered):
    chunk = make_chunk()
    size = kv_bytes(chunk)
    library = tiered(host_bytes=2 * size)
    file = library.files.add("ann", b"some text", "t")
    library.files.pin("ann", file.id)
    for name in ("some text", "x", "y", "z"):
        library.store.save(make_chunk(text_key(name)))
    assert library.store.open(chunk.key).tier == "host"


def test_host_memory_remembers_a_bounded_number_of_deletions_and_keeps_nothing_deleted():
    tier = HostTier(TierBounds(1 << 20))
    tier._dropped = DeletedContents(capacity=4)
    late = [make_chunk(text_key(f"text {i}")) for i in range(12)]
    tier.find([chunk.key for chunk in late])
    for chunk in late:
        tier.drop(chunk.key.owner, chunk.key.chunk)
    for chunk in late:
        tier.save(chunk)
    assert tier.stats()["chunks"] == 0 and len(tier._dropped) <= 8
    tier.find([late[0].key])
    tier.save(late[0])
    assert tier.stats()["chunks"] == 1


def test_a_chunk_larger_than_host_memory_is_refused_and_counted():
    tier = HostTier(TierBounds(100))
    tier.save(make_chunk())
    assert tier.stats()["refused"] == 1 and tier.find([text_key()]) == {}
    tier.check()
    tier._used["ann"] = 5
    with pytest.raises(IntegrityError):
        tier.check()


def test_host_memory_under_many_threads_adds_up():
    chunks = [make_chunk(text_key(str(i), owner="abc"[i % 3]), seed=i) for i in range(24)]
    tier = HostTier(TierBounds(9 * kv_bytes(chunks[0])))

    def work(number):
        for i in range(120):
            chunk = chunks[(i * 7 + number * 5) % len(chunks)]
            tier.save(chunk)
            for stored in tier.find([chunk.key]).values():
                assert torch.equal(read(stored, chunk.kv), chunk.kv)
            if i % 10 == 0:
                tier.drop(chunk.key.owner, chunk.key.chunk)

    in_threads(work, range(4))
    tier.check()


def test_an_engine_links_a_chunk_from_host_memory_with_the_same_answer(tmp_path):
    """A second engine over the same library has nothing resident, so it asks the tiers."""
    document = text_chunk(ids(3, 40))
    prompt = prompt_of(ids(1, 5), document, ids(2, 5))
    answers = set()
    for tiers in (("compiled", "host"), ("disk", "host")):
        with Library.open(tmp_path, host="plain") as library:
            for expected in tiers:
                with closing(NativeEngine(family("llama").loaded, library.store, pages=40)) as engine:
                    answer = engine.submit(request_of(prompt, "mpic-4")).result()
                assert [use.tier for use in answer.usage.chunks] == [expected]
                answers.add(tuple(answer.token_ids))
            library.check()
    assert len(answers) == 1


def test_the_disk_keeps_what_is_served_from_host_memory(tmp_path, clock):
    a, b, c = (make_chunk(text_key(name)) for name in "abc")
    with Library.open(tmp_path, Limits(disk_bytes=2 * size_of(a)), clock=clock, host="plain") as library:
        saved(library, a, b, clock=clock)
        clock.now += 1
        assert library.store.find([a.key])[a.key].tier == "host"
        saved(library, c, clock=clock)
        assert library.store.missing_reason(b.key) == "evicted"
        assert list(library.store.disk.find([a.key, c.key])) == [a.key, c.key]


def test_the_disk_keeps_what_requests_link_from_the_device(tmp_path, clock):
    a, b, c = (text_chunk(ids(seed, 40)) for seed in (3, 4, 5))

    def asked(engine, *chunks):
        keys = []
        for chunk in chunks:
            clock.now += 1
            prompt = prompt_of(ids(1, 5), chunk, ids(2, 5))
            engine.submit(request_of(prompt, "mpic-4", tokens=1)).result()
            keys.append(engine.linker.key(chunk))
        return keys

    def engine_of(library):
        return closing(NativeEngine(family("llama").loaded, library.store, pages=40))

    with Library.open(tmp_path, clock=clock) as library:
        with engine_of(library) as engine:
            asked(engine, a, b)
        size = library.store.stats()["bytes"]
    with Library.open(tmp_path, Limits(disk_bytes=size), clock=clock) as library:
        with engine_of(library) as engine:
            keys = asked(engine, a, b, a, c)
        assert library.store.missing_reason(keys[1]) == "evicted"
        assert len(library.store.find([keys[0], keys[3]])) == 2


def test_a_page_locked_tier_counts_what_is_allocated_and_lends_it(monkeypatch):
    """Torch rounds page-locked memory up to a power of two; the budget is of that."""
    monkeypatch.setattr(host, "memory_for", lambda shape, dtype, page_locked: torch.empty(shape, dtype=dtype))
    chunk = make_chunk(text_key("some words"))
    rounded = 1 << (chunk.kv.nbytes - 1).bit_length()
    assert rounded > chunk.kv.nbytes
    for budget, kept in ((rounded + chunk.inputs.nbytes, 1), (rounded + chunk.inputs.nbytes - 1, 0)):
        tier = HostTier(TierBounds(budget), page_locked=True)
        tier.save(chunk)
        assert tier.stats()["chunks"] == kept and tier.stats()["bytes"] in (0, budget)
        tier.check()
        for stored in tier.find([chunk.key]).values():
            assert torch.equal(stored.lend(), chunk.kv)
            assert tier.stats()["bytes_read"] == chunk.kv.nbytes
    plain = HostTier(TierBounds(kv_bytes(chunk)))
    plain.save(chunk)
    assert plain.find([chunk.key])[chunk.key].lend() is None and plain.stats()["bytes"] == kv_bytes(chunk)


def test_a_page_locked_tier_stays_within_its_budget_whatever_sizes_come_and_go(monkeypatch):
    """Torch's allocator keeps what was evicted, by size."""
    locked, allocator = page_locked()
    monkeypatch.setattr(host, "PAGE_LOCKED", locked)
    chunks = [make_chunk(text_key(f"{i}"), n) for i, n in enumerate((4, 9, 20, 40, 80) * 4)]
    budget = 3 * host.allocated(chunks[4].kv.nbytes, page_locked=True)
    tier = HostTier(TierBounds(budget), page_locked=True)
    for chunk in random.Random(2).choices(chunks, k=100):
        tier.save(chunk)
        (stored,) = tier.find([chunk.key]).values()
        assert torch.equal(stored.lend(), chunk.kv)
        del stored  # it could be read after its eviction
        tier.check()
    assert allocator.most <= budget and allocator.emptied > 5


def test_a_tier_that_cannot_be_closed_does_not_keep_the_folder(tmp_path):
    with pytest.raises(RuntimeError, match="stuck"), Library.open(tmp_path, host="plain") as library:
        library.store.close = Mock(side_effect=RuntimeError("stuck"))
    Library.open(tmp_path).close()
