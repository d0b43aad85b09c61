"""Nearest neighbours by inner product, changed in place while others search.

The search is exact (``IndexIDMap2(IndexFlatIP)``) up to ``APPROXIMATE_FROM`` vectors. Above that it uses IVF, which
searches only the share ``SEARCHED`` of its lists whose centres are nearest. (faiss cannot remove from HNSW.)

There are two copies (left and right). Readers use the published copy; a writer changes the other, publishes it, waits
until the first has no readers, and then changes that as well. A reader therefore never waits and never sees half a
change; the price is twice the memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import faiss
import numpy as np

from mpic.errors import IntegrityError
from mpic.retriever.words import Neighbour

APPROXIMATE_FROM = 100_000
SEARCHED = 1 / 8
"""Share of its lists that IVF searches."""
TRAINED_ON = 64
"""Number of vectors per list from which the centres are computed."""


class _IndexCopy:
    def __init__(self, index: Any) -> None:
        self.index = index
        self.ids: set[int] = set(_ids(index))
        self.readers = 0


class VectorIndex:
    """Vectors of length 1 by id. Thread-safe.

    Args:
        dimension: dimension of the vectors.
        approximate_from: number of vectors from which the search is approximate; 0: never.
        like: ``[n, dimension]`` fp32, a sample in the size and distribution of the vectors to come; None: few vectors
            are expected.
    """

    def __init__(
        self, dimension: int, approximate_from: int = APPROXIMATE_FROM, like: np.ndarray | None = None
    ) -> None:
        self.dimension, self.approximate_from = dimension, approximate_from or math.inf
        if like is not None and len(like) >= self.approximate_from:
            index = _trained(like)
        else:
            index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._shown, self._other = _IndexCopy(index), _IndexCopy(faiss.clone_index(index))
        self._writing = threading.Lock()
        self._reading = threading.Condition()

    def __len__(self) -> int:
        return self._shown.index.ntotal

    @property
    def kind(self) -> str:
        """Return a description of the index in use."""
        index: Any = self._shown.index
        if not _is_ivf(index):
            return "flat (exact)"
        return f"IVF (approximate: the {index.nprobe:,} nearest of {index.nlist:,} lists)"

    @property
    def outgrown(self) -> bool:
        """Return whether this many vectors need a new index: of another kind, or with more lists."""
        size, index = len(self), self._shown.index
        if not _is_ivf(index):
            return size >= self.approximate_from
        return size < self.approximate_from / 2 or _lists(size) > 2 * index.nlist

    def search(self, query: np.ndarray, k: int, among: np.ndarray | None = None) -> list[Neighbour]:
        """Return the ``k`` best neighbours, best first, with their inner products; fewer only if there are no more.
        With ``among`` the search is exact.

        Args:
            query: ``[dimension]`` fp32.
            among: int64 ids that may be found; None for all.
        """
        with self._reader() as side, one_thread():
            k = min(k, side.index.ntotal if among is None else len(among))
            if k == 0:
                return []
            index, options = side.index, {}
            if among is not None:
                options["sel"] = faiss.IDSelectorBatch(np.asarray(among, np.int64))
            row = np.ascontiguousarray(query[None], np.float32)
            ways = [faiss.SearchParameters(**options)]
            if _is_ivf(index):  # all lists if ids are given or the nearest hold too few
                lists = [index.nlist] if among is not None else [index.nprobe, index.nlist]
                ways = [faiss.SearchParametersIVF(nprobe=n, **options) for n in lists]  # ty: ignore[unknown-argument] (faiss adds it at import)
            for way in ways:
                scores, ids = index.search(row, k, params=way)
                if ids[0, -1] >= 0:
                    break
        found = ids[0] >= 0
        pairs = zip(ids[0][found].tolist(), scores[0][found].tolist(), strict=True)
        return [Neighbour(id, score) for id, score in pairs]

    def put(self, ids: Sequence[int] | np.ndarray, vectors: np.ndarray) -> None:
        """Add vectors, replacing those with the same ids.

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
        """Remove vectors; return how many of them existed."""
        known = [i for i in dict.fromkeys(ids) if i in self._shown.ids]
        if known:
            self._change(lambda side: _remove(side, known))
        return len(known)

    def serialize(self) -> np.ndarray:
        """Return the index as bytes, uint8."""
        with self._reader() as side:
            return faiss.serialize_index(side.index)

    @classmethod
    def deserialize(
        cls, data: np.ndarray, dimension: int, approximate_from: int = APPROXIMATE_FROM
    ) -> VectorIndex:
        """Make an index from the bytes of ``serialize``, whose checksum the caller has verified.

        Raises:
            ValueError: it is not such an index.
        """
        index = cls(dimension, approximate_from)
        sides = []
        for _ in range(2):
            try:
                read = faiss.deserialize_index(data)
            except RuntimeError as error:
                raise ValueError(f"faiss cannot read it: {error}") from error
            if not isinstance(read, faiss.IndexIDMap2 | faiss.IndexIVFFlat) or read.d != dimension:
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
                mapped = _ids(side.index)
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


def _is_ivf(index: Any) -> bool:
    return isinstance(index, faiss.IndexIVFFlat)


def _lists(size: int) -> int:
    """Return the number of lists for this many vectors."""
    return max(1, round(2 * math.sqrt(size)))


def _trained(vectors: np.ndarray) -> faiss.IndexIVFFlat:
    """Return an empty IVF index, trained on these vectors."""
    dimension = vectors.shape[1]
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(dimension), dimension, _lists(len(vectors)), faiss.METRIC_INNER_PRODUCT
    )
    index.nprobe = math.ceil(index.nlist * SEARCHED)
    index.cp.max_points_per_centroid, index.cp.min_points_per_centroid = TRAINED_ON, 1
    with one_thread():
        index.train(np.ascontiguousarray(vectors, np.float32))
    return index


def _ids(index: Any) -> list[int]:
    if not _is_ivf(index):
        return faiss.vector_to_array(index.id_map).tolist()
    lists = index.invlists
    sizes = [(i, lists.list_size(i)) for i in range(index.nlist)]
    return [id for i, n in sizes if n for id in faiss.rev_swig_ptr(lists.get_ids(i), n).tolist()]


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
