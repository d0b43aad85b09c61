"""The first key changes who may call a server: the command warns about it, and says how existing files are reached."""

import pytest
from typer.testing import CliRunner

from mpic import cli
from mpic.keys import KeyStore


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
    assert "keys.sqlite" in told and "mpic files content NAME" in told


def test_without_a_key_the_command_line_says_how_to_give_one(monkeypatch, capsys):
    from mpic.cli.common import error_line
    from mpic.errors import Unauthorized

    line = error_line(Unauthorized("an API key is needed"))
    assert "MPIC_API_KEY" in line and "--api-key" in line and "\n" not in line
