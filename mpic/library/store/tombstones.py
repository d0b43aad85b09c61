"""Tombstones prevent a save that began before a deletion from bringing the deleted content back, since a compile or a
copy takes time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from mpic.kv.chunk import ChunkKey, KVKey

CAPACITY = 16_384

Content = tuple[str, ChunkKey]
"""Owner and content."""


class DeletedContents:
    """The contents that were deleted and not looked up since. A save of one of them was requested before the deletion.

    A tier does not know when such a request ends, so a deletion would have to be remembered for ever. Instead the
    newest ``capacity`` deletions are remembered, and the contents that were looked up last. Once a deletion has been
    forgotten, only the latter may be saved. A timely save is among them, and a chunk that is refused by mistake is
    merely compiled again. Thread-safe.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._deleted: OrderedDict[Content, None] = OrderedDict()  # oldest first
        self._looked_up: OrderedDict[Content, None] = OrderedDict()  # longest ago first
        self._forgotten = False
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of remembered contents, at most twice the capacity."""
        return len(self._deleted) + len(self._looked_up)

    def look_up(self, keys: Iterable[KVKey]) -> None:
        """Note that these chunks were looked up: they may be saved from now on."""
        with self._lock:
            for key in keys:
                content = key.owner, key.chunk
                self._deleted.pop(content, None)
                _put(self._looked_up, content)
            while len(self._looked_up) > self._capacity:
                self._looked_up.popitem(last=False)

    def add(self, owner: str, chunk: ChunkKey) -> None:
        """Note that all forms of a content were deleted."""
        with self._lock:
            self._looked_up.pop((owner, chunk), None)
            _put(self._deleted, (owner, chunk))
            while len(self._deleted) > self._capacity:
                self._deleted.popitem(last=False)
                self._forgotten = True

    def allows(self, key: KVKey) -> bool:
        """Return whether a chunk may be saved."""
        content = key.owner, key.chunk
        with self._lock:
            if self._forgotten:
                return content in self._looked_up
            return content not in self._deleted


def _put(contents: OrderedDict[Content, None], content: Content) -> None:
    contents[content] = None
    contents.move_to_end(content)
