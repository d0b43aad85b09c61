"""Nearest neighbours by inner product, changed in place while others search.

Exact search over ``IndexIDMap2(IndexFlatIP)``. There are two copies (left and right). Readers use the published one; a
writer changes the other, publishes it, waits until the first has no readers, and then changes that, too. A reader
therefore never waits and never sees half a change, and nothing is ever rebuilt; the price is twice the memory. A larger
index type would replace ``_new``: IVF needs ``DirectMap.Hashtable`` for removal by id, HNSW cannot remove at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import faiss
import numpy as np

from mpic.errors import IntegrityError


class Neighbour(NamedTuple):
    """A vector that was found: its id and the inner product with the query."""

    id: int
    score: float


class _IndexCopy:
    def __init__(self, index: faiss.IndexIDMap2) -> None:
        self.index = index
        self.ids: set[int] = set(faiss.vector_to_array(index.id_map).tolist())
        self.readers = 0


class VectorIndex:
    """Vectors of length 1 by id. Thread-safe.

    Args:
        dimension: dimension of the vectors.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._shown, self._other = _IndexCopy(_new(dimension)), _IndexCopy(_new(dimension))
        self._writing = threading.Lock()
        self._reading = threading.Condition()

    def __len__(self) -> int:
        return self._shown.index.ntotal

    def search(
        self, query: np.ndarray, k: int, among: np.ndarray | None = None
    ) -> tuple[list[Neighbour], np.ndarray]:
        """Find the ``k`` best neighbours, best first, with their vectors.

        Args:
            query: ``[dimension]`` fp32.
            among: int64 ids that may be found; None for all.

        Returns:
            neighbours and ``[found, dimension]`` fp32.
        """
        with self._reader() as side, one_thread():
            k = min(k, side.index.ntotal if among is None else len(among))
            if k == 0:
                return [], np.empty((0, self.dimension), np.float32)
            options = None
            if among is not None:
                options = faiss.SearchParameters(sel=faiss.IDSelectorBatch(np.asarray(among, np.int64)))  # ty: ignore[unknown-argument] (faiss adds it at import)
            scores, ids, vectors = side.index.search_and_reconstruct(
                np.ascontiguousarray(query[None], np.float32), k, params=options
            )
        found = ids[0] >= 0
        pairs = zip(ids[0][found].tolist(), scores[0][found].tolist(), strict=True)
        return [Neighbour(id, score) for id, score in pairs], vectors[0][found]

    def put(self, ids: Sequence[int] | np.ndarray, vectors: np.ndarray) -> None:
        """Add vectors, in place of those that have the same ids.

        Args:
            ids: distinct ids.
            vectors: ``[len(ids), dimension]`` fp32 of length 1.

        Raises:
            IntegrityError: the index does not have the expected content afterwards.
        """
        numbers = np.asarray(ids, np.int64)
        vectors = np.ascontiguousarray(vectors, np.float32)
        if vectors.shape != (len(ids), self.dimension) or len(set(numbers.tolist())) != len(ids):
            raise ValueError(f"{len(ids)} ids (distinct?) for vectors of shape {vectors.shape}")

        def change(side: _IndexCopy) -> None:
            _remove(side, [i for i in numbers.tolist() if i in side.ids])
            side.index.add_with_ids(vectors, numbers)
            side.ids.update(numbers.tolist())

        self._change(change)

    def remove(self, ids: Sequence[int]) -> int:
        """Remove vectors; return how many of them were there."""
        known = [i for i in dict.fromkeys(ids) if i in self._shown.ids]
        if known:
            self._change(lambda side: _remove(side, known))
        return len(known)

    def serialize(self) -> np.ndarray:
        """Return the index as bytes, uint8."""
        with self._reader() as side:
            return faiss.serialize_index(side.index)

    @classmethod
    def deserialize(cls, data: np.ndarray, dimension: int) -> VectorIndex:
        """Make an index from the bytes of ``serialize``, whose checksum the caller has verified.

        Raises:
            ValueError: it is not such an index.
        """
        index = cls(dimension)
        sides = []
        for _ in range(2):
            try:
                read = faiss.deserialize_index(data)
            except RuntimeError as error:
                raise ValueError(f"faiss cannot read it: {error}") from error
            if not isinstance(read, faiss.IndexIDMap2) or read.d != dimension:
                raise ValueError(f"it holds a {type(read).__name__} of {read.d} dimensions")
            sides.append(_IndexCopy(read))
        index._shown, index._other = sides
        return index

    def ids(self) -> set[int]:
        return set(self._shown.ids)

    def check(self) -> None:
        """Check that both sides agree with their ids and with each other. Raise IntegrityError."""
        with self._writing:
            for side in (self._shown, self._other):
                mapped = faiss.vector_to_array(side.index.id_map).tolist()
                if len(mapped) != side.index.ntotal or set(mapped) != side.ids or side.ids != self._shown.ids:
                    raise IntegrityError("the vector index and its ids disagree")

    # ---- left and right

    @contextmanager
    def _reader(self) -> Iterator[_IndexCopy]:
        with self._reading:
            side = self._shown
            side.readers += 1
        try:
            yield side
        finally:
            with self._reading:
                side.readers -= 1
                self._reading.notify_all()

    def _change(self, change: Callable[[_IndexCopy], None]) -> None:
        with self._writing, one_thread():
            change(self._other)
            with self._reading:
                self._shown, self._other = self._other, self._shown
                while self._other.readers:
                    self._reading.wait()
            change(self._other)


def _new(dimension: int) -> faiss.IndexIDMap2:
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))


def _remove(side: _IndexCopy, ids: list[int]) -> None:
    """Remove vectors from one side. faiss ignores an id that it does not find, so the number it removed is checked."""
    if not ids:
        return
    removed = side.index.remove_ids(faiss.IDSelectorBatch(np.asarray(ids, np.int64)))
    side.ids.difference_update(ids)
    if removed != len(ids) or side.index.ntotal != len(side.ids):
        raise IntegrityError(f"{removed} of {len(ids)} vectors were removed from the index")


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep OpenMP from starting threads for this thread: searches are short, and the model needs the cores."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
