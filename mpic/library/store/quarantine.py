"""Where damaged files go: aside, for a person to look at, never to be read again by this system."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpic.durable import Files
from mpic.library.names import DAMAGED


class Quarantine:
    """A bounded folder of ``<name>@<seconds since the epoch>``; the oldest go first. Callers hold the store's lock."""

    def __init__(self, folder: Path, capacity: int, files: Files, clock: Callable[[], float]) -> None:
        self.folder = folder
        self._capacity = capacity
        self._files = files
        self._clock = clock

    def take(self, path: Path) -> None:
        """Move a file here; where that fails, remove it."""
        try:
            self._files.make_folder(self.folder)
            self._files.rename(path, self.folder / f"{path.name}@{self._clock():.6f}")
        except OSError:
            self._remove(path)
        for name in sorted(self._names(), key=lambda name: float(name.partition("@")[2]))[: -self._capacity]:
            self._remove(self.folder / name)

    def purge(self, names: set[str]) -> None:
        """Remove what came from files of these names: their content was deleted."""
        for name in self._names() if names else ():
            if name.partition("@")[0] in names:
                self._remove(self.folder / name)

    def _names(self) -> list[str]:
        """The damaged files; what else is in the folder is not ours to count or remove."""
        try:
            return [name for name in os.listdir(self.folder) if DAMAGED.fullmatch(name)]
        except FileNotFoundError:
            return []

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            self._files.remove(path)
