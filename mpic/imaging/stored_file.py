"""A file that is too large to hold in memory: an open descriptor, lent to the process that decodes it.

The server's process looks at a few headers, through a window; the decoding process reads the file as a stream.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias, overload

from mpic.errors import StorageFailed

WINDOW = 64 << 10
"""Minimum bytes per read, because the next bytes asked for are most likely among them."""
PIECE = 256 << 10
"""Maximum bytes per read."""


class StoredFile:
    """The bytes of an open file, with a length and slices as ``bytes`` has them. One thread at a time may use it.

    Args:
        fd: descriptor through which a decoding process reads the file. The caller that opened it closes it.
        size: number of bytes.
        read: function like ``os.pread`` that returns at most the given number of bytes from an offset, and none at the
            end; None: ``os.pread``.

    Attributes:
        fault: the error of the last read that failed.

    Raises (whenever it is read):
        StorageFailed: the bytes cannot be read from the disk, or the file is shorter than it was.
    """

    def __init__(self, fd: int, size: int, read: Callable[[int, int], bytes] | None = None) -> None:
        self.fd, self._size = fd, size
        self.fault: StorageFailed | None = None
        self._pread = read or (lambda size, at: os.pread(fd, size, at))
        self._window, self._begin = b"", 0

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> bytes: ...

    def __getitem__(self, at: int | slice) -> int | bytes:
        if isinstance(at, int):
            at = range(self._size)[at]
            return self[at : at + 1][0]
        begin, end, _ = at.indices(self._size)
        end = max(begin, end)
        if end - begin > WINDOW:
            whole = io.BytesIO()  # which gives its own bytes away, so that they are never there twice
            for piece in self.pieces(begin, end):
                whole.write(piece)
            return whole.getvalue()
        if not self._begin <= begin <= end <= self._begin + len(self._window):
            self._window, self._begin = self.read(begin, min(WINDOW, self._size - begin)), begin
        return self._window[begin - self._begin : end - self._begin]

    def startswith(self, prefix: bytes | tuple[bytes, ...]) -> bool:
        """Return whether the file begins with the given bytes, or with one of several."""
        return self[:WINDOW].startswith(prefix)

    def pieces(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield its bytes in pieces of ``PIECE``."""
        end = self._size if end is None else end
        for at in range(begin, end, PIECE):
            yield self.read(at, min(PIECE, end - at))

    def read(self, at: int, size: int) -> bytes:
        """Return exactly ``size`` bytes from an offset. Raise StorageFailed if the file has fewer."""
        data = b""
        try:
            while len(data) < size:
                piece = self._pread(size - len(data), at + len(data))
                if not piece:
                    raise StorageFailed("the file became shorter while it was read")
                data = data + piece if data else piece
        except OSError as error:
            self.fault = unreadable(error)
            raise self.fault from error
        except StorageFailed as error:
            self.fault = error
            raise
        return data


def unreadable(error: OSError) -> StorageFailed:
    """Return the error to report when a file's bytes cannot be read from the disk."""
    return StorageFailed(f"the file cannot be read from the disk ({error.strerror})")


class _FileStream(io.RawIOBase):
    """A ``StoredFile`` as a stream for decoders. The stream ends at an unreadable byte, because decoders would take an
    error for a fault of the content; ``fault`` holds the error."""

    def __init__(self, file: StoredFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._file)}[whence]
        if at < 0:
            raise ValueError(f"offset {at} is before the file")
        self._at = at
        return at

    def readinto(self, into: memoryview, /) -> int:  # ty: ignore[incompatible-method-override] (its only caller)
        size = max(0, min(len(into), PIECE, len(self._file) - self._at))
        try:
            into[:size] = self._file.read(self._at, size)
        except StorageFailed:
            return 0
        self._at += size
        return size


class _Buffered(io.BufferedReader):
    def __init__(self, file: StoredFile) -> None:
        super().__init__(_FileStream(file), PIECE)
        self._size = len(file)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes. Allocate no more memory than there are bytes left, whatever size a hostile header asks
        for."""
        if size is None or not 0 <= size <= PIECE:
            left = max(0, self._size - self.tell())
            size = left if size is None or size < 0 else min(size, left)
        return super().read(size)


FileBytes: TypeAlias = bytes | StoredFile
"""The content of a file: its bytes, or the open file if it is too large for memory."""


def stream(data: FileBytes) -> BinaryIO:
    """Return the content of a file as a stream."""
    return _Buffered(data) if isinstance(data, StoredFile) else io.BytesIO(data)


def pieces(data: FileBytes) -> Iterator[bytes]:
    """Yield the content of a file in pieces of any size."""
    return data.pieces() if isinstance(data, StoredFile) else iter((data,))
