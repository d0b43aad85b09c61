"""The retriever finds references by text and images.

The nearest vectors and the texts with the query's words form two lists, which are fused by rank: rank ``r``, from 1,
scores ``1 / (60 + r)``, and a reference gets the sum of its scores (reciprocal rank fusion: Cormack, Clarke, Buettcher,
SIGIR 2009). Captions seldom describe all of a picture, so a picture's rank by words counts only if it is better than
its rank by vectors; otherwise its rank by vectors counts twice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
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
from mpic.retriever.words import Neighbour, available

if TYPE_CHECKING:
    from mpic.library import Library

MAX_TOP_K = 100
MAX_GUESSES = 4
SEARCHES_WAITING = 16
FUSION = 60
DEPTH = 50
"""Minimum number of ranks of each list that are fused."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """The query of a search: text, images, or both (their vectors are averaged).

    Args:
        images: each an image, or a function that decodes one. One is decoded at a time and dropped before the next.
    """

    text: str = ""
    images: tuple[Image.Image | Callable[[], Image.Image], ...] = ()


class SearchHit(NamedTuple):
    """A reference that was found.

    Args:
        score: the cosine between its vector and the query's, -1 to 1.
        words: its BM25 score, above 0, if the query's words found it; None otherwise.
        found_by: the lists that contained it, ``vector`` and ``words``.
    """

    reference: Reference
    score: float
    words: float | None = None
    found_by: tuple[str, ...] = ("vector",)


class Retriever:
    """Finds references. Searches run on the callers' threads, while the indexer's thread keeps the vectors up to date.
    The embedder is loaded when it is first needed. Thread-safe.

    Args:
        library: opened; its references are kept indexed from now on.
        duplicates: references at least this similar to a better hit are left out of a result; above 1 disables this.
        approximate_from: see ``VectorIndex``.
    """

    def __init__(
        self,
        library: Library,
        embedder: Embedder,
        duplicates: float = 0.999,
        approximate_from: int = 100_000,
    ) -> None:
        self.library, self.embedder, self.duplicates = library, embedder, duplicates
        self.indexer = ReferenceIndexer(library, embedder, approximate_from)
        self.counters = self.indexer.counters
        if not available():
            log.warning("this Python's SQLite has no FTS5: vectors alone find references, words do not")
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
        return [] if nothing else self._best(vector, query.text, top_k, min_score, among)

    def _best(
        self, vector: np.ndarray, text: str, top_k: int, min_score: float | None, among: np.ndarray | None
    ) -> list[SearchHit]:
        opened = self.indexer.opened()
        k = max(2 * top_k + 8, DEPTH)
        words = [] if opened.words is None else opened.words.search(text, k, among)
        scores = dict(words)
        while True:
            neighbours = opened.index.search(vector, k, among)
            places, by_words = _places(neighbours), _places(words)
            rows = opened.rows.some([*{**places, **by_words}])
            current = {
                (r.id, r.version): r for r in self.library.references.many({r[0] for r in rows.values()})
            }
            # hits without a row belong to an older version
            found = [(id, current[row[:2]], row[2]) for id, row in rows.items() if row[:2] in current]
            pictures = "image" if words else None
            found.sort(
                key=lambda one: -_worth(places.get(one[0]), by_words.get(one[0]), one[1].kind == pictures)
            )
            hits: list[SearchHit] = []
            kept: list[np.ndarray] = []
            for id, reference, row in found:
                score = float(row @ vector)
                if min_score is not None and score < min_score:
                    continue
                alike = kept and float((np.stack(kept) @ row).max()) >= self.duplicates
                if alike or any(reference.key == hit.reference.key for hit in hits):
                    continue
                by = (("vector",) if id in places else ()) + (("words",) if id in by_words else ())
                hits.append(SearchHit(reference, score, scores.get(id), by))
                kept.append(row)
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
            started = self._guessing.submit(work, *args)  # under the lock, so that close cannot intervene
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


def _places(found: Sequence[Neighbour]) -> dict[int, int]:
    """Return the rank of each id, from 1; equal scores share a rank."""
    places: dict[int, int] = {}
    for at, (id, score) in enumerate(found):
        tied = at and score == found[at - 1].score
        places[id] = places[found[at - 1].id] if tied else at + 1
    return places


def _worth(place: int | None, by_words: int | None, picture: bool) -> float:
    """Return the fused score of two ranks; None stands for a list without the reference."""
    worth, more = (0.0 if one is None else 1 / (FUSION + one) for one in (place, by_words))
    return worth + (max(worth, more) if picture else more)
