"""Remembers the identities of images inside requests. An agent sends the same frames again in every step, and a file
that was decoded once need not be decoded again to find its chunk."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 1 << 14
"""Files whose identities are remembered; 200 bytes each."""


class ImageKeys(Generic[T]):
    """Chunk keys (of a document those of its pages) by user and digest of a file; the least recently used are dropped.
    Thread-safe.

    One user's files are not looked up for another: how long a request takes must not tell who has sent an image before.
    """

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[tuple[str, bytes], T] = OrderedDict()
        self._lock = Lock()

    def key(self, user: str, data: bytes, decode: Callable[[], T]) -> T:
        """Returns the key of the image in a file.

        Args:
            decode: finds the key from the pixels, or refuses the file; called only if this file is not remembered.
        """
        name = (user, hashlib.sha256(data).digest())
        with self._lock:
            if (known := self._keys.get(name)) is not None:
                self._keys.move_to_end(name)
                return known
        found = decode()
        with self._lock:
            self._keys[name] = found
            while len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
        return found
