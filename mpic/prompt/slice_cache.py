"""Cache of the token ids of slices of earlier prompts, so that a long prompt that is sent again is not tokenized
again.

A slice is found by a digest of the user and its text, so timing reveals nothing about the prompts of other users, and
no text is kept.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict

SLICE = 1 << 13
"""Characters of a remembered slice. Slices are counted from the beginning of a prompt, so a conversation that grows
keeps its slices."""
LEAST = 1 << 8
"""Slices of fewer characters are not worth looking up."""
MOST_IDS = 1 << 20
"""Ids of all slices together, 4 bytes each."""
MOST_SLICES = 1 << 14
"""Slices, each of which takes 220 bytes beside its ids."""


class SliceCache:
    """Ids by user and text, the least recently used forgotten first. Thread-safe."""

    def __init__(self, most_ids: int = MOST_IDS) -> None:
        self.most_ids = most_ids
        self.held = 0
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, owner: str, text: str) -> list[int] | None:
        """Return the ids of a slice, if they are known."""
        key = _key(owner, text)
        with self._lock:
            if key not in self._ids:
                return None
            self._ids.move_to_end(key)
            return self._ids[key].tolist()

    def keep(self, owner: str, text: str, ids: list[int]) -> None:
        """Remember the ids of a slice, unless it alone exceeds the bound."""
        if len(ids) > self.most_ids:
            return
        key, kept = _key(owner, text), array("I", ids)
        with self._lock:
            self.held += len(kept) - len(self._ids.pop(key, ()))
            self._ids[key] = kept
            while self.held > self.most_ids or len(self._ids) > MOST_SLICES:
                self.held -= len(self._ids.popitem(last=False)[1])


def _key(owner: str, text: str) -> bytes:
    user, said = (part.encode(errors="surrogatepass") for part in (owner, text))
    return hashlib.blake2b(len(user).to_bytes(4, "big") + user + said, digest_size=32).digest()
