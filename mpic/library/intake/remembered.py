"""Remembers what is costly to find again: the identities of files inside requests, which an agent sends again in every
step, and the token ids of the most recently linked texts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from mpic.library.records import Tokenize

T = TypeVar("T")
REMEMBERED = 1 << 14
"""Files whose identities are remembered; 200 bytes each."""
CACHED_TOKENS = 1 << 20


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
        """Return the key of the image in a file.

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


class TokenCache:
    """Token ids by name of a text and tokenizer, bounded in tokens; the least recently used are dropped.
    Thread-safe."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[Tokenize, tuple[int, ...]]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def ids(self, name: str, tokenize: Tokenize, read: Callable[[], str]) -> tuple[int, ...]:
        """Return the token ids of a text, tokenized with ``tokenize``.

        Args:
            name: permanent identity of the text.
            read: function that returns the text; called only if its ids are not cached.
        """
        with self._lock:
            known_tokenize, ids = self._entries.get(name, (None, ()))
            if known_tokenize == tokenize:
                self._entries.move_to_end(name)
                return ids
        ids = tuple(tokenize(read()))
        with self._lock:
            self._forget(name)
            self._entries[name] = (tokenize, ids)
            self._size += len(ids)
            while self._size > CACHED_TOKENS:
                self._forget(next(iter(self._entries)))
        return ids

    def drop(self, name: str) -> None:
        """Forget a text, and its pieces, whose names are the text's and a digest."""
        with self._lock:
            for known in [name, *(one for one in self._entries if one.startswith(f"{name} "))]:
                self._forget(known)

    def _forget(self, name: str) -> None:
        self._size -= len(self._entries.pop(name, (None, ()))[1])
