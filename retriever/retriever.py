"""The retriever finds references by text and images."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from mpic.errors import BadRequest, EmbedderMismatch, EmbeddingFailed, EmptyQuery
from mpic.imaging.budget import Budget
from mpic.library.records import Reference
from mpic.retriever.embedder import Embedder
from mpic.retriever.indexer import ReferenceIndexer

if TYPE_CHECKING:
    from mpic.library import Library

MAX_TOP_K = 100
MAX_GUESSES = 4
SEARCHES_WAITING = 16
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """The object of a search: text, images, or both (their vectors are averaged).

    Args:
        images: each an image, or a function that decodes one. One is decoded at a time and dropped before the next.
    """

    text: str = ""
    images: tuple[Image.Image | Callable[[], Image.Image], ...] = ()


class SearchHit(NamedTuple):
    """A reference that was found; ``score`` is the cosine between its vector and the query's, -1 to 1."""

    reference: Reference
    score: float


class Retriever:
    """Finds references. Searches run on the callers' threads, while the indexer's thread keeps the vectors up to date.
    The embedder is loaded when it is first needed. Thread-safe.

    Args:
        library: opened; its references are kept indexed from now on.
        duplicates: references at least this similar to a better hit are left out of a result; above 1 disables this.
    """

    def __init__(self, library: Library, embedder: Embedder, duplicates: float = 0.999) -> None:
        self.library, self.embedder, self.duplicates = library, embedder, duplicates
        self.indexer = ReferenceIndexer(library, embedder)
        self.counters = self.indexer.counters
        self._pictures = Budget(1, SEARCHES_WAITING)
        self._lock = threading.Lock()
        self._closed = False
        self._guesses = 0
        self._guessing = ThreadPoolExecutor(1, "mpic-guess")

    def search(
        self,
        query: Query,
        top_k: int = 5,
        min_score: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> list[SearchHit]:
        """Return references, best first; fewer than ``top_k`` if there are no more.

        Args:
            min_score: leave out references that are less similar.
            filter: see ``VectorRows.matching``.

        Raises:
            EmptyQuery: the query has neither text nor images.
            BadRequest: a bound or the filter is not valid.
            EmbedderUnavailable: the embedder has no weights.
            EmbedderMismatch: another embedder made the library's vectors.
            EmbeddingFailed: the embedder cannot make a vector of the query.
            DecoderBusy: too many searches with images are waiting.
            MPICError: any error from decoding an image of the query.
        """
        if not query.text.strip() and not query.images:
            raise EmptyQuery("a search needs a text or an image", param="query")
        if not 1 <= top_k <= MAX_TOP_K:
            raise BadRequest(f"top_k must lie between 1 and {MAX_TOP_K}, not {top_k}", param="top_k")
        if min_score is not None and not -1 <= min_score <= 1:
            raise BadRequest(f"min_score must lie between -1 and 1, not {min_score}", param="min_score")
        vectors = self.indexer.opened()
        if vectors.mismatch:
            made, now = ", ".join(map(str, vectors.mismatch)), vectors.rows.name
            raise EmbedderMismatch(
                f"the library's vectors were made by {made}, the embedder is {now}: run `mpic references reindex`"
            )
        among = vectors.rows.matching(filter) if filter else None
        self.counters["searches"] += 1
        nothing = len(vectors) == 0 or (among is not None and len(among) == 0)
        if nothing and not query.images:
            return []
        vector = self._vector(query)  # a bad image is refused even if there is nothing to find
        return [] if nothing else self._best(vector, top_k, min_score, among)

    def _best(
        self, vector: np.ndarray, top_k: int, min_score: float | None, among: np.ndarray | None
    ) -> list[SearchHit]:
        opened = self.indexer.opened()
        k = 2 * top_k + 8
        while True:
            neighbours, vectors = opened.index.search(vector, k, among)
            versions = opened.rows.versions([n.id for n in neighbours])
            found = self.library.references.many({id for id, _ in versions.values()})
            current = {(r.id, r.version): r for r in found}
            hits: list[SearchHit] = []
            kept: list[int] = []
            for at, neighbour in enumerate(neighbours):
                reference = current.get(versions.get(neighbour.id, ("", 0)))  # None: of an older version
                if reference is None or (min_score is not None and neighbour.score < min_score):
                    continue
                alike = kept and float((vectors[kept] @ vectors[at]).max()) >= self.duplicates
                if alike or any(reference.key == hit.reference.key for hit in hits):
                    continue
                hits.append(SearchHit(reference, neighbour.score))
                kept.append(at)
            below = min_score is not None and neighbours and neighbours[-1].score < min_score
            if len(hits) >= top_k or len(neighbours) < k or below:
                return hits[:top_k]
            k *= 2

    def _vector(self, query: Query) -> np.ndarray:
        parts = []
        if query.text.strip():
            parts.append(self.embedder.texts([query.text]))
        if query.images:
            with self._pictures.taken(0, 0):
                for image in query.images:
                    parts.append(self.embedder.images([image if isinstance(image, Image.Image) else image()]))
        mean = np.concatenate(parts).mean(0)
        if not np.isfinite(mean).all():
            raise EmbeddingFailed("the query cannot be embedded: its vector is not finite")
        return mean / max(float(np.linalg.norm(mean)), 1e-9)

    def soon(self, work: Callable[..., None], *args: Any) -> None:
        """Run a search on a thread of the retriever, or drop it if too many are waiting."""
        with self._lock:
            if self._closed or self._guesses >= MAX_GUESSES:
                return
            self._guesses += 1
            started = self._guessing.submit(work, *args)  # under the lock, so that no close comes between
        started.add_done_callback(self._guessed)

    def _guessed(self, done: Future[None]) -> None:
        with self._lock:
            self._guesses -= 1
        if not done.cancelled() and done.exception() is not None:
            log.warning("a speculative search failed: %s", done.exception())

    def flush(self, timeout: float = 60.0) -> bool:
        """See ``ReferenceIndexer.flush``."""
        return self.indexer.flush(timeout)

    def reindex(self) -> None:
        """See ``ReferenceIndexer.reindex``."""
        self.indexer.reindex()

    def status(self) -> dict[str, Any]:
        """Return the embedder, the number of indexed and missing references, and counters. Raise
        EmbedderUnavailable."""
        return {**self.indexer.status(), **self.counters}

    def check(self) -> None:
        """Check that the index holds exactly the vectors of the catalogue. Raise IntegrityError."""
        self.indexer.check()

    def close(self) -> None:
        """Stop and write the index. Call it before the library is closed. Safe to call twice."""
        with self._lock:
            self._closed = True
        self._guessing.shutdown(wait=True, cancel_futures=True)
        self.indexer.close()
