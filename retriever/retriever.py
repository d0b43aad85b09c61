"""The retriever keeps vectors of all references and finds references by text and images."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from mpic.errors import (
    BadRequest,
    EmbedderMismatch,
    EmbeddingFailed,
    EmptyQuery,
    MPICError,
    ReferenceNotFound,
)
from mpic.imaging.budget import Budget
from mpic.library.records import Change, Reference
from mpic.retriever.batch import Failures, embed_each
from mpic.retriever.embedder import BATCH, Embedder
from mpic.retriever.retries import Retries, passing, soonest

if TYPE_CHECKING:
    from mpic.library import Library
    from mpic.retriever.vectors import Vectors

MAX_TOP_K = 100
MAX_GUESSES = 4
BATCH_PIXELS = 4 << 20
"""Images are embedded as soon as those that are decoded have this many pixels together."""
SEARCHES_WAITING = 16
CATCH_UP = "catching up"
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
    """Finds references. One worker thread embeds changed references, in batches, and is the only one that changes
    vectors; searches run on the callers' threads. The embedder is loaded when it is first needed. Thread-safe.

    Args:
        library: opened; its references are kept indexed from now on.
        duplicates: references at least this similar to a better hit are left out of a result; above 1 for none.
    """

    def __init__(self, library: Library, embedder: Embedder, duplicates: float = 0.999) -> None:
        self.library, self.embedder, self.duplicates = library, embedder, duplicates
        self.counters: Counter[str] = Counter()
        self.problem: str | None = None  # the error of the last batch that could not be embedded
        self._failed = Failures()
        self._vectors: Vectors | None = None
        self._opening = threading.Lock()
        self._pictures = Budget(1, SEARCHES_WAITING)
        self._changes: OrderedDict[str, Change] = OrderedDict()
        self._retries = Retries()  # references that are tried again
        self._rests = Retries()  # catching up, while it waits after a failure
        self._work = threading.Condition()
        self._busy = self._stopping = self._catching_up = False
        self._after = ""
        library.references.listeners.append(self._changed)
        self._guesses = 0
        self._guessing = ThreadPoolExecutor(1, "mpic-guess")
        self._worker = threading.Thread(target=self._loop, name="mpic-embed", daemon=True)
        self._worker.start()

    # ---- searching

    def search(
        self,
        query: Query,
        top_k: int = 5,
        min_score: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> list[SearchHit]:
        """Returns references, best first; fewer than ``top_k`` if there are no more.

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
        vectors = self._opened()
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
        opened = self._opened()
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
        """Runs a search on a thread of the retriever, or drops it if too many are waiting."""
        with self._work:
            if self._stopping or self._guesses >= MAX_GUESSES:
                return
            self._guesses += 1
            started = self._guessing.submit(work, *args)  # under the lock, so that no close comes between
        started.add_done_callback(self._guessed)

    def _guessed(self, done: Future[None]) -> None:
        with self._work:
            self._guesses -= 1
        if not done.cancelled() and done.exception() is not None:
            log.warning("a speculative search failed: %s", done.exception())

    # ---- keeping up

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until every change so far is searchable; False if that takes longer than ``timeout`` seconds, or if
        some have to be tried again."""
        with self._work:
            idle = lambda: not self._changes and not self._busy
            return self._work.wait_for(idle, timeout) and not self._retries

    def reindex(self) -> None:
        """Embeds every reference that has no vector of this embedder, in the background. It continues where an earlier
        run stopped; ``status`` tells the progress."""
        self._opened()
        with self._work:
            self._catching_up, self._after, self.problem = True, "", None
            self._rests.forget([CATCH_UP])
            self._work.notify_all()

    def status(self) -> dict[str, Any]:
        """Returns the embedder, the number of indexed and missing references, and counters. Raises
        EmbedderUnavailable."""
        vectors = self._opened()
        references = self.library.references.stats()["references"]
        with self._work:
            running = self._catching_up
        return {
            "embedder": {**vectors.rows.name._asdict(), "model": self.embedder.model},
            "references": references,
            "vectors": len(vectors),
            "missing": len(vectors.rows.missing()),
            "reindexing": running,
            "mismatch": [str(name) for name in vectors.mismatch],
            "index": vectors.opened_from,
            "problem": self.problem,
            "failed": self._failed.listing(),
            **self.counters,
        }

    def check(self) -> None:
        """Checks that the index holds exactly the vectors of the catalogue. Raises IntegrityError."""
        with self._work:
            self._work.wait_for(lambda: not (self._changes or self._busy or self._catching_up), 60.0)
        self._opened().check()

    def close(self) -> None:
        """Stops and writes the index. Call it before the library is closed. Safe to call twice."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._guessing.shutdown(wait=True, cancel_futures=True)
        self._worker.join()
        if self._changed in self.library.references.listeners:
            self.library.references.listeners.remove(self._changed)
            if self._vectors is not None:
                self._vectors.save()

    def _changed(self, change: Change) -> None:
        """Queues a change, which the library reports after its commit."""
        with self._work:
            self._changes[change.reference.id] = change
            self._work.notify_all()

    def _opened(self) -> Vectors:
        with self._opening:
            if self._vectors is None:
                from mpic.retriever.vectors import Vectors  # imports faiss, which a start does not need

                vectors = Vectors(self.library, self.embedder.name)
                self.counters["index_rebuilt"] += vectors.damaged
                if not vectors.mismatch and vectors.rows.missing(limit=1):
                    with self._work:
                        self._catching_up, self._after = True, ""
                        self._work.notify_all()
                self._vectors = vectors
            return self._vectors

    # ---- the worker

    def _loop(self) -> None:
        while (ids := self._next()) is not None:
            retries, names = (self._retries, ids) if ids else (self._rests, [CATCH_UP])
            try:
                if ids:
                    self._apply(ids)
                else:
                    self._catch_up()
                self.problem = None
            except Exception as error:
                self.problem = str(error)
                self.counters["failed_batches"] += 1
                ours = isinstance(error, MPICError)
                log.error("references could not be indexed, to be tried again: %s", error, exc_info=not ours)
                with self._work:
                    retries.failed(names)

    def _next(self) -> list[str] | None:
        """Waits for work. Returns the ids of references that have changed or are tried again; none to catch up; None to
        stop."""
        with self._work:
            self._busy = False
            self._work.notify_all()
            while not self._stopping:
                ids = [self._changes.popitem(last=False)[0] for _ in range(min(BATCH, len(self._changes)))]
                ids = ids or self._retries.take(BATCH)
                if ids:
                    self._busy = True  # not while catching up, which flush does not wait for
                    return ids
                self._rests.take(1)
                if self._catching_up and self._rests.pause() is None:
                    return []
                self._work.wait(soonest(self._retries, self._rests))
            return None

    def _apply(self, ids: Sequence[str]) -> None:
        """Brings the vectors of changed references up to date. Two threads that change one reference may report in
        either order, so its state now is used."""
        current = self.library.references.many(ids)
        for id in set(ids) - {reference.id for reference in current}:
            if self._vectors is not None:
                self._vectors.remove(id)
            self._settled([id])
        self._embed(current)

    def _catch_up(self) -> None:
        vectors = self._opened()
        after = self._after
        ids = vectors.rows.missing(after, BATCH)
        if not ids:
            vectors.mismatch = vectors.rows.others()
            vectors.save()
        self._embed(self.library.references.many(ids))
        with self._work:
            self._rests.forget([CATCH_UP])
            if self._after != after:  # reindex was called meanwhile: from the start
                return
            if ids:
                self._after = ids[-1]
            else:
                self._catching_up = False

    def _embed(self, references: Sequence[Reference]) -> None:
        """Embeds references, commits the vectors, then shows them. A reference that cannot be read or embedded is left
        without a vector."""
        if not references:
            return
        opened = self._opened()
        embedded: list[tuple[Reference, np.ndarray]] = []
        for kind in ("image", "text"):
            for read in self._read([r for r in references if r.kind == kind]):
                vectors = embed_each(self.embedder, kind, [content for _, content in read])
                those = [reference for reference, _ in read]
                read.clear()  # large images are dropped before the next are decoded
                for reference, vector in zip(those, vectors, strict=True):
                    if isinstance(vector, MPICError):
                        self._fail(reference, vector)
                    else:
                        embedded.append((reference, vector))
        if embedded:
            vectors = np.stack([vector for _, vector in embedded])
            kept = [reference for reference, _ in embedded]
            self.counters["embedded"] += opened.put(kept, vectors)
            self._settled([reference.id for reference in kept])

    def _settled(self, ids: Sequence[str]) -> None:
        """Forgets that references have failed."""
        self._failed.forget(ids)
        with self._work:
            self._retries.forget(ids)

    def _read(self, references: Sequence[Reference]) -> Iterator[list[tuple[Reference, Any]]]:
        """Yields references with their contents, in batches of few large images or many small ones. The caller empties
        a batch before it takes the next."""
        batch: list[tuple[Reference, Any]] = []
        pixels = 0
        for reference in references:
            content = self._content(reference)
            if content is None:
                continue
            batch.append((reference, content))
            pixels += content.width * content.height if isinstance(content, Image.Image) else 0
            del content
            if pixels >= BATCH_PIXELS:
                yield batch
                batch, pixels = [], 0
        if batch:
            yield batch

    def _content(self, reference: Reference) -> Any:
        """Returns the text or image of a version, or None if it is gone or cannot be read."""
        try:
            references = self.library.references
            return references.image(reference) if reference.kind == "image" else references.text(reference)
        except (MPICError, OSError) as error:  # one failure must not stop the others
            self._fail(reference, error)
            return None

    def _fail(self, reference: Reference, error: MPICError | OSError) -> None:
        """Records a reference that cannot be embedded. It is tried again if that may succeed. If its content is refused
        for good, its old vectors are removed, because they would count as missing for ever."""
        log.warning("%s cannot be embedded: %s", reference.id, error)
        self.counters["unembeddable" if isinstance(error, EmbeddingFailed) else "unreadable"] += 1
        if passing(error):
            with self._work:
                self._retries.failed([reference.id])
        else:
            self._settled([reference.id])
            if isinstance(error, ReferenceNotFound):
                return
            self._opened().remove(reference.id)
        self._failed.add(reference.id, error)
