"""The first key changes who may call a server: the command warns about it, and existing files can be given to a
user."""

import json

import pytest
from typer.testing import CliRunner

from mpic import cli
from mpic.keys import KeyStore
from mpic.library import Library
from mpic.library.caches import CachedText


@pytest.fixture
def mpic(tmp_path):
    def run(*args, **options):
        return CliRunner().invoke(cli.app, [*args, "--data-dir", str(tmp_path)], **options)

    return run


def test_the_first_key_says_what_it_changes(mpic):
    first = mpic("keys", "create", "alice")
    assert first.exit_code == 0 and first.stdout.startswith("mpic_")
    for word in ("first key", "MPIC_API_KEY", "--api-key", "`local`", "mpic library give local alice"):
        assert word in first.stderr.replace("\n", " ")
    second = mpic("keys", "create", "ben")
    assert second.exit_code == 0 and "first key" not in second.stderr


def test_in_a_terminal_it_asks_before_anything_changes(mpic, tmp_path, monkeypatch):
    monkeypatch.setattr("mpic.cli.keys._in_terminal", lambda: True)
    asked = []
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))
    assert mpic("keys", "create", "alice").exit_code == 1 and asked
    store = KeyStore(tmp_path)
    assert not store.exist()
    store.close()
    assert mpic("keys", "create", "alice", "--yes").exit_code == 0 and len(asked) == 1


def test_the_way_back_is_in_the_help(mpic):
    told = " ".join(CliRunner().invoke(cli.app, ["keys", "--help"]).output.replace("│", "").split())
    assert "keys.sqlite" in told and "mpic library give" in told


def test_what_was_uploaded_without_keys_can_be_given_to_a_user(mpic, tmp_path):
    with Library.open(tmp_path) as library:
        library.files.add("local", b"one", "one.txt", handle="ONE", expires_after=1000, metadata={"a": 1})
        library.files.add("local", b"two", "two.txt")
        library.files.add("local", b"mine", "three.txt", handle="THREE")
        library.files.add("alice", b"hers", "three.txt", handle="three")
        library.caches.create(
            "local", [CachedText("some text", 0, 9), CachedText("more", 9, 13)], name="manual", ttl=500
        )
    done = mpic("library", "give", "local", "alice", "--json")
    left = [one for one in json.loads(done.stdout) if one["why"]]
    assert done.exit_code == 1 and [one["name"] for one in left] == ["THREE"] and "handle" in left[0]["why"]
    with Library.open(tmp_path) as library:
        one = library.files.by_handle("alice", "ONE")
        assert library.files.content("alice", one.id) == b"one" and one.metadata == {"a": 1}
        assert 900 < one.expires_at - library.clock() <= 1001
        assert [f.filename for f in library.files.page("local").files] == ["three.txt"]
        assert len(library.files.page("alice").files) == 3
        [cache] = library.caches.page("alice").caches
        assert cache.name == "manual" and [c.start for c in cache.chunks] == [0, 9]
        assert library.caches.page("local").caches == []
        assert library.files.delete("local", library.files.by_handle("local", "THREE").id)
    assert mpic("library", "give", "local", "alice").exit_code == 0  # nothing is left


def test_without_a_key_the_command_line_says_how_to_give_one(monkeypatch, capsys):
    from mpic.cli.common import error_line
    from mpic.errors import Unauthorized

    line = error_line(Unauthorized("an API key is needed"))
    assert "MPIC_API_KEY" in line and "--api-key" in line and "\n" not in line
