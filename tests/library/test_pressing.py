"""Chunks that are stored are pressed: nothing is lost, nothing else changes, and it goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from library_tools import (
    MODEL,
    Clock,
    Crash,
    CrashingFiles,
    FullDisk,
    Unreadable,
    everything,
    kill,
    make_chunk,
    no_memory_once,
    read,
    saved,
    size_of,
    text_key,
)

from mpic.durable import FileSystem
from mpic.kv.chunk import ChunkKV
from mpic.library import SHARED, Library, Limits
from mpic.library.pressing import candidates, press_chunks
from mpic.library.store import HostTier
from mpic.press import parse_press

PRESS = parse_press("streaming-50-2")
KEYS = [text_key(f"text {i}", owner=owner) for i, owner in enumerate(("ann", "ann", "bob", SHARED))]
KEYS[1] = replace(KEYS[1], recipe=replace(KEYS[1].recipe, sink=4, packet="ad"))
CHUNKS = [make_chunk(key, n=40, seed=i) for i, key in enumerate(KEYS)]
OTHER = make_chunk(text_key("text 0", model="b2" * 32), n=40)


def compressed(chunk: ChunkKV) -> ChunkKV:
    """Keep the first and the last tokens."""
    recipe = replace(chunk.key.recipe, press=PRESS.name)
    kv = torch.cat([chunk.kv[:, :, :, :2], chunk.kv[:, :, :, 22:]], 3)
    return ChunkKV(replace(chunk.key, recipe=recipe), chunk.inputs, kv.contiguous())


def press(library, replaced=False, compress=compressed, **options):
    return press_chunks(library, PRESS, MODEL, compress, replaced, **options)


def outcomes(done):
    return [one.outcome for one in done]


def holds(library, chunk):
    """Return whether a chunk is stored as it is."""
    found = library.store.open(chunk.key)
    return found is not None and torch.equal(read(found, chunk.kv), chunk.kv)


@pytest.fixture
def full(library, clock):
    for chunk in (*CHUNKS, OTHER):
        library.store.save(chunk)
        clock.now += 10
    return library


def test_every_chunk_of_the_model_gets_its_pressed_form_and_keeps_its_own(full):
    done = press(full)
    assert outcomes(done) == ["pressed"] * 4 + ["model"]
    for one, chunk in zip(done, CHUNKS, strict=False):
        assert (one.before, one.after) == (size_of(chunk), size_of(compressed(chunk)))
        assert holds(full, chunk) and holds(full, compressed(chunk))
    assert holds(full, OTHER) and full.store.stats()["chunks"] == 9


def test_replacing_removes_what_was_pressed_and_nothing_else(full):
    before = everything(full.root)
    assert outcomes(press(full, replaced=True)) == ["pressed"] * 4 + ["model"]
    after = everything(full.root)
    gone, come = (
        {str(full.store.path(chunk.key).relative_to(full.root)) for chunk in some}
        for some in (CHUNKS, map(compressed, CHUNKS))
    )
    assert set(before) - set(after) == gone and set(after) - set(before) == come
    for chunk in CHUNKS:
        assert holds(full, compressed(chunk)) and full.store.missing_reason(chunk.key) == "recipe"
    assert full.store.missing_reason(text_key("never")) == "new"
    assert full.reconcile()["leftovers"] == 0
    full.store.save(CHUNKS[0])  # whoever asks for it compiles it again
    assert holds(full, CHUNKS[0])


def test_pressing_is_no_use_of_a_chunk(full, clock):
    used = dict(full.catalog.read("SELECT key, last_used FROM chunks"))
    clock.now += 1000
    press(full)
    full.store.flush()
    now = dict(full.catalog.read("SELECT key, last_used FROM chunks"))
    for chunk in CHUNKS:
        assert now[chunk.key.digest] == now[compressed(chunk).key.digest] == used[chunk.key.digest]


def test_again_it_finds_everything_there_and_a_later_replacement_only_removes(full):
    press(full)
    assert outcomes(press(full)) == ["already"] * 4 + ["model"]
    saved = full.store.stats()["saved"]
    assert outcomes(press(full, replaced=True)) == ["already"] * 4 + ["model"]
    assert full.store.stats()["saved"] == saved and full.store.stats()["chunks"] == 5
    assert outcomes(press(full, replaced=True)) == ["model"]
    assert all(holds(full, compressed(chunk)) for chunk in CHUNKS)


def test_only_one_users_chunks(full):
    assert outcomes(press(full, user="bob")) == ["pressed"]
    assert holds(full, compressed(CHUNKS[2])) and not holds(full, compressed(CHUNKS[3]))
    assert [row["owner"] for row in candidates(full, SHARED)] == [SHARED]


@pytest.mark.parametrize("replaced", [False, True])
def test_an_interruption_keeps_what_is_done_and_the_next_call_goes_on(full, replaced):
    def interrupted(chunk):
        if chunk.key == KEYS[2]:
            raise KeyboardInterrupt
        return compressed(chunk)

    with pytest.raises(KeyboardInterrupt):
        press(full, replaced, interrupted)
    assert [holds(full, compressed(chunk)) for chunk in CHUNKS] == [True, True, False, False]
    done = outcomes(press(full, replaced))
    assert done == ["already"] * (0 if replaced else 2) + ["pressed"] * 2 + ["model"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_crash_at_any_change_loses_no_chunk(tmp_path, replaced):
    for at in range(100):
        root = tmp_path / str(at)
        with Library.open(root, clock=Clock()) as library:
            saved(library, *CHUNKS[:2])
        files = CrashingFiles(10**9)
        library = Library.open(root, filesystem=files, clock=Clock())
        files.at = files.changes + at
        try:
            press(library, replaced)
            ended = not files.dead
        except Crash:
            ended = False
        kill(library)
        with Library.open(root, clock=Clock()) as library:
            for chunk in CHUNKS[:2]:
                assert holds(library, chunk) or holds(library, compressed(chunk))
            press(library, replaced)
            assert all(holds(library, compressed(chunk)) for chunk in CHUNKS[:2])
            assert any(holds(library, chunk) for chunk in CHUNKS[:2]) != replaced
            stored = [name for name in everything(root) if name.startswith("kv/")]
            assert len(stored) == (2 if replaced else 4)
            library.check()
        if ended:
            assert at > 8
            return
    raise AssertionError("it never ended without a crash")


def test_a_replaced_file_that_could_not_be_removed_goes_at_the_next_start(tmp_path):
    files = FileSystem()
    files.remove = Mock(side_effect=OSError("it is held"))
    library = Library.open(tmp_path, filesystem=files)
    library.store.save(CHUNKS[0])
    assert outcomes(press(library, replaced=True)) == ["pressed"] and len(everything(tmp_path)) == 2
    kill(library)
    with Library.open(tmp_path) as library:
        assert (library.recovered["leftovers"], library.recovered["orphans"]) == (1, 0)
        assert not holds(library, CHUNKS[0]) and holds(library, compressed(CHUNKS[0]))


def test_nothing_is_evicted_for_a_pressed_form_but_it_may_take_the_place_of_its_source(open_library):
    size = size_of(CHUNKS[0])
    library = open_library(disk_bytes=2 * size + 100)
    saved(library, *CHUNKS[:2])
    done = press(library)
    assert outcomes(done) == ["left"] * 2 and "without evicting" in done[0].why
    assert all(holds(library, chunk) for chunk in CHUNKS[:2]) and library.store.stats()["evicted"] == 0
    assert outcomes(press(library, replaced=True)) == ["pressed"] * 2
    assert library.store.stats()["evicted"] == 0


def test_a_full_disk_leaves_the_uncompressed_forms(open_library):
    disk = FullDisk()
    library = open_library(filesystem=disk)
    saved(library, *CHUNKS[:2])
    disk.left = 100
    assert outcomes(press(library, replaced=True)) == ["left"] * 2
    disk.left = None
    assert all(holds(library, chunk) for chunk in CHUNKS[:2])
    assert outcomes(press(library, replaced=True)) == ["pressed"] * 2


def test_a_damaged_file_is_put_aside_and_a_missing_one_noticed_while_others_are_pressed(full):
    damaged, missing = (full.store.path(key) for key in KEYS[:2])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    missing.unlink()
    done = press(full, replaced=True)
    assert outcomes(done) == ["left", "left", "pressed", "pressed", "model"]
    assert "damaged and was put aside" in done[0].why and done[1].why == "is gone"
    assert [full.store.missing_reason(key) for key in KEYS[:2]] == ["corrupt", "corrupt"]
    assert len(list((full.root / "quarantine").glob("*"))) == 1


def test_a_file_that_cannot_be_read_now_stays(open_library):
    disk = Unreadable()
    library = open_library(filesystem=disk)
    library.store.save(CHUNKS[0])
    disk.broken = True
    (one,) = press(library, replaced=True)
    assert one.outcome == "left" and "Input/output" in one.why
    disk.broken = False
    assert holds(library, CHUNKS[0])


def test_chunks_for_which_there_is_no_memory_stay_while_others_are_pressed(full, monkeypatch):
    monkeypatch.setattr("mpic.library.upkeep.torch", Mock(empty=no_memory_once(torch.empty)))
    assert outcomes(press(full, replaced=True)) == ["left", "pressed", "pressed", "pressed", "model"]
    assert outcomes(press(full, replaced=True)) == ["pressed", "model"]


def test_a_chunk_that_cannot_be_compressed_for_want_of_memory_stays(full):
    failing = no_memory_once(compressed)
    assert outcomes(press(full, replaced=True, compress=failing))[:2] == ["left", "pressed"]


def test_progress_ends_at_the_bytes_of_the_candidates(full):
    told = []
    press(full, progress=told.append)
    assert len(told) == 5 and sum(told) == sum(size_of(chunk) for chunk in (*CHUNKS, OTHER))


def test_a_library_that_serves_an_engine_is_not_pressed(tmp_path):
    with Library.open(tmp_path, Limits(host_bytes=1 << 20), host="plain") as library:
        assert isinstance(library.store._tiers[0], HostTier)
        library.store.save(CHUNKS[0])
        with pytest.raises(ValueError, match="tiers beside"):
            press(library)
