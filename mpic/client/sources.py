"""Files to send, which are read in pieces, and from the start for each attempt.

This is the only module in which a string may be a path, for the convenience of programs that use the SDK. A program
that passes on text of other people makes its client with ``local_files=False``, so that no string is taken for a path.
"""

from __future__ import annotations

import base64
import io
import mimetypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mpic.client.arguments import check_source
from mpic.errors import BadRequest, InvalidImage, TooLarge

Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and their number in all."""

Source = str | os.PathLike[str] | bytes | IO[bytes] | tuple[str, bytes | IO[bytes]]
"""A path, bytes, a binary file, or (name, bytes or binary file)."""

IMAGE_URL = re.compile(r"data:image/(?:png|jpeg|webp|bmp|gif);base64,")
"""The beginning of a data URL of an image. The server decides whether it accepts GIF, and whether it is an image."""


@dataclass(frozen=True)
class Upload:
    """A file of a form.

    Args:
        content: the content to send; a ``Path`` is opened for each attempt.
    """

    name: str
    content: Path | bytes | IO[bytes]
    progress: Progress | None = None

    @property
    def replayable(self) -> bool:
        """Returns whether it can be read again from the start, so that a refused upload can be repeated."""
        return isinstance(self.content, (bytes, Path)) or self.content.seekable()

    @contextmanager
    def opened(self) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, bytes or file, MIME type), as httpx needs them."""
        name, content = self.name, self.content
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if isinstance(content, Path):
            with content.open("rb") as file:
                yield name, self._counted(file, os.fstat(file.fileno()).st_size), kind
        elif isinstance(content, bytes):
            counted = self._counted(io.BytesIO(content), len(content)) if self.progress else content
            yield name, counted, kind
        else:
            size = content.seek(0, os.SEEK_END) if content.seekable() else 0
            if content.seekable():
                content.seek(0)
            yield name, self._counted(content, size), kind

    def _counted(self, file: IO[bytes], size: int) -> Any:
        return _Counted(file, size, self.progress) if self.progress else file


class _Counted:
    """A file that reports how much of it has been read."""

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


@dataclass(frozen=True)
class Sources:
    """Converts the files and images that a caller passes to the form in which they are sent.

    Args:
        local_files: True if a string or ``Path`` names a file of this machine. If False, both are refused and nothing
            is opened.
    """

    local_files: bool = True

    def upload(self, source: Source, progress: Progress | None = None) -> Upload:
        """Returns a file to upload.

        Raises:
            TypeError: it is not a file.
            BadRequest: it is a path, and paths are not allowed.
        """
        check_source(source)
        if isinstance(source, tuple):
            name, content = source
        elif isinstance(source, bytes):
            name, content = "upload", source
        elif isinstance(source, (str, os.PathLike)):
            name, content = Path(source).name, Path(source)
        else:
            named = getattr(source, "name", None)
            name, content = Path(named).name if isinstance(named, str) else "upload", source
        if not self.local_files and not (isinstance(content, bytes) or hasattr(content, "read")):
            raise BadRequest(
                "this client opens no files: give it bytes or (name, bytes), not a path", param="file"
            )
        if isinstance(content, str):
            raise TypeError("beside a name, a file is bytes or a binary file, not str: encode a text")
        return Upload(name, content, progress)

    def image(self, image: str | os.PathLike[str] | None) -> str | None:
        """Returns a data URL as it is, and the image at a path as a data URL.

        Raises:
            InvalidImage: it is not a data URL of an image, and paths are not allowed.
        """
        if image is None:
            return None
        if not self.local_files:
            return image_data_url(image)
        return image if isinstance(image, str) and image.startswith("data:") else data_url(image)


def data_url(source: str | os.PathLike[str]) -> str:
    """Returns the file at a path as a data URL."""
    path = Path(source)
    mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def image_data_url(value: Any, most: int | None = None) -> str:
    """Returns the value if it is a data URL of an image; nothing is opened.

    Args:
        most: maximum length of the URL.

    Raises:
        InvalidImage: it is anything else.
        TooLarge: it is longer.
    """
    if not isinstance(value, str) or not IMAGE_URL.match(value):
        raise InvalidImage(
            "an image must be a data URL (data:image/png;base64,...); paths and addresses are not opened",
            param="image",
        )
    if most is not None and len(value) > most:
        raise TooLarge(f"the data URL has more than {most:,} characters", param="image", limit_bytes=most)
    return value
