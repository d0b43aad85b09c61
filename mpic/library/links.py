"""Which versions of references are still in somebody's hands."""

from __future__ import annotations

import weakref

from mpic.kv.chunk import Chunk
from mpic.library.records import Reference


class Links:
    """Chunks handed out, by version. A version is linked while one of its chunks is alive: a request holds the chunks
    of its prompt until it ends. Callers hold a lock of their own."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, int], list[weakref.ref[Chunk]]] = {}

    def add(self, reference: Reference, chunk: Chunk) -> None:
        alive = [link for link in self._chunks.get(_name(reference), ()) if link() is not None]
        self._chunks[_name(reference)] = [*alive, weakref.ref(chunk)]

    def linked(self, reference: Reference) -> bool:
        if any(link() is not None for link in self._chunks.get(_name(reference), ())):
            return True
        self._chunks.pop(_name(reference), None)
        return False


def _name(reference: Reference) -> tuple[str, int]:
    return reference.id, reference.version
