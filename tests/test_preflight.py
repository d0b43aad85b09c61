"""Problems that prevent a start are reported before anything slow is loaded."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpic import preflight
from mpic.config import ConfigError, load_config
from mpic.errors import DatabaseFailed, LibraryInUse, ModelRefused
from mpic.keys import any_keys


@pytest.fixture
def config(tmp_path):
    def make(**flags):
        return load_config(None, {"data_dir": str(tmp_path / "data"), "port": 0, **flags})

    return make


def test_what_can_run_passes_and_nothing_is_made(config, tmp_path):
    preflight.check(config())
    preflight.check(config(model="some/model-1.5", embedder="hf-hub:some/clip"))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("flags", "error", "why"),
    [
        ({"model": "/no/where"}, ModelRefused, "there is no folder /no/where"),
        ({"model": "./missing"}, ModelRefused, "there is no folder ./missing"),
        ({"model": __file__}, ModelRefused, "is a file"),
        ({"model": os.path.dirname(__file__)}, ModelRefused, "no config.json"),
        ({"dtype": "float8"}, ConfigError, "unknown dtype"),
        ({"device": "gpu"}, ConfigError, "unknown device"),
        ({"attention": "flash"}, ConfigError, "unknown attention"),
        ({"engine": "vllm", "vllm_args": "max"}, ConfigError, "vllm"),
        ({"embedder": "/no/clip"}, ConfigError, "no folder /no/clip"),
        ({"embedder": os.path.dirname(__file__)}, ConfigError, "open_clip_config.json"),
        ({"embedder": "ViT-B-32"}, ConfigError, "no weights"),
        ({"embedder": "ViT-B-32", "embedder_weights": "/no/file.pt"}, ConfigError, "no file /no/file.pt"),
        ({"data_dir": __file__}, ConfigError, "--data-dir"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(config, flags, error, why):
    with pytest.raises(error, match=why):
        preflight.check(config(**flags))


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("data_dir", DatabaseFailed),
        ("model", ModelRefused),
        ("embedder", ConfigError),
        ("embedder_weights", ConfigError),
    ],
)
@pytest.mark.parametrize("later_python", [False, True], ids=["this Python", "Python 3.14"])
def test_what_must_not_be_looked_at_is_refused_with_its_path(
    config, monkeypatch, tmp_path, key, error, later_python
):
    if later_python:
        swallow_errors(monkeypatch)
    closed = tmp_path / "closed"
    refuse(monkeypatch, "os.stat", closed)
    with pytest.raises(error, match=f"{closed}.* cannot be looked at"):
        preflight.check(config(**{key: str(closed)}))


def test_a_key_store_that_must_not_be_looked_at_is_never_told_as_no_keys(monkeypatch, tmp_path):
    swallow_errors(monkeypatch)
    refuse(monkeypatch, "os.stat", tmp_path)
    with pytest.raises(DatabaseFailed, match=r"keys.sqlite cannot be looked at"):
        any_keys(tmp_path)


def test_names_that_no_file_can_have_are_not_there(config):
    with pytest.raises(ModelRefused, match="there is no folder"):
        preflight.check_model("no\0where/at/all")
    with pytest.raises(ConfigError, match="there is no file"):
        preflight.check_embedder(config(embedder="ViT-B-32", embedder_weights="/no\0where").retrieval)


@pytest.mark.parametrize("function", ["os.stat", "os.open"])
def test_a_data_folder_that_must_not_be_opened_is_refused_with_its_path(monkeypatch, tmp_path, function):
    closed = tmp_path / "closed"
    closed.mkdir()
    refuse(monkeypatch, function, closed)
    with pytest.raises(ConfigError, match=f"{closed} cannot be looked at"):
        preflight.check_folder(closed)


def swallow_errors(monkeypatch):
    """Has pathlib say "not there" for every error of the system, as Python 3.14 does."""
    for name, ask in (("exists", os.path.exists), ("is_dir", os.path.isdir), ("is_file", os.path.isfile)):
        monkeypatch.setattr(Path, name, lambda path, ask=ask: ask(path))


def refuse(monkeypatch, function, folder):
    """Has a function of ``os`` refuse a folder and what is in it, also to the superuser, who may do everything."""
    original = getattr(os, function.removeprefix("os."))

    def refusing(path, *args, **options):
        if not isinstance(path, int) and Path(path).is_relative_to(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *args, **options)

    monkeypatch.setattr(function, refusing)


def test_a_library_that_is_open_elsewhere_is_told_with_the_way_out(config, tmp_path):
    (tmp_path / "data").mkdir()
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(LibraryInUse, match="--data-dir"):
        preflight.check(config())
    os.close(fd)
    preflight.check(config())


def test_a_port_that_is_taken_is_told_with_the_way_out(config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="--port"):
            preflight.check(config(port=taken.getsockname()[1]))


@pytest.mark.parametrize("flags", [("--model", "/no/where"), ("--dtype", "float8")])
def test_nothing_slow_is_loaded_before(flags, tmp_path):
    """A server that cannot start says so at once, without importing torch, which takes seconds."""
    code = (
        "import sys; from mpic.cli import main\n"
        "try: main()\nexcept SystemExit as end: print(end.code)\n"
        "print([m for m in ('torch', 'transformers', 'fastapi', 'gradio') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, "serve", *flags, "--data-dir", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"] and done.stderr.count("\n") == 1
