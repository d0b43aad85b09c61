"""A cache of the token ids of the most recently linked texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from mpic.library.records import Tokenize

CACHED_TOKENS = 1 << 20


class TokenCache:
    """Token ids by name of a text and tokenizer, bounded in tokens; the least recently used are dropped.
    Thread-safe."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[Tokenize, tuple[int, ...]]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def ids(self, name: str, tokenize: Tokenize, read: Callable[[], str]) -> tuple[int, ...]:
        """Returns the token ids of a text, tokenized with ``tokenize``.

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
        """Forgets a text, and its pieces, whose names are the text's and a digest."""
        with self._lock:
            for known in [name, *(one for one in self._entries if one.startswith(f"{name} "))]:
                self._forget(known)

    def _forget(self, name: str) -> None:
        self._size -= len(self._entries.pop(name, (None, ()))[1])
