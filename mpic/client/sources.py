"""Files to send, read in pieces, and from the start for each attempt.

This is the only module in which a string may be a path, for the convenience of programs that use the SDK. A program
that passes on other people's text makes its client with ``local_files=False``, so that no string is taken for a path.
"""

from __future__ import annotations

import asyncio
import base64
import io
import mimetypes
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from mpic.client.arguments import check_source
from mpic.client.errors import ClientError
from mpic.errors import BadRequest, InvalidImage, TooLarge

Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and the total, which is 0 for a source without seeking (a pipe)."""

Source = str | os.PathLike[str] | bytes | IO[bytes] | tuple[str, bytes | IO[bytes]]
"""A path, bytes, a binary file, or (name, bytes or binary file)."""

PIECE = 256 << 10
"""Bytes of a body that are read at a time."""
IMAGE_URL = re.compile(r"data:image/(?:png|jpeg|webp|bmp|gif|tiff|avif|heic|heif);base64,")
"""The beginning of a data URL of an image. The server decides whether it is one."""


@dataclass(frozen=True)
class Upload:
    """A file in a form, or a file as the whole body of a request.

    Args:
        content: the content to send; a ``Path`` is opened for each attempt.
        field: name of its form field; None if it is the whole body.
    """

    name: str
    content: Path | bytes | IO[bytes]
    progress: Progress | None = None
    field: str | None = "file"

    @property
    def replayable(self) -> bool:
        """Return whether the content can be read again from the start, so that a refused upload can be repeated."""
        if isinstance(self.content, Path):
            return not self.content.is_fifo()
        return isinstance(self.content, bytes) or _seekable(self.content)

    @contextmanager
    def opened(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (name, bytes or file, MIME type), as httpx needs them."""
        kind = mimetypes.guess_type(self.name)[0] or "application/octet-stream"
        if isinstance(self.content, bytes) and self.progress is None:
            yield self.name, self.content, kind
        else:
            with self.read() as body:
                yield self.name, body, kind

    @contextmanager
    def read(self) -> Iterator[_Body]:
        """Yield the content as a file, positioned at its start."""
        if isinstance(self.content, Path):
            with self.content.open("rb") as file:
                yield self._body(file)
        else:
            yield self._body(io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content)

    def _body(self, file: IO[bytes]) -> _Body:
        return (_SizedBody if _seekable(file) else _Body)(file, self.progress)


def _seekable(file: IO[bytes]) -> bool:
    """Return whether a file can be read from the start; one that only has ``read`` cannot."""
    seekable = getattr(file, "seekable", None)
    return seekable is not None and seekable()


class _Body:
    """A file of unknown size, which is sent in chunks.

    It has no ``fileno``, because httpx would take the size of that descriptor for the number of bytes to send: 0 for a
    pipe, and the compressed size of a file that ``gzip`` reads.
    """

    def __init__(self, file: IO[bytes], progress: Progress | None) -> None:
        self._file = file
        self._progress = progress
        self._size = 0
        self._sent = 0

    @property
    def size(self) -> int | None:
        """Its bytes; None: unknown."""
        return None

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if isinstance(data, str):
            raise TypeError("the file is open as text: open it with 'rb'")
        self._sent += len(data)
        if self._progress is not None:
            self._progress(self._sent, self._size)
        return data


class _SizedBody(_Body):
    """A file that is sent from its start, with its size at the beginning."""

    def __init__(self, file: IO[bytes], progress: Progress | None) -> None:
        super().__init__(file, progress)
        self._size = file.seek(0, os.SEEK_END)
        file.seek(0)

    @property
    def size(self) -> int | None:
        return self._size

    def read(self, size: int = -1) -> bytes:
        """Read no more than the size that was announced, though the file may have grown.

        Raises:
            ClientError: the file has become shorter.
        """
        left = self._size - self._sent
        data = super().read(left if size < 0 else min(size, left))
        if left and size and not data:
            raise ClientError(
                f"the file ended after {self._sent:,} of {self._size:,} bytes while it was sent"
            )
        return data

    def tell(self) -> int:
        return self._sent

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset. Finding the end reads nothing, because a compressed file would have to be expanded."""
        self._sent = self._size if whence == os.SEEK_END else offset
        if self._sent < self._size:
            self._file.seek(self._sent)
        return self._sent


class BodyStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A file as the whole body of a request, of either client. An event loop does not wait for the disk."""

    def __init__(self, file: _Body) -> None:
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        while piece := self._file.read(PIECE):
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(self._file.read, PIECE):
            yield piece


def unicode_name(name: str) -> str:
    """Return a file's name in a form that can be sent and printed: bytes that are not UTF-8 are replaced."""
    return name.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(frozen=True)
class Sources:
    """Converts the files and images that a caller passes into the form in which they are sent.

    Args:
        local_files: True if a string or ``Path`` names a file of this machine. If False, both are refused and nothing
            is opened.
    """

    local_files: bool = True

    def upload(self, source: Source, progress: Progress | None = None) -> Upload:
        """Return a file to upload.

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
        return Upload(unicode_name(name), content, progress)

    def image(self, image: str | os.PathLike[str] | None) -> str | None:
        """Return a data URL as it is, and the image at a path as a data URL.

        Raises:
            InvalidImage: it is not a data URL of an image, and paths are not allowed.
        """
        if image is None:
            return None
        if not self.local_files:
            return image_data_url(image)
        return image if isinstance(image, str) and image.startswith("data:") else data_url(image)


def data_url(source: str | os.PathLike[str]) -> str:
    """Return the file at a path as a data URL."""
    path = Path(source)
    mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def image_data_url(value: Any, most: int | None = None) -> str:
    """Return the value if it is a data URL of an image; nothing is opened.

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
