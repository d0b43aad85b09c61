"""Chunk files outside the store, where they cannot be evicted: for chunks that the store does not keep, and for
requests that have already lost a file. They lie in the folder that vLLM's workers write compiled chunks to, each in a
folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from mpic.kv.chunk import ChunkKV
from mpic.kv.file import write

NAME = re.compile(r"[0-9a-f]{32}(?:\.safetensors)?")


class SpooledFile:
    """A chunk file outside the store. It is removed when each of its ``users`` has dropped it once; the users of a
    compile are counted when it has ended (``CompileTask.end``)."""

    def __init__(self, path: Path, users: int = 0) -> None:
        self.path, self.users = path, users

    def drop(self) -> None:
        self.users -= 1
        if self.users <= 0:
            self.path.unlink(missing_ok=True)


class Spool:
    """The spool's files in a folder; see the module's docstring. Files left by a crash are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clear()

    def hold(self, stored: Path) -> SpooledFile:
        """Hard-link a stored file for one user; the content stays when the store removes its own name.

        Raises:
            OSError: the file is gone, or the file system has no hard links.
        """
        path = self._new_path()
        os.link(stored, path)
        return SpooledFile(path, users=1)

    def write(self, made: ChunkKV, stored: Path | None) -> SpooledFile:
        """Return a file of a compiled chunk, with no users yet.

        Args:
            stored: the chunk's file if the store has just kept it.
        """
        path = self._new_path()
        if stored is not None:
            with suppress(OSError):  # the store has evicted it at once, or the file system has no hard links
                os.link(stored, path)
                return SpooledFile(path)
        write(path, made)
        return SpooledFile(path)

    def names(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def close(self) -> None:
        """Remove the folder with all that this class and vLLM's workers put there, and nothing else."""
        self._clear()
        with suppress(OSError):  # the folder is gone, or holds other programs' files
            self.folder.rmdir()

    def _new_path(self) -> Path:
        return self.folder / f"{uuid.uuid4().hex}.safetensors"

    def _clear(self) -> None:
        for path in self.folder.glob("*"):
            if NAME.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
