"""The first key changes who may call a server: the command warns about it, and says how existing files are reached."""

import pytest
from typer.testing import CliRunner

from mpic import cli
from mpic.keys import KeyStore
from mpic.library import Library


@pytest.fixture
def mpic(tmp_path):
    def run(*args, **options):
        return CliRunner().invoke(cli.app, [*args, "--data-dir", str(tmp_path)], **options)

    return run


def test_the_first_key_says_what_it_changes(mpic):
    first = mpic("keys", "create", "alice")
    assert first.exit_code == 0 and first.stdout.startswith("mpic_")
    for word in ("first key", "MPIC_API_KEY", "--api-key", "`local`", "mpic keys create local"):
        assert word in " ".join(first.stderr.split())
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
    assert "keys.sqlite" in told and "mpic library import FOLDER --user NAME" in told


def test_what_was_uploaded_without_keys_can_be_copied_to_a_user(mpic, tmp_path):
    with Library.open(tmp_path) as library:
        library.files.add("local", b"one", "one.txt", handle="ONE", expires_after=1000, metadata={"a": 1})
        library.files.add("local", b"mine", "three.txt", handle="THREE")
        library.files.add("ben", b"not hers", "ben.txt")
        library.files.add("alice", b"hers", "three.txt", handle="three")
    copy = str(tmp_path.with_name("copy"))
    assert mpic("library", "backup", copy, "--user", "local").exit_code == 0
    done = mpic("library", "import", copy, "--user", "alice")
    assert done.exit_code == 1 and "1 added, 1 refused" in done.stdout and "handle" in done.stdout
    with Library.open(tmp_path) as library:
        one = library.files.by_handle("alice", "ONE")
        assert library.files.content("alice", one.id) == b"one" and one.metadata == {"a": 1}
        assert 900 < one.expires_at - library.clock() <= 1001
        assert len(library.files.page("alice").files) == len(library.files.page("local").files) == 2
    (tmp_path / "folder").mkdir()
    refused = mpic("library", "import", str(tmp_path / "folder"), "--user", "alice")
    assert refused.exit_code == 1 and "references belong to nobody" in str(refused.exception)


def test_without_a_key_the_command_line_says_how_to_give_one(monkeypatch, capsys):
    from mpic.cli.common import error_line
    from mpic.errors import Unauthorized

    line = error_line(Unauthorized("an API key is needed"))
    assert "MPIC_API_KEY" in line and "--api-key" in line and "\n" not in line
