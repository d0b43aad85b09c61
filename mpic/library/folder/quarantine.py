"""Quarantine: damaged files are put aside for a person to inspect, and are never read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mpic.durable import FileSystem
from mpic.library.folder.layout import DAMAGED


class Quarantine:
    """A bounded folder of ``<name>@<seconds since the epoch>``; the oldest go first. Callers hold the store's lock."""

    def __init__(
        self, folder: Path, capacity: int, filesystem: FileSystem, clock: Callable[[], float]
    ) -> None:
        self.folder = folder
        self._capacity = capacity
        self._filesystem = filesystem
        self._clock = clock

    def take(self, path: Path) -> None:
        """Moves a file into the quarantine, or removes it if that fails."""
        try:
            self._filesystem.make_folder(self.folder)
            self._filesystem.rename(path, self.folder / f"{path.name}@{self._clock():.6f}")
        except OSError:
            self._filesystem.try_remove(path)
        by_age = sorted(damaged_files(self.folder), key=lambda name: float(name.partition("@")[2]))
        for name in by_age[: -self._capacity]:
            self._filesystem.try_remove(self.folder / name)

    def purge(self, names: set[str]) -> None:
        """Removes the files that had these names, because their content was deleted."""
        for name in damaged_files(self.folder) if names else ():
            if name.partition("@")[0] in names:
                self._filesystem.try_remove(self.folder / name)


def damaged_files(folder: Path) -> list[str]:
    """Returns the names of the files that were put aside; anything else in the folder is neither counted nor
    removed."""
    try:
        return sorted(name for name in os.listdir(folder) if DAMAGED.fullmatch(name))
    except FileNotFoundError:
        return []
