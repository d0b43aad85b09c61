"""What was deleted must not come back by a save that began before: a compile or a copy takes its time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from mpic.kv.chunk import ChunkKey, KVKey

CAPACITY = 16_384

Content = tuple[str, ChunkKey]
"""Owner and content."""


class Deleted:
    """Contents that were deleted and not asked for since: whoever saves one of them asked before the deletion.

    A tier is not told when such a request ends, so a deletion would have to be known for ever. Instead the newest
    ``capacity`` are, beside the contents asked for last. Once a deletion has been forgotten, what is saved must be
    among these: a save in good time is, and one that is refused by mistake only has its chunk compiled again.
    Thread-safe.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._deleted: OrderedDict[Content, None] = OrderedDict()  # oldest first
        self._asked: OrderedDict[Content, None] = OrderedDict()  # longest ago first
        self._forgotten = False
        self._lock = Lock()

    def __len__(self) -> int:
        """Entries that are remembered; at most twice the capacity."""
        return len(self._deleted) + len(self._asked)

    def ask(self, keys: Iterable[KVKey]) -> None:
        """Somebody looks for these: what is saved of them from now on may be kept."""
        with self._lock:
            for key in keys:
                content = key.owner, key.chunk
                self._deleted.pop(content, None)
                _put(self._asked, content)
            while len(self._asked) > self._capacity:
                self._asked.popitem(last=False)

    def add(self, owner: str, chunk: ChunkKey) -> None:
        """All forms of a content are deleted now."""
        with self._lock:
            self._asked.pop((owner, chunk), None)
            _put(self._deleted, (owner, chunk))
            while len(self._deleted) > self._capacity:
                self._deleted.popitem(last=False)
                self._forgotten = True

    def allows(self, key: KVKey) -> bool:
        """Whether a chunk may be saved."""
        content = key.owner, key.chunk
        with self._lock:
            if self._forgotten:
                return content in self._asked
            return content not in self._deleted


def _put(contents: OrderedDict[Content, None], content: Content) -> None:
    contents[content] = None
    contents.move_to_end(content)
