"""Files that a browser has sent to the page and that are not in the library yet.

Gradio's own upload route puts everything into one folder and lets callbacks open what a browser names. Here a browser
gets a random name for each file, callbacks open a file by that name only, and only for the user who has sent it.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from mpic.errors import NotFound

MOST = 64
"""Maximum files of one user; beyond that the oldest are removed."""
LIFE = 3600.0
"""Seconds a file is kept if nothing takes it."""
NAME = re.compile(r"[A-Za-z0-9_-]{32}")


class Sent(NamedTuple):
    """A file that was sent: its original name, its path here, its size in bytes, and its time of arrival."""

    name: str
    path: Path
    bytes: int
    at: float


class Uploads:
    """The files of all users, in a temporary folder that ends with this object.

    Args:
        most_bytes: maximum bytes of one user's files; beyond that the oldest are removed.
        clock: function that returns seconds.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_bytes = most_bytes
        self._clock = clock
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._sent: dict[str, OrderedDict[str, Sent]] = {}

    def add(self, user: str, name: str, content: IO[bytes]) -> str:
        """Store a file and return the name under which its user can take it."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mpic-page-", ignore_cleanup_errors=True)
        token = secrets.token_urlsafe(24)
        path = Path(self._folder.name) / token
        with path.open("xb") as file:
            shutil.copyfileobj(content, file)
        sent = Sent(name, path, path.stat().st_size, self._clock())
        self._sent.setdefault(user, OrderedDict())[token] = sent
        self._tidy()
        return token

    def find(self, user: str, token: object) -> Sent:
        """Return a file of a user. Raise NotFound if the user has sent none of this name."""
        found = (
            self._sent.get(user, {}).get(token) if isinstance(token, str) and NAME.fullmatch(token) else None
        )
        if found is None:
            raise NotFound("the file is not among your uploads (they are kept for an hour); send it again")
        return found

    def drop(self, user: str, token: str) -> None:
        """Remove a file, if it is there."""
        sent = self._sent.get(user, OrderedDict()).pop(token, None)
        if sent is not None:
            sent.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        self._sent.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _tidy(self) -> None:
        for user, files in list(self._sent.items()):
            bytes_held = sum(sent.bytes for sent in files.values())
            for token, sent in list(files.items()):
                many = len(files) > MOST or (bytes_held > self.most_bytes and len(files) > 1)
                if many or sent.at + LIFE < self._clock():
                    bytes_held -= sent.bytes
                    self.drop(user, token)
            if not files:
                del self._sent[user]
