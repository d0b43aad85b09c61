"""Keeps tests out of the user's own folders and off the port that servers have by default.

Each process of a run has a home of its own. What takes long to make (kernels that are built, fonts) is kept in
``var/test-cache`` of the project from run to run. A test fails that opens a folder in which programs keep what is the
user's, speaks to the default port, or starts a process with the user's home or none.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "var" / "test-cache"
PORT = 8000
"""The default of ``port``."""
HOME, CLOSED = "MPIC_TEST_HOME", "MPIC_TEST_CLOSED"
"""Variables for the processes of a run: its home, and how the paths begin that are closed to it."""
XDG = {
    "XDG_DATA_HOME": ".local/share",
    "XDG_CONFIG_HOME": ".config",
    "XDG_STATE_HOME": ".local/state",
    "XDG_CACHE_HOME": ".cache",
}
ELSEWHERE = ("MPIC_API_KEY", "MPIC_URL", "MPLCONFIGDIR", "TORCH_HOME", "TRITON_HOME", "TRITON_CACHE_DIR")
ELSEWHERE += ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
ELSEWHERE += ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT")
"""Variables that name a folder or a server of the user's."""
EVENTS = {
    "open",
    "sqlite3.connect",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.rename",
}
EVENTS |= {"os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime"}


def move_home() -> None:
    """Give this process, and those that it starts, a home of its own. To be called before anything looks for one."""
    if CLOSED not in os.environ:
        user = Path.home()
        own = [os.environ.get(name) or user / folder for name, folder in XDG.items()]
        os.environ[CLOSED] = os.pathsep.join(
            [f"{user}/.".replace("//", "/"), *(f"{folder}/" for folder in own)]
        )
        for name in ELSEWHERE:
            os.environ.pop(name, None)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and HOME in os.environ:
        home = Path(os.environ[HOME], worker)
        home.mkdir(exist_ok=True)
    else:
        home = Path(tempfile.mkdtemp(prefix="mpic-tests-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        os.environ[HOME] = str(home)
        atexit.register(_remove, home, os.getpid())
    os.environ |= {name: str(home / folder) for name, folder in XDG.items()}
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(CACHE)}


def _remove(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(home, ignore_errors=True)


def _longest(text: str, beginnings: tuple[str, ...]) -> int:
    return max((len(beginning) for beginning in beginnings if text.startswith(beginning)), default=0)


class Guard:
    """Watches what this process opens from now on.

    Attributes:
        found: what was opened that is closed, since ``complain``.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._closed = tuple(os.environ[CLOSED].split(os.pathsep))
        free = (
            ROOT,
            sys.prefix,
            sys.base_prefix,
            tempfile.gettempdir(),
            os.environ[HOME],
            *filter(None, sys.path),
        )
        self._free = tuple(str(folder).rstrip("/") + "/" for folder in free)
        sys.addaudithook(self._see)

    def complain(self) -> None:
        """Fail the test if something closed was opened."""
        if self.found:
            told, self.found = "; ".join(self.found), []
            pytest.fail(f"tests keep out of the user's folders and off port {PORT}: {told}", pytrace=False)

    def is_closed(self, path: Any) -> bool:
        """Return whether a path, or SQLite's address of one, lies in a folder of the user's."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        text = os.fsdecode(path).removeprefix("file:")
        if not text.startswith("/"):
            text = os.path.abspath(text)
        # the deeper folder decides, as the user's home may lie among temporary files
        return _longest(text, self._closed) > _longest(text + "/", self._free)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS:
            wrong = next((str(path) for path in args[:2] if self.is_closed(path)), "")
        elif event in ("socket.connect", "socket.bind"):
            wrong = str(args[1]) if isinstance(args[1], tuple) and args[1][1] == PORT else ""
        elif event == "subprocess.Popen":
            home = os.environ.get("HOME") if args[3] is None else args[3].get("HOME")
            wrong = "" if home and not self.is_closed(f"{home}/.cache") else f"{args[1]} with HOME={home}"
        else:
            return
        if wrong:
            self.found.append(f"{event} {wrong}")
            raise PermissionError(self.found[-1])
