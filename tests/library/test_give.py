"""The files of one user given to another."""

import pytest

from mpic.errors import CacheNotFound
from mpic.library.caches import CachedText
from mpic.library.copies.give import Given, give


@pytest.mark.parametrize(
    ("givers", "receivers", "later"), [(50, None, None), (None, 50, None), (50, 500, 500), (500, 50, 500)]
)
def test_a_file_that_the_receiver_has_already_keeps_its_id_and_the_later_expiry(
    library, clock, givers, receivers, later
):
    library.files.add("ann", b"text", "t.txt", handle="T", expires_after=givers)
    own = library.files.add("bob", b"text", "t.txt", handle="T", expires_after=receivers)
    assert give(library, "ann", "bob") == [Given("T")]
    [kept] = library.files.page("bob").files
    assert (kept.id, kept.expires_at) == (own.id, later and clock.now + later)
    assert library.files.page("ann").files == []


def test_the_expiry_of_another_file_with_the_handle_is_left_alone(library):
    library.files.add("ann", b"text", "t.txt", handle="T", expires_after=50)
    own = library.files.add("bob", b"other", "t.txt", handle="T")
    [given] = give(library, "ann", "bob")
    assert "handle" in given.why and library.files.page("bob").files == [own]
    assert len(library.files.page("ann").files) == 1


@pytest.mark.parametrize("handle", ["T", None])
def test_a_pin_is_given_with_its_file(library, handle):
    library.files.pin("ann", library.files.add("ann", b"text", "t.txt", handle=handle).id)
    library.files.add("ann", b"other", "o.txt")
    give(library, "ann", "bob")
    assert {file.filename: file.pinned for file in library.files.page("bob").files} == {
        "t.txt": True,
        "o.txt": False,
    }


def test_giving_that_was_interrupted_makes_no_second_file(library, clock, monkeypatch):
    for _ in range(2):  # the same file twice, which are two
        library.files.add("ann", b"text", "t.txt", metadata={"n": 1}, expires_after=50)
    library.files.add("ann", b"text", "u.txt")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(library.files, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        give(library, "ann", "bob")
    [first] = library.files.page("bob").files
    clock.now += 10
    assert give(library, "ann", "bob") == [Given("t.txt"), Given("t.txt"), Given("u.txt")]
    given = library.files.page("bob", order="asc").files
    assert [(file.filename, file.expires_at) for file in given] == [
        ("t.txt", clock.now + 40),
        ("t.txt", clock.now + 40),
        ("u.txt", None),
    ]
    assert given[0].id == first.id and library.files.page("ann").files == []


def test_a_damaged_copy_of_an_interrupted_call_does_not_cost_the_original(library):
    library.files.add("ann", b"text", "t.txt")
    damaged = library.files.add("bob", b"text", "t.txt")
    damaged.path.write_bytes(b"damaged")
    assert give(library, "ann", "bob") == [Given("t.txt")]
    library.files.delete("bob", damaged.id)
    [kept] = library.files.page("bob").files
    assert library.files.content("bob", kept.id) == b"text"


PARTS = [CachedText("one", 0, 3), CachedText("two", 3, 6)]


def test_giving_that_was_interrupted_makes_no_second_cache(library, clock, monkeypatch):
    for _ in range(2):  # the same cache twice, which are two
        library.caches.create("ann", PARTS, name="C", ttl=50)
    library.caches.create("ann", PARTS[:1], name="C")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(library.caches, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        give(library, "ann", "bob")
    [first] = library.caches.page("bob").caches
    clock.now += 10
    assert give(library, "ann", "bob") == [Given("C")] * 3
    given = library.caches.page("bob", order="asc").caches
    assert [(len(cache.chunks), cache.expires_at) for cache in given] == [
        (2, clock.now + 40),
        (2, clock.now + 40),
        (1, None),
    ]
    assert given[0].id == first.id and library.caches.page("ann").caches == []


def test_a_damaged_cache_of_an_interrupted_call_does_not_cost_the_original(library):
    library.caches.create("ann", PARTS, name="C")
    damaged = library.caches.create("bob", PARTS, name="C")
    damaged.chunks[0].file.path.write_bytes(b"damaged")
    assert give(library, "ann", "bob") == [Given("C")]
    library.caches.delete("bob", damaged.id)
    [kept] = library.caches.page("bob").caches
    assert [library.files.content("bob", chunk.file.id) for chunk in kept.chunks] == [b"one", b"two"]


def test_a_cache_that_expires_while_others_are_given_does_not_stop_them(library, monkeypatch):
    first, _ = (library.caches.create("ann", [CachedText(text, 0, 3)], name=text) for text in ("one", "two"))
    get = library.caches.get

    def expiring(user, id):
        if id == first.id:
            raise CacheNotFound(f"no cache {id!r}")
        return get(user, id)

    with monkeypatch.context() as late:
        late.setattr(library.caches, "get", expiring)
        assert give(library, "ann", "bob") == [Given("one", f"no cache {first.id!r}"), Given("two")]
