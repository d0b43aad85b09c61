"""``check`` beside a server: what it changes meanwhile is no problem."""

import pytest
from library_tools import chunks, flip, make_chunk, size_of, text_key

from mpic.library import Library
from mpic.library.upkeep import check


@pytest.fixture
def beside(library):
    with Library.open_read_only(library.root) as other:
        yield other


def path_of(library, path):
    return str(path.relative_to(library.root))


def evict(library, chunk):
    library.store._rows.mark([chunk.key.digest], "evicted")
    library.store.path(chunk.key).unlink()


def test_what_a_server_changes_while_a_check_reads_is_no_problem(open_library):
    few = chunks(4)
    library = open_library(disk_bytes=3 * size_of(few[0]) + 100)
    files = [library.files.add("ann", f"file {i}".encode(), f"{i}.txt") for i in range(4)]
    for chunk in few[:3]:
        library.store.save(chunk)
    read = []

    def change(size):
        read.append(size)
        if len(read) == 1:  # the originals are listed, and one of them has been read
            library.files.delete("ann", files[3].id)
            library.files.add("ann", b"new", "new.txt")
        elif len(read) == len(files) + 1:  # the chunks are listed, and one of them has been read
            library.store.save(few[3])  # another one is evicted
            library.files.pin("ann", files[0].id)

    with Library.open_read_only(library.root) as other:
        assert check(other, progress=change) == []
    assert len(read) == 4 + 3 and library.store.stats()["evicted"] == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_chunk_that_is_evicted_between_its_row_and_its_file_is_no_problem(library, beside, times):
    chunk, evicted, read = make_chunk(), 0, beside.catalog.read

    def and_evict(sql, *values, **named):
        nonlocal evicted
        if not sql.startswith("SELECT * FROM chunks") or evicted == times:
            return read(sql, *values, **named)
        library.store.save(chunk)
        rows = read(sql, *values, **named)
        evict(library, chunk)
        evicted += 1
        return rows

    beside.catalog.read = and_evict
    assert check(beside) == [] and evicted == times


@pytest.mark.parametrize("odd", [False, True])
def test_what_comes_and_goes_between_the_catalogue_and_the_disk_is_no_problem(library, beside, odd):
    """At every look at the catalogue, either a chunk goes and an original comes, or the other way round."""
    chunk, read, looks = make_chunk(), beside.catalog.read, 0

    def turn():
        if looks % 2 == odd:
            library.store.save(chunk)
            for file in library.files.page("ann").files:
                library.files.delete("ann", file.id)
        else:
            library.files.add("ann", b"another text", "t.txt")
            if library.store._rows.state(chunk.key) == "ready":
                evict(library, chunk)

    def and_change(sql, *values, **named):
        nonlocal looks
        rows = read(sql, *values, **named)
        looks += 1
        turn()
        return rows

    turn()
    beside.catalog.read = and_change
    assert check(beside, contents=False) == [] and looks > 5


def test_a_missing_original_and_a_short_chunk_are_problems_of_their_parts(library, beside):
    file = library.files.add("ann", b"some text", "t.txt")
    library.store.save(make_chunk())
    content = library.store.path(text_key()).read_bytes()
    library.store.path(text_key()).write_bytes(content[:-1])
    file.path.unlink()
    assert [problem.path for problem in check(beside, contents=False)] == ["DiskStore", "UploadLibrary"]
    library.store.path(text_key()).write_bytes(content)
    file.path.write_bytes(b"some text")


def test_a_sidecar_that_is_rewritten_after_its_row_is_read_is_no_problem(library, beside):
    file, read = library.files.add("ann", b"some text", "t.txt"), beside.catalog.read

    def and_pin(sql, *values, **named):
        rows = read(sql, *values, **named)
        if sql.startswith("SELECT * FROM files") and not library.files.get("ann", file.id).pinned:
            library.files.pin("ann", file.id)
        return rows

    beside.catalog.read = and_pin
    assert check(beside) == [] and library.files.get("ann", file.id).pinned


@pytest.mark.parametrize("kind", ["original", "sidecar", "quotas", "chunk"])
def test_what_is_damaged_beside_a_server_is_a_problem(library, beside, kind):
    file = library.files.add("ann", b"some text", "t.txt")
    library.set_quota("ann", files=7)
    library.store.save(make_chunk())
    path = {
        "original": file.path,
        "sidecar": file.path.with_name(f"{file.path.name}.json"),
        "quotas": file.path.with_name("owner.json"),
        "chunk": library.store.path(text_key()),
    }[kind]
    flip(path, path.stat().st_size - 5)
    [problem] = check(beside)
    assert problem.path == path_of(library, path)
    flip(path, path.stat().st_size - 5)
    assert check(beside) == []
