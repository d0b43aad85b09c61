"""The interface between engines and the store of compiled chunks below the device (``mpic.library.store``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from mpic.errors import NotFound
from mpic.kv.chunk import ChunkInputs, ChunkKV, KVKey
from mpic.kv.parts import LayerRange, Piece, PieceReader


class StoredChunk(Protocol):
    """A ChunkKV on some tier below the device. It may be gone, or turn out to be damaged, when it is read.

    Five methods are optional. ``read_ahead()`` has the tier begin reading the chunk, without waiting for it and without
    an error. ``expect(token_ids)`` says which tokens ``[n]`` the chunk must have when its KV is read. ``refuse(error)``
    says that it does not fit the model although its checksums are right: the tier moves it aside, as a damaged one
    (``mpic.kv.expected``). ``close()`` closes what is open until the chunk is read again. ``worth(seconds) -> bool``
    says whether a slow tier expects to have read its KV in less time than computing it takes.

    Methods for a device that copies from page-locked memory are optional, too:

    - ``lend() -> Tensor | None``: the KV itself, in a tier of page-locked memory;
    - ``in_parts(most) -> PartedChunk | None``: for a tier that can be read in pieces of at most ``most`` bytes;
    - ``reserve(shape, dtype) -> Reservation | None``: page-locked memory of a nearer tier, to be read into.

    Without them the chunk is read by ``read_layers``, into memory for all of it.
    """

    tier: str
    """The tier: ``host``, ``disk`` or ``remote``."""

    @property
    def inputs(self) -> ChunkInputs:
        """The chunk's inputs, verified; they may be read from the tier on first use.

        Raises:
            NotFound: the chunk has left the tier meanwhile.
            CorruptFile: it is damaged, and has been moved aside and counted.
            OSError, OutOfMemory: it cannot be read now, which has been counted.
        """
        ...

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Fill ``destination [layers, parts, kv_heads, n, head_dim]`` (host memory; each layer may be strided) and
        verify checksums. One ``next`` should be one read of 1 to a few MiB. Calls may come from different threads,
        one at a time.

        Yields:
            Every layer's number, in order, as soon as its bytes are in place and verified. Others may read them then,
            and they must not change any more.

        Raises:
            NotFound, CorruptFile, OSError: see ``inputs``.
        """
        ...


def optional(stored: object, name: str, *args: Any) -> Any:
    """Call one of the optional methods of a stored chunk or a tier; None where it does not have it."""
    method = getattr(stored, name, None)
    return None if method is None else method(*args)


class LaterChunk:
    """Stands for a chunk that is resident when its request arrives: no tier is asked for it unless it is evicted before
    the request is admitted."""

    tier = "disk"  # the default until it is looked up

    def __init__(self, store: ChunkStore, key: KVKey) -> None:
        self._store, self._key = store, key
        self._known: torch.Tensor | None = None

    def expect(self, token_ids: torch.Tensor) -> None:
        """See ``StoredChunk``."""
        self._known = token_ids

    def look_up(self) -> StoredChunk:
        """Return the chunk as it is stored now.

        Raises:
            NotFound: it has left the store, or was never written.
        """
        found = self._store.find([self._key]).get(self._key)
        if found is None:
            raise NotFound(f"chunk {self._key.chunk} is not stored")
        self.tier = found.tier
        if self._known is not None:
            optional(found, "expect", self._known)
        return found


def looked_up(stored: StoredChunk | LaterChunk) -> StoredChunk:
    """Return a chunk to be read; raise as ``LaterChunk.look_up``."""
    return stored.look_up() if isinstance(stored, LaterChunk) else stored


class PartedChunk(Protocol):
    """A stored chunk that was opened to be read in parts, by several threads.

    Attributes:
        shape, dtype: of its KV.
        parts: in the order of the layers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[LayerRange]

    def read_part(self, part: LayerRange) -> Iterator[tuple[Piece, PieceReader]]:
        """Yield every piece of a part, in order, with what reads and verify it; see ``ChunkFile.read_part``."""
        ...

    def close(self) -> None:
        """Close the file, once nobody reads it any more."""
        ...


class Reservation(Protocol):
    """Page-locked memory of a tier for a chunk that is being read from another one; it counts towards the tier's budget
    at once.

    Attributes:
        kv: ``[layers, parts, kv_heads, n, head_dim]``, contiguous.
    """

    kv: torch.Tensor

    def keep(self) -> None:
        """Hand over the filled and verified memory: from now on the tier has the chunk."""
        ...

    def drop(self) -> None:
        """Give the memory up unfilled. Copies from it may still run."""
        ...


class ChunkStore(Protocol):
    """The tiers of compiled chunks below the device (the library implements it).

    Attributes:
        root: the folder of every ``path``; only an engine writes to ``spool`` below it.
    """

    root: Path

    def find(self, keys: Sequence[KVKey]) -> Mapping[KVKey, StoredChunk]:
        """Return the stored chunks among the keys. One call serves a whole prompt; it opens and reads no file."""
        ...

    def touch(self, keys: Iterable[KVKey]) -> None:
        """Note that these chunks were used, as ``find`` does for those that it finds. Called for every prompt with the
        chunks that are resident, so it takes microseconds. A chunk that is not stored is ignored."""
        ...

    def open(self, key: KVKey) -> StoredChunk | None:
        """Return the stored chunk with its inputs read, or None. A damaged file is moved aside without an error."""
        ...

    def save(self, chunk: ChunkKV) -> None:
        """Make the chunk durable. Called from a background thread. Raise StorageFull."""
        ...

    def path(self, key: KVKey) -> Path:
        """Return the path of a chunk's file (``mpic.kv.file``), stored or not, for engines that read it in other
        processes."""
        ...

    def missing_reason(self, key: KVKey) -> str:
        """Return why a chunk is not stored: ``new | evicted | expired | model_changed | recipe | corrupt``."""
        ...
