"""Files that are set aside for a person to inspect and never read again: damaged chunks (``Quarantine``), and
*orphans*, files with a name of this program that the catalogue does not know. Orphans may be the only copies of
uploads, so they are deleted only after days."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mpic.durable import FileSystem
from mpic.library.folder.layout import DAMAGED, DATE

FOLDER = Path("quarantine", "orphans")
DAY = 86_400


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
        """Move a file into the quarantine, or remove it if that fails."""
        try:
            self._filesystem.make_folder(self.folder)
            self._filesystem.rename(path, self.folder / f"{path.name}@{self._clock():.6f}")
        except OSError:
            self._filesystem.try_remove(path)
        by_age = sorted(damaged_files(self.folder), key=lambda name: float(name.partition("@")[2]))
        for name in by_age[: -self._capacity]:
            self._filesystem.try_remove(self.folder / name)

    def purge(self, names: set[str]) -> None:
        """Remove the files that had these names, because their content was deleted."""
        for name in damaged_files(self.folder) if names else ():
            if name.partition("@")[0] in names:
                self._filesystem.try_remove(self.folder / name)


def damaged_files(folder: Path) -> list[str]:
    """Return the names of the files that were put aside; anything else in the folder is neither counted nor
    removed."""
    try:
        return sorted(name for name in os.listdir(folder) if DAMAGED.fullmatch(name))
    except FileNotFoundError:
        return []


class Orphan(NamedTuple):
    """A file in quarantine, with its size and the day it was put there (``2026-03-01``)."""

    path: Path
    bytes: int
    since: str


class Orphans:
    """The folders ``quarantine/orphans/<date>/``; below them every file has the path that it had before.

    Args:
        root: the library's folder.
        clock: function that returns seconds since the epoch.
        days: number of days for which they are kept; 0: for ever.
        newest: function that returns the newest time that the catalogue knows, in seconds since the epoch.
    """

    def __init__(
        self,
        root: Path,
        filesystem: FileSystem,
        clock: Callable[[], float],
        days: int,
        newest: Callable[[], float],
    ) -> None:
        self._root = root
        self._filesystem = filesystem
        self._clock = clock
        self._days = days
        self._newest = newest

    def take(self, paths: list[str]) -> None:
        """Move files into the quarantine.

        Args:
            paths: paths of the files, relative to the library's root.

        Raises:
            OSError: a file cannot be moved; it stays in its place.
        """
        if not paths:
            return
        # a clock that has not been set yet must not date them so far back that the next start deletes them
        folder = self._root / FOLDER / _date(max(self._clock(), self._newest()))
        for path in paths:
            target = folder / path
            if target.exists():  # the same name on the same day: an earlier file with other content
                target = target.with_name(f"{target.name}@{self._clock():.6f}")
            self._filesystem.make_folder(target.parent)
            self._filesystem.rename(self._root / path, target)

    def kept(self) -> list[Orphan]:
        """Return the files in the quarantine, oldest first."""
        try:
            dates = [name for name in os.listdir(self._root / FOLDER) if DATE.fullmatch(name)]
        except FileNotFoundError:
            return []
        found = []
        for date in sorted(dates):
            for parent, _, names in os.walk(self._root / FOLDER / date):
                for path in (Path(parent, name) for name in names):
                    with suppress(
                        FileNotFoundError
                    ):  # a server that has just started deletes what is overdue
                        found.append(Orphan(path, path.lstat().st_size, date))
        return sorted(found, key=lambda orphan: (orphan.since, orphan.path))

    def expire(self) -> list[Orphan]:
        """Delete the files that have been here for longer than they are kept, and return them."""
        before = _date(self._clock() - self._days * DAY)
        gone = [orphan for orphan in self.kept() if orphan.since < before] if self._days else []
        for orphan in gone:
            self._filesystem.try_remove(orphan.path)
        for folder in {self._root / FOLDER / orphan.since for orphan in gone}:
            for parent, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # something is left in it
                    os.rmdir(parent)
        return gone


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()
