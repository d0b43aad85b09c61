"""What can be uploaded, and how it is read: from the disk piece by piece, from the start for each attempt."""

from __future__ import annotations

import base64
import io
import mimetypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and their number in all."""

Source = str | os.PathLike[str] | bytes | IO[bytes] | tuple[str, bytes | IO[bytes]]
"""A path, bytes, a binary file, or (name, bytes or binary file)."""


@dataclass(frozen=True)
class Upload:
    """One file of a form.

    Args:
        replayable: whether it can be read again from the start, so that a refused upload can be repeated.
    """

    source: Source
    progress: Progress | None = None

    @property
    def _parts(self) -> tuple[str, Any]:
        source = self.source
        if isinstance(source, tuple):
            return source
        if isinstance(source, bytes):
            return "upload", source
        if isinstance(source, (str, os.PathLike)):
            return Path(source).name, Path(source)
        name = getattr(source, "name", None)
        return Path(name).name if isinstance(name, str) else "upload", source

    @property
    def replayable(self) -> bool:
        content = self._parts[1]
        return isinstance(content, (bytes, Path)) or content.seekable()

    @contextmanager
    def opened(self) -> Iterator[tuple[str, Any, str]]:
        """(name, bytes or file, MIME type), as httpx wants it."""
        name, content = self._parts
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if isinstance(content, Path):
            with content.open("rb") as file:
                yield name, self._counted(file, os.fstat(file.fileno()).st_size), kind
        elif isinstance(content, bytes):
            if self.progress:
                content = self._counted(io.BytesIO(content), len(content))
            yield name, content, kind
        else:
            size = content.seek(0, os.SEEK_END) if content.seekable() else 0
            if content.seekable():
                content.seek(0)
            yield name, self._counted(content, size), kind

    def _counted(self, file: IO[bytes], size: int) -> Any:
        return _Counted(file, size, self.progress) if self.progress else file


class _Counted:
    """A file that tells how much of it has been read."""

    def __init__(self, file: IO[bytes], size: int, progress: Progress) -> None:
        self._file = file
        self._size = size
        self._progress = progress
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._read += len(data)
        self._progress(self._read, self._size)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def data_url(source: str | os.PathLike[str]) -> str:
    """The file at a path as a data URL."""
    path = Path(source)
    mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def data_url_of(image: str | os.PathLike[str] | None) -> str | None:
    """A data URL as it is; anything else is a path."""
    if image is None or (isinstance(image, str) and image.startswith("data:")):
        return image
    return data_url(image)
