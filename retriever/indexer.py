"""The indexer keeps the vectors of all references up to date, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mpic.errors import EmbeddingFailed, MPICError, ReferenceNotFound
from mpic.library.records import Change, Reference
from mpic.retriever.batch import Failures, embed_each
from mpic.retriever.embedder import BATCH, Embedder
from mpic.retriever.retries import Retries, passing, soonest

if TYPE_CHECKING:
    from mpic.library import Library
    from mpic.retriever.vectors import Vectors

BATCH_PIXELS = 4 << 20
"""A batch of images is embedded once they have this many pixels in total."""
CATCH_UP = "catching up"
log = logging.getLogger(__name__)


class ReferenceIndexer:
    """Embeds changed references in batches, and is the only writer of vectors. Thread-safe.

    Args:
        library: opened; its references are kept indexed from now on.
        approximate_from: see ``VectorIndex``.

    Attributes:
        problem: the error of the last batch that could not be embedded.
    """

    def __init__(self, library: Library, embedder: Embedder, approximate_from: int) -> None:
        self.library, self.embedder, self._approximate_from = library, embedder, approximate_from
        self.counters: Counter[str] = Counter()
        self.problem: str | None = None
        self._failed = Failures()
        self._vectors: Vectors | None = None
        self._opening = threading.Lock()
        self._changes: OrderedDict[str, Change] = OrderedDict()
        self._retries = Retries()  # references to try again
        self._rests = Retries()  # the catch-up, while it waits after a failure
        self._work = threading.Condition()
        self._busy = self._stopping = self._catching_up = False
        self._after = ""
        library.references.listeners.append(self._changed)
        self._worker = threading.Thread(target=self._loop, name="mpic-embed", daemon=True)
        self._worker.start()

    def opened(self) -> Vectors:
        """Return the vectors; open them on first use. Raise EmbedderUnavailable."""
        with self._opening:
            if self._vectors is None:
                from mpic.retriever.vectors import Vectors  # imports faiss, which a start does not need

                vectors = Vectors(self.library, self.embedder.name, self._approximate_from)
                self.counters["index_rebuilt"] += vectors.damaged
                behind = not vectors.mismatch and bool(vectors.rows.missing(limit=1))
                with self._work:
                    self._vectors = vectors
                    if behind:
                        self._catching_up, self._after = True, ""
                    self._work.notify_all()
            return self._vectors

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every change so far is searchable; False if that takes longer than ``timeout`` seconds, or if
        some have to be tried again."""
        with self._work:
            idle = lambda: not self._changes and not self._busy
            return self._work.wait_for(idle, timeout) and not self._retries

    def reindex(self) -> None:
        """Embed every reference that has no vector of this embedder, in the background. It continues where an earlier
        run stopped; ``status`` reports the progress."""
        self.opened()
        with self._work:
            self._catching_up, self._after, self.problem = True, "", None
            self._rests.forget([CATCH_UP])
            self._work.notify_all()

    def status(self) -> dict[str, Any]:
        """Return the embedder, and the number of indexed and missing references. Raise EmbedderUnavailable."""
        vectors = self.opened()
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
            "kind": vectors.index.kind,
            "words": None if vectors.words is None else len(vectors) - len(vectors.wordless),
            "problem": self.problem,
            "failed": self._failed.listing(),
        }

    def check(self) -> None:
        """Check that the index holds exactly the vectors of the catalogue. Raise IntegrityError."""
        with self._work:
            idle = lambda: not (self._changes or self._busy or self._catching_up or self._wordless)
            self._work.wait_for(idle, 60.0)
        self.opened().check()

    def close(self) -> None:
        """Stop and write the index. Call it before the library is closed. Safe to call twice."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._worker.join()
        if self._changed in self.library.references.listeners:
            self.library.references.listeners.remove(self._changed)
            if self._vectors is not None:
                self._vectors.close()

    def _changed(self, change: Change) -> None:
        """Queue a change; the library calls this after its commit."""
        with self._work:
            self._changes[change.reference.id] = change
            self._work.notify_all()

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
        """Wait for work. Return the ids of references that have changed or are to be tried again, an empty list to
        catch up, or None to stop."""
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
                if (self._wordless or self._catching_up) and self._rests.pause() is None:
                    return []
                self._work.wait(soonest(self._retries, self._rests))
            return None

    def _apply(self, ids: Sequence[str]) -> None:
        """Bring the vectors of changed references up to date. Two threads that change one reference may report in
        either order, so the current state decides."""
        current = self.library.references.many(ids)
        for id in set(ids) - {reference.id for reference in current}:
            if self._vectors is not None:
                self._vectors.remove(id)
            self._settled([id])
        self._embed(current)

    @property
    def _wordless(self) -> Sequence[int]:
        return [] if self._vectors is None else self._vectors.wordless

    def _catch_up(self) -> None:
        vectors = self.opened()
        if vectors.wordless:
            self._add_words(vectors)
            return
        after = self._after
        ids = vectors.rows.missing(after, BATCH)
        if not ids:
            vectors.mismatch = vectors.rows.others()
            vectors.save()
        self._embed(self.library.references.many(ids))
        with self._work:
            self._rests.forget([CATCH_UP])
            if self._after != after:  # reindex was called meanwhile: begin again
                return
            if ids:
                self._after = ids[-1]
            else:
                self._catching_up = False

    def _add_words(self, vectors: Vectors) -> None:
        """Index the words of references that already have a vector: those from an earlier version's library, or after
        the index of words was lost."""
        rows = vectors.rows.some(vectors.wordless[:BATCH])
        current = {
            (r.id, r.version): r for r in self.library.references.many({id for id, *_ in rows.values()})
        }
        found = [(id, current.get(row[:2])) for id, row in rows.items()]
        texts = [(id, reference, self._content(reference, False)) for id, reference in found if reference]
        words = [(id, words_of(reference, text)) for id, reference, text in texts if text is not None]
        vectors.add_words(words, BATCH)
        with self._work:
            self._rests.forget([CATCH_UP])
            self._work.notify_all()

    def _embed(self, references: Sequence[Reference]) -> None:
        """Embed references, commit the vectors, then make them searchable. A reference that cannot be read or embedded
        is left without a vector."""
        if not references:
            return
        opened = self.opened()
        embedded: list[tuple[Reference, np.ndarray, str]] = []
        for kind in ("image", "text"):
            for read in self._read([r for r in references if r.kind == kind]):
                vectors = embed_each(self.embedder, kind, [content for _, content in read])
                those = [(r, words_of(r, content if kind == "text" else "")) for r, content in read]
                read.clear()  # large images are dropped before the next are decoded
                for (reference, words), vector in zip(those, vectors, strict=True):
                    if isinstance(vector, MPICError):
                        self._fail(reference, vector)
                    else:
                        embedded.append((reference, vector, words))
        if embedded:
            kept, vectors, words = zip(*embedded, strict=True)
            self.counters["embedded"] += opened.put(kept, np.stack(vectors), words)
            self._settled([reference.id for reference in kept])

    def _settled(self, ids: Sequence[str]) -> None:
        """Clear the recorded failures of references."""
        self._failed.forget(ids)
        with self._work:
            self._retries.forget(ids)

    def _read(self, references: Sequence[Reference]) -> Iterator[list[tuple[Reference, Any]]]:
        """Yield references with their contents, in batches of few large images or many small ones. The caller must
        empty a batch before it takes the next."""
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

    def _content(self, reference: Reference, picture: bool = True) -> Any:
        """Return the text or image of a version, or None if it is gone or cannot be read; without ``picture`` an empty
        text in place of an image."""
        try:
            references = self.library.references
            if reference.kind == "text":
                return references.text(reference)
            return references.image(reference) if picture else ""
        except (MPICError, OSError) as error:  # one failure must not stop the others
            self._fail(reference, error)
            return None

    def _fail(self, reference: Reference, error: MPICError | OSError) -> None:
        """Record a reference that cannot be embedded. It is tried again if that may succeed. If its content is refused
        for good, remove its old vectors, because they would count as missing for ever."""
        log.warning("%s cannot be embedded: %s", reference.id, error)
        self.counters["unembeddable" if isinstance(error, EmbeddingFailed) else "unreadable"] += 1
        if passing(error):
            with self._work:
                self._retries.failed([reference.id])
        else:
            self._settled([reference.id])
            if isinstance(error, ReferenceNotFound):
                return
            self.opened().remove(reference.id)
        self._failed.add(reference.id, error)


def words_of(reference: Reference, text: str) -> str:
    """Return all words of a reference."""
    return "\n".join((reference.title, reference.description, text))
