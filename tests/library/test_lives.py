"""Compiled chunks that nobody uses expire while their originals stay; references expire, and follow a folder."""

import asyncio
import errno
import json
import os
import shutil
from unittest.mock import Mock

import pytest
from library_tools import make_chunk, saved

from mpic.errors import BadRequest, ReferenceNotFound
from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.library import SHARED, Library, Limits
from mpic.library.caches import CachedText
from mpic.library.copies.bulk_import import ImportItem
from mpic.library.copies.sync import ReferenceSync
from mpic.library.store.chunk_rows import UNUSED

DAY = 86_400


def kv(text, owner="ann", model="a1" * 32):
    return KVKey(owner, ChunkKey.of_text(text), model, Recipe("float32"))


def stored(library, *texts, **which):
    for text in texts:
        saved(library, make_chunk(kv(text, **which)))


def there(library, *texts, **which):
    """Those of the texts that are compiled; looking at them is no use."""
    rows = library.catalog.read("SELECT key FROM chunks WHERE state = 'ready'")
    keys = {row["key"] for row in rows}
    return [text for text in texts if kv(text, **which).digest in keys]


def expired(library):
    return {(chunk.owner, chunk.key) for chunk in library.expire_kv()}


def test_a_chunk_expires_that_was_not_used_for_long_and_its_original_stays(open_library, clock):
    library = open_library(kv_ttl=DAY)
    file = library.files.add("ann", b"one", "one.txt")
    stored(library, "one", "two")
    clock.now += DAY - 1
    library.store.touch([kv("two")])  # kept in memory, as the engine's uses are
    assert expired(library) == set()
    clock.now += 1
    assert expired(library) == {("ann", ChunkKey.of_text("one"))}
    assert there(library, "one", "two") == ["two"] and not library.store.path(kv("one")).exists()
    assert library.store.open(kv("one")) is None and library.store.missing_reason(kv("one")) == "expired"
    assert (
        library.files.content("ann", file.id) == b"one"
        and library.files.get("ann", file.id).state == "compiling"
    )
    stored(library, "one")
    assert there(library, "one") == ["one"] and expired(library) == set()
    assert library.store.stats()["expired"] == 1


def test_without_a_time_nothing_expires(library, clock):
    stored(library, "one")
    clock.now += 100 * 366 * DAY
    assert expired(library) == set() and there(library, "one") == ["one"]


def test_a_file_says_for_how_long_its_chunks_are_kept_and_a_pin_for_ever(open_library, clock):
    library = open_library(kv_ttl=10)
    library.files.cut = lambda text, split: [(0, 3), (3, len(text))]
    add = lambda text, **more: library.files.add("ann", text.encode(), f"{text}.txt", **more)
    add("short", kv_ttl=5), add("long", kv_ttl=50), add("plain")
    library.files.pin("ann", add("pinned", kv_ttl=5).id)
    add("twice", kv_ttl=5), add("twice", handle="T", kv_ttl=50)
    pieces = library.files.chunks("ann", add("cutting", split={"mode": "fixed"}, kv_ttl=50))
    assert len(pieces) == 2
    names = ["short", "long", "plain", "pinned", "twice", "inline", "cut", "ting"]
    stored(library, *names)
    left = {}
    for after in (5, 10, 50):
        clock.now += after - max(left, default=0)
        expired(library)
        left[after] = there(library, *names)
    assert left == {
        5: ["long", "plain", "pinned", "twice", "inline", "cut", "ting"],
        10: ["long", "pinned", "twice", "cut", "ting"],
        50: ["pinned"],
    }


def test_a_file_alone_may_say_it_and_change_it(library, clock):
    file = library.files.add("ann", b"one", "one.txt", kv_ttl=5)
    stored(library, "one", "two")
    clock.now += 5
    assert library.files.keep_kv("ann", file.id, None).kv_ttl is None and expired(library) == set()
    library.files.keep_kv("ann", file.id, 5)
    assert expired(library) == {("ann", ChunkKey.of_text("one"))} and there(library, "two") == ["two"]
    with pytest.raises(BadRequest) as caught:
        library.files.keep_kv("ann", file.id, 0)
    assert caught.value.param == "kv_ttl"


def test_the_content_is_not_gone_while_another_form_of_it_is_in_use(open_library, clock):
    library = open_library(kv_ttl=10)
    stored(library, "one")
    clock.now += 5
    stored(library, "one", model="b2" * 32)
    clock.now += 5
    assert expired(library) == set() and there(library, "one") == []
    assert there(library, "one", model="b2" * 32) == ["one"]


def test_the_files_of_a_chunk_are_looked_up_and_not_all_files_read(library):
    values = {"default": 5, "shared": SHARED, "now": 1.0, "before": 0.5}
    plan = [row["detail"] for row in library.catalog.read(f"EXPLAIN QUERY PLAN {UNUSED}", **values)]
    assert [step for step in plan if step.startswith(("SCAN", "CO-ROUTINE"))] == [
        "SCAN c USING INDEX chunks_turn"
    ]


def test_a_host_tier_gives_up_what_expired(tmp_path, clock):
    with Library.open(tmp_path, Limits(kv_ttl=10), clock=clock, host="plain") as library:
        stored(library, "one", "two")
        clock.now += 10
        library.store.find([kv("two")])
        assert expired(library) == {("ann", ChunkKey.of_text("one"))}
        assert library.store.find([kv("one")]) == {}
        assert library.store.tiers()["host"]["chunks"] == 1


def test_a_cache_is_pinned_and_kept_as_a_whole(open_library, clock):
    library = open_library(kv_ttl=10)
    cache = library.caches.create("ann", [CachedText("a", 0, 1), CachedText("b", 1, 2)])
    stored(library, "a", "b")
    assert library.caches.pin("ann", cache.id).pinned
    clock.now += 10
    assert expired(library) == set()
    library.caches.pin("ann", cache.id, False)
    assert library.caches.keep_kv("ann", cache.id, 20).kv_ttl == 20
    assert expired(library) == set()
    clock.now += 10
    assert len(expired(library)) == 2


async def test_a_reference_expires_at_once_and_is_collected_later(library, clock):
    add = library.references.add
    kept = await add(b"kept", "k.txt", title="K", id="ref_kept")
    await add(b"short", "s.txt", title="S", id="ref_short", expires_after=10)
    stored(library, "short", owner=SHARED)
    library.references.listeners.append(told := Mock())
    clock.now += 10
    for gone in (library.references.get, library.references.pin, lambda id: library.references.extend(id, 5)):
        with pytest.raises(ReferenceNotFound):
            gone("ref_short")
    assert (
        library.references.listing().references
        == [kept]
        == library.references.many(["ref_short", "ref_kept"])
    )
    [removed] = library.references.collect_expired()
    assert [chunk.key for chunk in removed.chunks] == [ChunkKey.of_text("short")]
    assert told.call_args[0][0].what == "removed" and there(library, "short", owner=SHARED) == []
    assert library.references.collect_expired() == []


async def test_the_id_of_an_expired_reference_can_be_used_at_once(library, clock):
    add = library.references.add
    await add(b"one", "k.txt", title="K", id="ref_a", expires_after=10)
    with pytest.raises(BadRequest):
        await add(b"one", "k.txt", title="K", id="ref_b", expires_after=0)
    clock.now += 10
    assert (await add(b"two", "k.txt", title="K", id="ref_a")).version == 2
    assert library.references.collect_expired() == [] and len(library.references.collect_retired()) == 1
    again = await library.references.replace("ref_a", b"three", expires_after=5)
    assert again.expires_at == clock.now + 5
    assert (await library.references.replace("ref_a", b"four")).expires_at == clock.now + 5
    assert library.references.extend("ref_a", None).expires_at is None


# A sync


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"the text of {name}")
    return folder


def sync_of(library, source):
    changed, removed = Mock(), Mock()
    sync = ReferenceSync(library.references, source, changed, removed)
    sync.changed, sync.removed = changed, removed
    return sync


def ids(library):
    return sorted(reference.id for reference in library.references.listing().references)


async def by_hand(library, id="ref_mine"):
    return await library.references.add(b"mine", "m.txt", title="M", id=id)


def run(sync):
    result = sync.run()
    assert not result.notes and result.problem is None
    return +result.counts


@pytest.fixture
def held(library):
    """A library with a reference that an administrator has added."""
    asyncio.run(by_hand(library))
    return library


def test_a_sync_adds_replaces_and_removes_what_it_has_added_and_nothing_else(held, folder):
    sync = sync_of(held, folder)
    assert run(sync) == {"added": 2} and ids(held) == ["ref_a.txt", "ref_b.txt", "ref_mine"]
    assert run(sync) == {"unchanged": 2} and sync.changed.call_count == 2
    (folder / "a.txt").write_text("another text of a")
    (folder / "b.txt").unlink()
    (folder / "sub").mkdir()
    (folder / "sub" / "c.txt").write_text("c")
    assert run(sync_of(held, folder)) == {"replaced": 1, "removed": 1, "added": 1}  # as after a restart
    assert held.references.text(held.references.get("ref_a.txt")) == "another text of a"
    assert "ref_b.txt" not in ids(held) and "ref_mine" in ids(held) and len(ids(held)) == 3


def test_a_sync_reads_again_only_what_has_changed(library, folder, monkeypatch):
    sync = sync_of(library, folder)
    run(sync)
    reads = []
    content = ImportItem.content
    monkeypatch.setattr(
        ImportItem, "content", lambda item, most: (reads.append(item.where), content(item, most))[1]
    )
    (folder / "b.txt").write_text("something longer than before")
    assert run(sync) == {"unchanged": 1, "replaced": 1} and reads == ["b.txt"]
    library.references.remove("ref_a.txt")  # by an administrator
    assert run(sync) == {"unchanged": 1, "added": 1} and reads == ["b.txt", "a.txt"]


def test_a_sync_takes_over_no_reference_of_somebody_else(library, folder):
    asyncio.run(by_hand(library, "ref_a.txt"))
    result = sync_of(library, folder).run()
    assert +result.counts == {"added": 1, "refused": 1} and result.notes[0].code == "reference_exists"
    assert library.references.text(library.references.get("ref_a.txt")) == "mine"
    (folder / "a.txt").unlink()
    assert run(sync_of(library, folder)) == {"unchanged": 1} and "ref_a.txt" in ids(library)
    other = folder.parent / "other"
    other.mkdir()
    (other / "z.txt").write_text("z")
    assert run(sync_of(library, other)) == {"added": 1} and len(ids(library)) == 3


@pytest.mark.parametrize("emptied", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_that_is_gone_or_empty_removes_nothing(library, folder, emptied):
    sync = sync_of(library, folder)
    run(sync)
    shutil.rmtree(folder)
    emptied(folder)
    assert sync.run().problem and len(ids(library)) == 2 and not sync.removed.called


def test_a_part_of_a_folder_that_cannot_be_read_removes_nothing(library, folder, monkeypatch):
    """As for a server that is not root; a file system's own folder does not count."""
    (folder / "lost+found").mkdir()
    (folder / "sub").mkdir()
    sync = sync_of(library, folder)
    run(sync)
    (folder / "a.txt").unlink()
    scandir, closed = os.scandir, {"sub", "lost+found"}

    def refused(path):
        if os.path.basename(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert "sub cannot be read (Permission denied)" in sync.run().problem and len(ids(library)) == 2
    closed.remove("sub")
    assert run(sync) == {"unchanged": 1, "removed": 1} and ids(library) == ["ref_b.txt"]


def test_a_bad_line_of_a_listing_removes_nothing(library, tmp_path):
    listing = tmp_path / "list.jsonl"
    lines = [json.dumps({"id": f"n{i}", "title": f"N{i}", "text": f"note {i}"}) for i in range(3)]
    listing.write_text("\n".join(lines))
    sync = sync_of(library, listing)
    assert run(sync) == {"added": 3}
    listing.write_text("\n".join([lines[0], lines[1][:-5]]))
    result = sync.run()
    assert result.problem and +result.counts == {"unchanged": 1, "refused": 1} and len(ids(library)) == 3
    listing.write_text("\n".join(lines[:2]))
    assert run(sync) == {"unchanged": 2, "removed": 1} and ids(library) == ["ref_n0", "ref_n1"]


def test_a_bad_file_is_noted_and_the_others_are_synced(library, folder):
    (folder / "bad.png").write_bytes(b"\x89PNG nothing")
    result = sync_of(library, folder).run()
    assert (result.notes[0].where, result.notes[0].code) == ("bad.png", "invalid_image")
    assert result.counts["added"] == 2
