"""Tests have a home of their own, and fail if they open what is the user's."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import closed_folders
import pytest

from mpic.config import ServerConfig

ROOT = Path(__file__).parents[1]
USERS = Path(os.environ[closed_folders.CLOSED].split(os.pathsep)[1])
"""The folder in which the user's programs keep their data."""
COMMAND = [sys.executable, "-c", ""]


def test_a_home_among_temporary_files_is_closed_too(guard, monkeypatch):
    folder = tempfile.gettempdir()
    monkeypatch.setattr(guard, "_closed", (f"{folder}/home/.", f"{folder}/home/.local/share/"))
    assert guard.is_closed(f"{folder}/home/.local/share/mpic")
    assert not guard.is_closed(f"{folder}/other/.local/share/mpic")


@pytest.mark.parametrize(
    "does",
    [
        lambda: (USERS / "mpic/none").read_bytes(),
        lambda: os.open(os.fsencode(USERS / "none"), os.O_RDONLY),
        lambda: (USERS / "none").mkdir(),
        lambda: os.listdir(USERS),
        lambda: os.rename(ROOT / "none", USERS / "none"),
        lambda: sqlite3.connect(f"file:{USERS}/none?mode=ro", uri=True),
        lambda: socket.create_connection(("127.0.0.1", closed_folders.PORT), 1),
        lambda: socket.create_server(("127.0.0.1", closed_folders.PORT)),
        lambda: subprocess.run(COMMAND, env={"HOME": str(USERS.parents[1])}),
        lambda: subprocess.run(COMMAND, env={}),
    ],
    ids=[
        "read",
        "os.open",
        "mkdir",
        "list",
        "rename",
        "sqlite",
        "connect",
        "bind",
        "the user's home",
        "no home",
    ],
)
def test_what_is_the_users_is_not_opened_and_the_test_is_told_to_fail(does, guard):
    with pytest.raises(OSError, match=r"tests|HOME|none|share|8000|Library"):
        does()
    with pytest.raises(pytest.fail.Exception, match="keep out of the user's folders"):
        guard.complain()
    guard.complain()


def test_the_default_port_is_the_one_that_is_closed():
    assert ServerConfig().port == closed_folders.PORT


def test_a_processs_own_home_is_open_to_it_and_to_what_it_starts(guard):
    home = Path.home()
    assert home == Path(os.environ["XDG_DATA_HOME"]).parents[1] and not guard.is_closed(
        home / ".local/share/mpic"
    )
    code = "import mpic.config; print(mpic.config.default_data_dir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(home)


def test_a_test_fails_even_where_a_refusal_was_taken_for_an_answer(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import contextlib, os\n"
        "def test_it():\n"
        "    with contextlib.suppress(OSError):\n"
        f"        os.listdir({str(USERS)!r})\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        "pyproject.toml",
    ]
    done = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "keep out of the user's folders" in done.stdout, done.stdout + done.stderr
