"""Documents that are cut: their chunks belong to the file as one chunk does."""

import json
from unittest.mock import Mock

import pytest
from library_tools import make_chunk

from mpic.errors import BadRequest, FileNotFound, HandleTaken
from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.library.folder.sidecars import Sidecar

SPLIT = {"mode": "fixed", "tokens": 4, "overlap": 0}


@pytest.fixture
def cutting(library):
    """A library that cuts every four characters, and the texts it was asked to cut."""
    asked = []

    def cut(text, split):
        asked.append((text, split["tokens"]))
        return [(at, min(at + split["tokens"], len(text))) for at in range(0, len(text), split["tokens"])]

    library.files.tokenize = lambda text: tuple(text.encode())
    library.files.cut = cut
    library.asked = asked
    return library


def keep(library, owner, text):
    """Store the compiled chunk of a text."""
    library.store.save(make_chunk(KVKey(owner, ChunkKey.of_text(text), "a1" * 32, Recipe("float32"))))


def kept(library, owner, text):
    key = KVKey(owner, ChunkKey.of_text(text), "a1" * 32, Recipe("float32"))
    return library.store.open(key) is not None


def test_a_document_is_cut_once_and_for_all(cutting, open_library):
    file = cutting.files.add("ann", b"abcdefghij", "t.txt", handle="T", split=SPLIT)
    assert cutting.asked == []  # not before it is needed
    chunks = cutting.files.chunks("ann", file)
    assert [bytes(c.token_ids).decode() for c in chunks] == ["abcd", "efgh", "ij"]
    assert [c.key for c in chunks] == [ChunkKey.of_text(t) for t in ("abcd", "efgh", "ij")]
    assert [c.label for c in chunks] == ["T 1/3", "T 2/3", "T 3/3"] and {c.file_id for c in chunks} == {
        file.id
    }
    assert cutting.files.chunks("ann", file.id) == chunks and len(cutting.asked) == 1
    assert (
        cutting.files.counts("ann", [file.id]) == {file.id: 3}
        and cutting.files.counts("bob", [file.id]) == {}
    )


def test_a_document_of_one_piece_is_a_chunk_as_ever(cutting):
    file = cutting.files.add("ann", b"abc", "t.txt", handle="T", split=SPLIT)
    [chunk] = cutting.files.chunks("ann", file)
    assert (chunk.key, chunk.label) == (file.key, "T")
    plain = cutting.files.add("ann", b"abcdefghij", "u.txt")
    assert [c.key for c in cutting.files.chunks("ann", plain)] == [plain.key]


def test_chunks_stay_while_another_file_has_them(cutting):
    one = cutting.files.add("ann", b"abcdefgh", "1.txt", split=SPLIT)
    two = cutting.files.add("ann", b"efghijkl", "2.txt", split=SPLIT)
    for file in (one, two):
        cutting.files.chunks("ann", file)
    for text in ("abcd", "efgh", "ijkl"):
        keep(cutting, "ann", text)
    removed = cutting.files.delete("ann", one.id)
    assert ChunkKey.of_text("abcd") in {c.key for c in removed.chunks}
    assert ChunkKey.of_text("efgh") not in {c.key for c in removed.chunks}
    assert [kept(cutting, "ann", t) for t in ("abcd", "efgh", "ijkl")] == [False, True, True]
    cutting.files.delete("ann", two.id)
    assert not kept(cutting, "ann", "efgh") and cutting.catalog.one("SELECT 1 FROM pieces") is None


def test_a_pin_holds_all_chunks(cutting):
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", split=SPLIT)
    cutting.files.chunks("ann", file)
    assert not cutting.store.pinned("ann", ChunkKey.of_text("efgh"))
    cutting.files.pin("ann", file.id)
    assert cutting.store.pinned("ann", ChunkKey.of_text("efgh"))
    assert not cutting.store.pinned("bob", ChunkKey.of_text("efgh"))


def test_a_failed_document_is_cut_when_it_is_uploaded_again(cutting):
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H")
    cutting.files.set_state("ann", file.id, "failed", error="too long")
    again = cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=SPLIT)
    assert (again.id, again.split, again.state) == (file.id, SPLIT, "compiling")
    assert len(cutting.files.chunks("ann", again)) == 2


def test_a_failed_document_that_is_cut_anew_has_the_tokens_of_its_new_pieces(cutting):
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=SPLIT)
    assert len(cutting.files.chunks("ann", file)) == 2
    cutting.files.set_state("ann", file.id, "failed", error="no memory")
    again = cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split={**SPLIT, "tokens": 3})
    assert again.id == file.id
    chunks = cutting.files.chunks("ann", again)
    assert [c.key for c in chunks] == [ChunkKey.of_text(t) for t in ("abc", "def", "gh")]
    assert [bytes(c.token_ids).decode() for c in chunks] == ["abc", "def", "gh"]
    cutting.files.delete("ann", file.id)
    assert not cutting.files._tokens._entries


@pytest.mark.parametrize(
    ("split", "texts"), [({**SPLIT, "tokens": 3}, ("abc", "def", "gh")), (None, ("abcdefgh",))]
)
def test_a_document_that_is_uploaded_with_another_split_while_it_is_cut_gets_the_new_pieces(
    cutting, split, texts
):
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=SPLIT)
    cut = cutting.files.cut

    def meanwhile(text, asked):
        cutting.files.cut = cut
        cutting.files.set_state("ann", file.id, "failed", error="no memory")
        cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=split)
        return cut(text, asked)

    cutting.files.cut = meanwhile
    for _ in range(2):
        assert [c.key for c in cutting.files.chunks("ann", file.id)] == [ChunkKey.of_text(t) for t in texts]


def test_a_document_that_is_deleted_while_it_is_cut_is_not_found(cutting):
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", split=SPLIT)
    cut = cutting.files.cut

    def meanwhile(text, asked):
        cutting.files.delete("ann", file.id)
        return cut(text, asked)

    cutting.files.cut = meanwhile
    with pytest.raises(FileNotFound):
        cutting.files.chunks("ann", file.id)
    assert cutting.catalog.one("SELECT 1 FROM pieces") is None


def test_a_failed_document_that_is_cut_anew_leaves_no_chunks_of_its_old_pieces(cutting):
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=SPLIT)
    other = cutting.files.add("ann", b"efghijkl", "2.txt", split=SPLIT)
    for one in (file, other):
        cutting.files.chunks("ann", one)
    for owner, text in (("ann", "abcd"), ("ann", "efgh"), ("bob", "abcd")):
        keep(cutting, owner, text)
    cutting.files.set_state("ann", file.id, "failed", error="no memory")
    cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split={**SPLIT, "tokens": 3})
    assert not kept(cutting, "ann", "abcd")
    assert kept(cutting, "ann", "efgh") and kept(cutting, "bob", "abcd")  # the piece of another file, or user


def test_another_cut_that_was_asked_for_is_another_file(cutting):
    cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=SPLIT)
    other = {**SPLIT, "tokens": 2}
    assert cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=other).split == SPLIT  # a default
    with pytest.raises(HandleTaken):
        cutting.files.add("ann", b"abcdefgh", "1.txt", handle="H", split=other, split_asked=True)
    new = cutting.files.add(
        "ann", b"abcdefgh", "1.txt", handle="H", split=other, split_asked=True, replace=True
    )
    assert new.split == other


def test_a_cut_that_is_impossible_says_so_each_time(cutting):
    cutting.files.cut = Mock(side_effect=BadRequest("too many"))
    file = cutting.files.add("ann", b"abcdefgh", "1.txt", split=SPLIT)
    for _ in range(2):
        with pytest.raises(BadRequest, match="too many"):
            cutting.files.chunks("ann", file)


def test_sidecars_of_earlier_versions_are_read(library):
    file = library.files.add("ann", b"abc", "t.txt")
    whole = Sidecar.of("file", library.files._rows.values(file))
    record = {name: value for name, value in whole.record.items() if name not in ("split", "press")}
    assert Sidecar.decode(Sidecar("file", record).encode(), "x") == whole
    cut = library.files.add("ann", b"abcd", "t.txt", split=SPLIT)
    assert (
        json.loads(Sidecar.of("file", library.files._rows.values(cut)).encode())["record"]["split"] == SPLIT
    )
