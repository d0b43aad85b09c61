"""References, their versions, and running requests that hold an old version."""

import asyncio
import gc
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from library_tools import FullDisk, Upload, encoded, everything, kill, make_chunk, picture, read
from server_helpers import wait_until

from mpic.durable import FileSystem
from mpic.errors import BadRequest, InvalidImage, ReferenceExists, ReferenceNotFound, StorageFull, TooLarge
from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.library import SHARED, Library


def kv_of(reference):
    """The compiled chunk of a reference, as the engine would store it."""
    return make_chunk(KVKey(SHARED, reference.key, "a1" * 32, Recipe("float32")))


async def test_a_reference_comes_back_as_it_was_added(library, clock):
    words = {"title": "Harbour", "description": "from above", "metadata": {"year": 2025, "good": True}}
    added = await library.references.add(Upload(encoded()), "map.png", **words)
    assert added.id.startswith("ref_") and added.version == 1 and added.kind == "image"
    assert {name: getattr(added, name) for name in words} == words
    assert (added.filename, added.bytes) == ("map.png", len(encoded()))
    assert added.key == ChunkKey.of_image(picture())
    assert added.created_at == added.updated_at == clock.now
    assert (added.state, added.tokens) == ("compiling", None)
    assert library.references.get(added.id) == added
    assert library.references.content(added) == encoded()
    chunk = library.references.chunk(added)
    assert (chunk.owner, chunk.label, chunk.key, chunk.file_id) == (SHARED, "Harbour", added.key, added.id)
    assert np.array_equal(chunk.load_image(), picture())


async def test_a_text_reference_is_tokenized_and_readable(library):
    added = await library.references.add("Grüße".encode(), "t.txt", title="T")
    assert library.references.text(added) == "Grüße"
    assert library.references.chunk(added).token_ids == tuple("Grüße".encode())
    image = await library.references.add(encoded(), "i.png", title="I")
    with pytest.raises(ValueError, match="image"):
        library.references.text(image)


async def test_references_survive_a_restart(open_library):
    library = open_library()
    added = await library.references.add(b"one", "t", title="T", metadata={"a": 0.5}, id="ref_one")
    library.references.set_state(added, "ready", tokens=3)
    library.close()
    library = open_library()
    found = library.references.get("ref_one")
    assert (found.state, found.tokens, found.metadata) == ("ready", 3, {"a": 0.5})
    assert library.references.text(found) == "one" and library.references.pending() == []
    assert not any(library.recovered.values())


async def test_listing_goes_by_age_and_pages(library):
    ids = [(await library.references.add(f"t{i}".encode(), "t", title=f"T{i}")).id for i in range(4)]
    image = await library.references.add(encoded(), "i", title="I")
    await library.references.replace(ids[1], b"new")
    page = library.references.listing(limit=3)
    assert [r.id for r in page.references] == [image.id, ids[3], ids[2]] and page.has_more
    page = library.references.listing(after=ids[2], limit=3)
    assert [r.id for r in page.references] == [ids[1], ids[0]] and not page.has_more
    assert [r.id for r in library.references.listing(order="asc", kind="text").references] == ids
    assert [r.id for r in library.references.many([ids[2], "ref_none", ids[0]])] == [ids[2], ids[0]]
    with pytest.raises(ReferenceNotFound):
        library.references.listing(after="ref_none")
    for bad in ({"order": "up"}, {"limit": 0}):
        with pytest.raises(BadRequest):
            library.references.listing(**bad)


async def test_a_replacement_is_a_new_version_and_keeps_what_is_not_given(library, clock):
    old = await library.references.add(b"one", "t.txt", title="T", description="d", metadata={"a": 1})
    library.references.set_state(old, "ready", tokens=3)
    clock.now += 5
    new = await library.references.replace(old.id, encoded(), metadata={"b": 2})
    assert (new.id, new.version, new.kind, new.state, new.tokens) == (old.id, 2, "image", "compiling", None)
    assert (new.title, new.description, new.filename, new.metadata) == ("T", "d", "t.txt", {"b": 2})
    assert (new.created_at, new.updated_at) == (old.created_at, clock.now)
    assert library.references.get(old.id) == new
    library.references.set_state(old, "ready", tokens=99)  # a compilation of the old version ends late
    assert library.references.get(old.id).state == "compiling"


@pytest.mark.parametrize("press", [None, "knorm-50"])
async def test_a_request_in_flight_keeps_the_version_it_holds(library, press):
    old = await library.references.add(encoded(), "i.png", title="T")
    library.store.save(kv_of(old))
    held = library.references.chunk(old).pressed(press)
    await library.references.replace(old.id, encoded(picture(1)))
    assert library.references.collect_retired() == []
    assert np.array_equal(held.load_image(), picture())
    assert library.store.open(kv_of(old).key) is not None
    another = library.references.chunk(old)  # found before it was replaced, linked after
    del held
    gc.collect()
    assert library.references.collect_retired() == []
    del another
    gc.collect()
    (removed,) = library.references.collect_retired()
    assert removed.file == old and (removed.chunks[0].owner, removed.chunks[0].key) == (SHARED, old.key)
    assert library.store.open(kv_of(old).key) is None and not old.path.exists()
    with pytest.raises(ReferenceNotFound):
        library.references.chunk(old)
    with pytest.raises(ReferenceNotFound):
        library.references.content(old)


async def test_a_removed_reference_is_invisible_at_once_and_its_files_wait_for_links(library):
    added = await library.references.add(encoded(), "i.png", title="T")
    held = library.references.chunk(added)
    removed = library.references.remove(added.id)
    assert removed.file == added and (removed.chunks[0].owner, removed.chunks[0].key) == (SHARED, added.key)
    for gone in (library.references.get, library.references.remove):
        with pytest.raises(ReferenceNotFound):
            gone(added.id)
    assert np.array_equal(held.load_image(), picture())
    del held
    gc.collect()
    assert len(library.references.collect_retired()) == 1 and not everything(library.root)


async def test_removing_a_reference_that_nothing_links_leaves_no_file(library):
    added = await library.references.add(b"one", "t", title="T")
    library.store.save(kv_of(added))
    library.references.remove(added.id)
    assert not everything(library.root) and library.references.collect_retired() == []
    assert library.references.stats() == {"references": 0, "bytes": 0, "retired": 0}


async def test_content_of_another_reference_stays(library):
    one = await library.references.add(b"same", "a", title="A")
    two = await library.references.add(b"same", "b", title="B")
    library.store.save(kv_of(one))
    assert library.references.remove(one.id).chunks == ()
    assert library.store.open(kv_of(two).key) is not None
    new = await library.references.replace(two.id, b"same")
    assert [removed.chunks for removed in library.references.collect_retired()] == [()]
    assert library.store.open(kv_of(new).key) is not None and library.references.content(new) == b"same"
    await library.references.replace(two.id, b"other")
    assert [removed.chunks[0].key for removed in library.references.collect_retired()] == [two.key]
    assert library.store.open(kv_of(two).key) is None


async def test_listeners_get_committed_changes_and_their_errors_are_logged(library):
    heard = []

    def good(change):
        what, reference = change
        seen = library.references.many([reference.id])
        assert seen == ([] if what == "removed" else [reference])
        heard.append((what, reference.version))

    library.references.listeners += [Mock(side_effect=RuntimeError), good]
    added = await library.references.add(b"one", "t", title="T")
    await library.references.replace(added.id, b"two")
    library.references.remove(added.id)
    assert heard == [("added", 1), ("replaced", 2), ("removed", 2)]


@pytest.mark.parametrize(
    "change, error",
    [
        ({"title": ""}, BadRequest),
        ({"title": "a\nb"}, BadRequest),
        ({"title": "x" * 256}, BadRequest),
        ({"description": "x" * 4097}, BadRequest),
        ({"id": "one"}, BadRequest),
        ({"id": "ref_../x"}, BadRequest),
        ({"id": "ref_there"}, ReferenceExists),
        ({"metadata": {"a": [1]}}, BadRequest),
        ({"metadata": {"a": float("nan")}}, BadRequest),
        ({"metadata": {"": 1}}, BadRequest),
        ({"metadata": {"a": "x" * 1025}}, BadRequest),
        ({"metadata": {str(i): i for i in range(33)}}, BadRequest),
        ({"source": encoded()[:60]}, InvalidImage),
        ({"source": b"x" * 3000}, TooLarge),
    ],
)
async def test_a_refused_reference_leaves_nothing(open_library, change, error):
    library = open_library(upload_bytes=2500)
    await library.references.add(b"there", "t", title="T", id="ref_there")
    before = everything(library.root)
    words = {"source": b"text", "title": "T", **change}
    with pytest.raises(error):
        await library.references.add(words.pop("source"), "f", **words)
    # what had been received is discarded on a thread
    await wait_until(lambda: everything(library.root) == before)
    with pytest.raises(ReferenceNotFound):
        await library.references.replace("ref_none", b"x")


async def test_a_full_disk_refuses_a_replacement_and_keeps_the_reference(open_library):
    files = FullDisk()
    library = open_library(filesystem=files)
    old = await library.references.add(b"old" * 1000, "t", title="T")
    files.left = 100
    with pytest.raises(StorageFull):
        await library.references.replace(old.id, b"new" * 1000)
    files.left = None
    assert library.references.get(old.id) == old and library.references.content(old) == b"old" * 1000


async def test_replacements_at_once_each_get_a_version(library):
    added = await library.references.add(b"0", "t", title="T")
    contents = [f"new {i}".encode() for i in range(6)]
    done = await asyncio.gather(*(library.references.replace(added.id, content) for content in contents))
    assert sorted(r.version for r in done) == [2, 3, 4, 5, 6, 7]
    assert library.references.get(added.id) in done
    assert len(library.references.collect_retired()) == 6
    assert len(everything(library.root)) == 1


class Meeting(FileSystem):
    """Makes received uploads wait for each other; ``before`` runs when all are there."""

    def __init__(self, parties, before=None):
        super().__init__()
        self.barrier, self.waiting = threading.Barrier(parties, before), False

    def open(self, path):
        if self.waiting and path.parent.name == "tmp":  # read back to be decoded
            self.barrier.wait(60)
        return super().open(path)


async def test_concurrent_replacements_keep_each_others_fields(open_library):
    files = Meeting(parties=2)
    library = open_library(filesystem=files)
    old = await library.references.add(b"0", "t", title="old", description="old", metadata={"old": 1})
    files.waiting = True
    await asyncio.gather(
        library.references.replace(old.id, b"1", title="new", metadata={"new": 2}),
        library.references.replace(old.id, b"2", description="new"),
    )
    now = library.references.get(old.id)
    assert (now.version, now.title, now.description, now.metadata) == (3, "new", "new", {"new": 2})


async def test_a_replacement_keeps_the_words_of_one_that_came_while_it_was_received(library):
    old = await library.references.add(b"0", "old.txt", title="old")

    async def rename():
        if library.references.get(old.id).version == 1:
            await library.references.replace(old.id, b"1", "new.txt", title="new")

    last = await library.references.replace(old.id, Upload(b"2", before=rename), description="d")
    assert (last.version, last.title, last.filename, last.description) == (3, "new", "new.txt", "d")
    assert library.references.content(last) == b"2"


@pytest.fixture
def meanwhile(open_library):
    """Make a library with a reference, and run something while the reference is replaced."""

    async def make(change):
        files = Meeting(parties=1, before=lambda: change(library.references))
        library = open_library(filesystem=files)
        await library.references.add(b"0", "t", title="T", id="ref_a")
        files.waiting = True
        return library

    return make


async def test_a_pin_set_while_a_replacement_is_stored_stays(meanwhile):
    library = await meanwhile(lambda references: references.pin("ref_a"))
    assert (await library.references.replace("ref_a", b"1")).pinned
    assert library.references.get("ref_a").pinned


async def test_a_replacement_of_a_reference_removed_meanwhile_is_refused(meanwhile):
    library = await meanwhile(lambda references: references.remove("ref_a"))
    with pytest.raises(ReferenceNotFound):
        await library.references.replace("ref_a", b"1")
    assert not {name for name in everything(library.root) if name.startswith("files/")}


async def test_links_made_while_versions_are_collected_always_find_their_original(library):
    added = await library.references.add(encoded(), "t", title="T")
    stop = threading.Event()

    def link():
        while not stop.is_set():
            try:
                chunk = library.references.chunk(library.references.get(added.id))
            except ReferenceNotFound:  # replaced and collected between the two calls
                continue
            chunk.load_image()

    links = [asyncio.ensure_future(asyncio.to_thread(link)) for _ in range(2)]
    try:
        for i in range(15):
            await library.references.replace(added.id, encoded(picture(i)))
            await asyncio.to_thread(library.references.collect_retired)
    finally:
        stop.set()
    await asyncio.gather(*links)


async def test_retired_versions_are_collected_at_the_next_start(tmp_path):
    library = Library.open(tmp_path)
    old = await library.references.add(encoded(), "t", title="T")
    library.store.save(kv_of(old))
    held = library.references.chunk(old)
    new = await library.references.replace(old.id, b"new")
    library.store.save(kv_of(new))
    kill(library)
    del held
    with Library.open(tmp_path) as library:
        library.check()
        assert not any(library.recovered.values())
        assert library.references.stats()["retired"] == 0 and not old.path.exists()
        stored = library.store.open(kv_of(new).key)
        assert torch.equal(read(stored, kv_of(new).kv), kv_of(new).kv)
        assert library.store.open(kv_of(old).key) is None


async def test_version_numbers_continue_when_an_id_is_used_again(library):
    held = []
    for text in (b"one", b"three"):
        await library.references.add(text, "t.txt", title="T", id="ref_same")
        held.append(library.references.chunk(await library.references.replace("ref_same", text * 2)))
        if text == b"one":
            library.references.remove("ref_same")
    last = library.references.get("ref_same")
    assert (last.version, library.references.text(last)) == (4, "threethree")
    library.check()
    assert len(held) == 2


async def test_an_id_used_again_is_never_mistaken_for_the_earlier_reference(library):
    references = library.references
    old = await references.add(b"old words", "x", title="o", id="ref_a")
    references.remove("ref_a")
    new = await references.add(b"new words", "x", title="n", id="ref_a")
    assert references.chunk(new).token_ids == tuple(b"new words")
    with pytest.raises(ReferenceNotFound):
        references.chunk(old)
    references.set_state(old, "failed", error="of the old one")
    assert references.get("ref_a").state == "compiling"


async def test_a_reference_replaced_during_its_removal_is_removed(library, monkeypatch):
    references = library.references
    await references.add(b"old words", "x", title="o", id="ref_a")
    stale = references.get("ref_a")
    await references.replace("ref_a", b"newer words")
    answers = [stale, references.get("ref_a")]
    monkeypatch.setattr(references, "get", lambda id: answers.pop(0))
    assert references.remove("ref_a").file.version == 2
    monkeypatch.undo()
    with pytest.raises(ReferenceNotFound):
        references.get("ref_a")


@pytest.mark.parametrize("words", [{"description": "\ud800"}, {"metadata": {"a": "\ud800"}}])
async def test_half_of_a_surrogate_pair_is_refused(words, library):
    with pytest.raises(BadRequest, match="surrogate"):
        await library.references.add(b"x", "x", title="t", **words)
