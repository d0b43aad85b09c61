"""The disk tier: found again, bounded, and honest about why something is gone."""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tools import MODEL, Clock, FullDisk, everything, kill, make_chunk, read, same_inputs, text_key

from mpic.durable import Files
from mpic.engine.base import ChunkStore, StoredChunk
from mpic.errors import CorruptFile, IntegrityError, NotFound, StorageFull
from mpic.kv.chunk import ChunkKV
from mpic.kv.file import encode
from mpic.library import Library
from mpic.library.store.deleted import Deleted


def size_of(chunk):
    return sum(map(len, encode(chunk)))


def chunks(count, **options):
    return [make_chunk(text_key(f"text {i}", **options), seed=i) for i in range(count)]


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_it_keeps_the_engines_contract(library):
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
    class Watching(Files):
        opened = 0

        def open(self, path):
            Watching.opened += 1
            return super().open(path)

    library = open_library(files=Watching())
    kept = chunks(3)
    for chunk in kept[:2]:
        library.store.save(chunk)
    queries = []
    read_rows, library.catalog.read = (
        library.catalog.read,
        lambda *a, **k: queries.append(1) or read_rows(*a, **k),
    )
    found = library.store.find([chunk.key for chunk in (*kept, kept[0])])
    assert set(found) == {kept[0].key, kept[1].key} and len(queries) == 1 and Watching.opened == 0
    assert torch.equal(read(found[kept[0].key], kept[0].kv), kept[0].kv)
    assert same_inputs(found[kept[1].key].inputs, kept[1].inputs)


def test_what_was_found_and_is_gone_or_bad_when_it_is_read_says_so(library):
    gone, bad = chunks(2)
    for chunk in (gone, bad):
        library.store.save(chunk)
    found = library.store.find([gone.key, bad.key])
    library.store.path(gone.key).unlink()
    flip(library.store.path(bad.key), 4100)
    with pytest.raises(NotFound):
        read(found[gone.key], gone.kv)
    with pytest.raises(CorruptFile):
        read(found[bad.key], bad.kv)
    assert library.store.find([gone.key, bad.key]) == {}
    assert library.store.missing_reason(bad.key) == "corrupt"


def test_names_hold_whole_digests_and_never_the_user(library):
    chunk = make_chunk(text_key(owner="../ann@example.org"))
    library.store.save(chunk)
    (name,) = everything(library.root)
    model, owner, file = name.split("/")[1:]
    assert model == MODEL[:12] and len(owner) == 64 and "ann" not in name
    assert file == f"{chunk.key.digest}.safetensors"


def test_it_survives_a_restart(open_library):
    library = open_library()
    kept = chunks(3)
    for chunk in kept:
        library.store.save(chunk)
    library.close()
    library = open_library()
    assert library.recovered == {"missing_chunks": 0, "lost_files": 0, "orphans": 0}
    for chunk in kept:
        assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_saving_twice_writes_once(library):
    chunk = make_chunk()
    library.store.save(chunk)
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
    for chunk in kept:
        library.store.save(chunk)
    for chunk in kept:
        assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


# The budget


def test_the_least_recently_used_goes_first(open_library, clock):
    a, b, c, d = chunks(4)
    library = open_library(disk_bytes=3 * size_of(a))
    for chunk in (a, b, c):
        clock.now += 1
        library.store.save(chunk)
    clock.now += 1
    assert library.store.open(a.key)
    clock.now += 1
    library.store.save(d)
    assert library.store.open(b.key) is None
    assert library.store.missing_reason(b.key) == "evicted"
    assert all(library.store.open(chunk.key) for chunk in (a, c, d))
    assert library.store.stats()["evicted"] == 1
    assert len(everything(library.root)) == 3
    clock.now += 1
    library.store.save(b)
    assert torch.equal(read(library.store.open(b.key), b.kv), b.kv)


def test_last_use_survives_a_restart(open_library, clock):
    a, b, c = chunks(3)
    library = open_library(disk_bytes=2 * size_of(a))
    for chunk in (a, b):
        clock.now += 1
        library.store.save(chunk)
    clock.now += 1
    library.store.open(a.key)
    library.close()
    library = open_library(disk_bytes=2 * size_of(a))
    library.store.save(c)
    assert library.store.open(a.key) and library.store.open(b.key) is None


def test_a_chunk_larger_than_the_budget_evicts_nothing(open_library):
    small, large = make_chunk(), make_chunk(text_key("large"), n=500)
    library = open_library(disk_bytes=size_of(small))
    library.store.save(small)
    with pytest.raises(StorageFull):
        library.store.save(large)
    assert library.store.open(small.key)
    assert everything(library.root) == {str(library.store.path(small.key).relative_to(library.root))}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["save", "open", "delete", "restart"]), st.integers(0, 5))))
def test_it_behaves_like_an_lru_of_a_dictionary(tmp_path_factory, steps):
    from mpic.library import Limits

    clock, known = Clock(), chunks(6)
    limits = Limits(disk_bytes=3 * size_of(known[0]))
    root = tmp_path_factory.mktemp("model")
    library = Library.open(root, limits, clock=clock)
    model = []  # indices, least recently used first
    for step, i in steps:
        clock.now += 1
        chunk = known[i]
        if step == "save":
            library.store.save(chunk)
            if i not in model:
                model = [*model, i][-3:]
        elif step == "open":
            stored = library.store.open(chunk.key)
            assert (stored is not None) == (i in model)
            if stored:
                assert torch.equal(read(stored, chunk.kv), chunk.kv)
                model.remove(i)
                model.append(i)
        elif step == "delete":
            library.store.delete(chunk.key)
            assert library.store.missing_reason(chunk.key) == "new"
            model = [j for j in model if j != i]
        else:
            library.close()
            library = Library.open(root, limits, clock=clock)
        library.check()
    assert len(everything(root)) == len(model)
    library.close()


# Damage


@pytest.mark.parametrize("at", [0, 50, 4096, -1])
def test_a_bad_file_is_moved_aside_counted_and_compiled_again(library, at):
    chunk = make_chunk(image=True)
    library.store.save(chunk)
    flip(library.store.path(chunk.key), at)
    stored = library.store.open(chunk.key)
    if stored is not None:
        with pytest.raises(CorruptFile):
            read(stored, chunk.kv)
    assert library.store.open(chunk.key) is None
    assert library.store.missing_reason(chunk.key) == "corrupt"
    assert library.store.stats()["corrupt"] == 1
    (aside,) = everything(library.root)
    assert aside.startswith(f"quarantine/{chunk.key.digest}.safetensors@")
    library.store.save(chunk)
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_a_file_of_another_model_is_moved_aside(library):
    ours, theirs = make_chunk(), make_chunk(text_key(model="b2" * 32))
    library.store.save(ours)
    library.store.save(theirs)
    library.store.path(ours.key).write_bytes(library.store.path(theirs.key).read_bytes())
    assert library.store.open(ours.key) is None
    assert library.store.missing_reason(ours.key) == "corrupt"
    assert library.store.open(theirs.key)


def test_the_quarantine_is_bounded_and_keeps_the_newest(open_library, clock):
    library = open_library(quarantine_files=2)
    for chunk in chunks(4):
        clock.now += 1
        library.store.save(chunk)
        flip(library.store.path(chunk.key), 0)
        assert library.store.open(chunk.key) is None
    aside = everything(library.root)
    assert {float(name.split("@")[1]) for name in aside} == {clock.now, clock.now - 1}


def test_a_deleted_chunk_leaves_the_quarantine_too(library):
    chunk, other = chunks(2)
    for c in (chunk, other):
        library.store.save(c)
        flip(library.store.path(c.key), 0)
        assert library.store.open(c.key) is None
    library.store.delete(chunk.key)
    (left,) = everything(library.root)
    assert other.key.digest in left


def test_a_file_that_vanished_is_compiled_again(library):
    chunk = make_chunk()
    library.store.save(chunk)
    library.store.path(chunk.key).unlink()
    assert library.store.open(chunk.key) is None
    assert library.store.missing_reason(chunk.key) == "corrupt"
    library.store.save(chunk)
    assert library.store.open(chunk.key)


def test_a_failure_to_open_is_not_held_against_the_file(open_library):
    class TooMany(Files):
        broken = False

        def open(self, path):
            if self.broken:
                raise OSError(24, "too many open files")
            return super().open(path)

    files = TooMany()
    library = open_library(files=files)
    chunk = make_chunk()
    library.store.save(chunk)
    files.broken = True
    assert library.store.open(chunk.key) is None
    assert library.store.stats()["unreadable"] == 1
    files.broken = False
    assert library.store.open(chunk.key)


def test_starting_up_makes_files_and_rows_agree(open_library):
    library = open_library(check=False)
    gone, cut, good = chunks(3)
    for chunk in (gone, cut, good):
        library.store.save(chunk)
    library.store.path(gone.key).unlink()
    with library.store.path(cut.key).open("r+b") as file:
        file.truncate(100)
    folder = library.store.path(good.key).parent
    (folder / ".x.tmp").write_bytes(b"half")
    (folder / f"{'0' * 64}.safetensors").write_bytes(b"nobody's")
    with pytest.raises(IntegrityError):
        library.check()
    library.close()
    library = open_library()
    assert library.recovered == {"missing_chunks": 2, "lost_files": 0, "orphans": 3}
    library.check()
    assert library.store.open(good.key)
    assert library.store.missing_reason(gone.key) == library.store.missing_reason(cut.key) == "corrupt"
    assert len(everything(library.root)) == 1


def test_reasons_are_forgotten_in_the_end(open_library, clock):
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


# A full disk


def test_a_full_disk_fails_the_save_and_nothing_else(open_library):
    disk = FullDisk()
    library = open_library(files=disk)
    old, new = chunks(2)
    library.store.save(old)
    disk.left = 5000
    with pytest.raises(StorageFull):
        library.store.save(new)
    assert library.store.open(new.key) is None
    assert torch.equal(read(library.store.open(old.key), old.kv), old.kv)
    assert len(everything(library.root)) == 1
    disk.left = None
    library.store.save(new)
    assert torch.equal(read(library.store.open(new.key), new.kv), new.kv)


# Concurrency


class Gate(Files):
    """Renames wait for permission, once ``closed``."""

    def __init__(self):
        super().__init__()
        self.closed = False
        self.reached = threading.Event()
        self.go = threading.Event()

    def rename(self, source, target):
        if self.closed:
            self.reached.set()
            assert self.go.wait(20)
        super().rename(source, target)


@pytest.mark.parametrize("how", ["one", "content"])
def test_a_chunk_deleted_while_it_is_saved_does_not_come_back(open_library, how):
    gate = Gate()
    library = open_library(files=gate)
    file = library.files.add("ann", b"some text", "t.txt")
    chunk = make_chunk(text_key("some text"))
    gate.closed = True
    saving = threading.Thread(target=library.store.save, args=(chunk,))
    saving.start()
    assert gate.reached.wait(20)
    if how == "one":
        library.store.delete(chunk.key)
    else:
        library.files.delete("ann", file.id)
    gate.go.set()
    saving.join()
    assert library.store.open(chunk.key) is None
    assert not any(name.startswith("kv/") for name in everything(library.root))
    library.store.save(chunk)
    assert library.store.open(chunk.key)


def test_a_chunk_deleted_before_it_is_saved_does_not_come_back(library):
    """A request opens (and misses) a chunk, compiles it, and saves it in the background: too late."""
    chunk = make_chunk(text_key("some text"))
    file = library.files.add("ann", b"some text", "t.txt")
    assert library.store.open(chunk.key) is None
    library.files.delete("ann", file.id)
    library.store.save(chunk)
    assert not everything(library.root)
    library.store.save(make_chunk(text_key("some text", owner="bob")))
    assert library.store.open(chunk.key) is None  # a new request for the same content
    library.store.save(chunk)
    assert library.store.open(chunk.key)


def test_of_many_deletions_a_bounded_number_is_remembered_and_nothing_deleted_comes_back(library):
    deleted = library.store._deleted = Deleted(capacity=4)
    late = [make_chunk(text_key(f"text {i}")) for i in range(12)]
    files = [library.files.add("ann", f"text {i}".encode(), "t.txt") for i in range(12)]
    assert not library.store.find([chunk.key for chunk in late])
    for file in files:
        library.files.delete("ann", file.id)
    assert len(deleted) <= 8
    for chunk in late:
        library.store.save(chunk)
    assert not everything(library.root)
    assert (
        library.store.open(late[0].key) is None
    )  # the oldest deletion, and a new request for the same content
    library.store.save(late[0])
    assert library.store.open(late[0].key)


def test_a_deletion_that_is_forgotten_refuses_who_asked_too_long_ago_and_nobody_else():
    deleted = Deleted(capacity=2)
    a, b, c, d = (text_key(name) for name in "abcd")
    assert deleted.allows(a)  # nothing was ever deleted
    deleted.add("ann", b.chunk)
    deleted.ask([a, b, c])
    assert deleted.allows(a) and deleted.allows(b)
    for name in "xyz":
        deleted.add("ann", text_key(name).chunk)
    assert deleted.allows(b) and deleted.allows(c)
    assert not deleted.allows(a) and not deleted.allows(d) and not deleted.allows(text_key("x"))
    deleted.ask([a])
    assert deleted.allows(a) and len(deleted) <= 4


def test_many_threads_on_a_small_budget(open_library):
    known = chunks(8)
    library = open_library(disk_bytes=6 * size_of(known[0]))
    failures, wrong = [], []

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        try:
            for _ in range(25):
                chunk = known[int(torch.randint(8, (1,), generator=g))]
                stored = library.store.open(chunk.key)
                if stored is None:
                    library.store.missing_reason(chunk.key)
                    library.store.save(chunk)
                elif not torch.equal(read(stored, chunk.kv), chunk.kv):
                    wrong.append(chunk.key)
                if int(torch.randint(6, (1,), generator=g)) == 0:
                    library.store.delete(chunk.key)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not wrong
    library.check()
    assert len(everything(library.root)) == library.store.stats()["chunks"]
    assert library.store.stats()["corrupt"] == 0


def test_a_killed_process_loses_no_saved_chunk(open_library):
    library = open_library()
    kept = chunks(3)
    for chunk in kept:
        library.store.save(chunk)
    kill(library)
    library = open_library()
    for chunk in kept:
        assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_a_chunk_that_contradicts_itself_leaves_the_store_working(library):
    good = make_chunk()
    with pytest.raises(ValueError):
        library.store.save(ChunkKV(good.key, good.inputs, good.kv.double()))
    library.store.save(good)
    assert library.store.open(good.key)
