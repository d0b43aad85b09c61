"""The vectors of one embedder: rows of the catalogue, and the indexes of vectors and words over them, which are caches
of these rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpic.errors import IntegrityError, LibraryGone, StorageFull
from mpic.library.records import Reference
from mpic.retriever.embedder import EmbedderName
from mpic.retriever.index import VectorIndex
from mpic.retriever.index_file import IndexFile
from mpic.retriever.vector_rows import VectorRows
from mpic.retriever.words import Words, available

if TYPE_CHECKING:
    from mpic.library import Library

log = logging.getLogger(__name__)


class Outgrown(ValueError):
    """Raised when the kind of index in the file no longer suits the number of vectors."""


class Vectors:
    """The vectors, loaded from the index's file if it is usable, otherwise from the catalogue. One thread changes them;
    any thread may search.

    Attributes:
        opened_from: ``file``, or the reason why the index had to be rebuilt.
        damaged: True if there was a file that could not be used.
        mismatch: embedders that have vectors of references of which this embedder has none.
        words: the words of references by the ids of their vectors; None if SQLite has no FTS5.
        wordless: ids of vectors whose references' words are still to be added.
    """

    def __init__(self, library: Library, name: EmbedderName, approximate_from: int) -> None:
        self.rows = VectorRows(library.catalog, name)
        self.rows.sweep()
        path = library.root / "index" / f"{name.weights[:16]}.vectors"
        self._file, self._approximate_from = IndexFile(path, name), approximate_from
        self._saved, self._guard = -1, library.folder.check
        self._diverged = False  # the index differs from the rows
        revision = self.rows.revision()
        self.damaged = False
        try:
            self.index = self._file.read(revision, approximate_from)
            if self.index.ids() != self.rows.ids():
                raise ValueError("damaged: it does not have the vectors of the catalogue")
            if self.index.outgrown:
                raise Outgrown("there are too many or too few vectors for the kind of index in the file")
            self.opened_from, self._saved = "file", revision
        except (OSError, ValueError) as error:
            self.damaged = not isinstance(error, FileNotFoundError | Outgrown)
            if self.damaged:
                log.warning("the vector index is rebuilt from the catalogue: %s", error)
            self.opened_from = f"rebuilt: {'no file' if isinstance(error, FileNotFoundError) else error}"
            self._rebuild()
        self.mismatch = self.rows.others()
        self.words: Words | None = None
        self.wordless: list[int] = []
        if available():
            path.parent.mkdir(0o700, exist_ok=True)
            self.words = Words(path.with_suffix(".words"))
            there, wanted = self.words.ids(), self.rows.ids()
            self.words.remove(there - wanted)
            self.wordless = sorted(wanted - there)

    def __len__(self) -> int:
        return len(self.index)

    def put(self, references: Sequence[Reference], vectors: np.ndarray, words: Sequence[str]) -> int:
        """Commit vectors, then make them searchable; return how many of the references were still current and got their
        vector.

        Args:
            vectors: ``[len(references), dimension]`` fp32 of length 1.
            words: all words of each reference.
        """
        stored = self.rows.put(references, vectors)
        replaced = [one.replaced for one in stored if one.replaced is not None]

        def change() -> None:
            self.index.put([one.id for one in stored], vectors[[one.at for one in stored]])
            self.index.remove(replaced)

        if stored:
            self._show(change)
            self._look_for_others()
        if self.words is not None:
            self.words.remove(replaced)
            self.words.put((one.id, words[one.at]) for one in stored)
        return len(stored)

    def remove(self, reference: str) -> None:
        """Delete the vectors that any embedder made of a reference."""
        gone = self.rows.remove(reference)
        left = [] if gone is None else [gone]
        self._show(lambda: self.index.remove(left))
        self._look_for_others()
        if self.words is not None:
            self.words.remove(left)

    def add_words(self, words: Sequence[tuple[int, str]], most: int) -> None:
        """Take the first ``most`` ids of ``wordless``, and add the words found for them."""
        assert self.words is not None  # without an index of words, ``wordless`` is empty
        known = self.rows.some([id for id, _ in words])
        self.words.put(one for one in words if one[0] in known)
        del self.wordless[:most]

    def save(self) -> None:
        """Write the index if its file is not up to date; without the file, the next start rebuilds it. An index that
        differs from the rows is not written."""
        revision = self.rows.revision()
        if revision == self._saved or self._diverged:
            return
        try:
            self._guard()  # a folder that was removed is not created again
            self._file.write(self.index, revision)
            self._saved = revision
        except (StorageFull, LibraryGone, OSError) as error:
            log.warning("the vector index could not be written: %s", error)

    def check(self) -> None:
        """Check that the index holds exactly the vectors of the catalogue. Raise IntegrityError."""
        self.index.check()
        if self.index.ids() != self.rows.ids():
            raise IntegrityError("the vector index and the catalogue disagree")
        if self.words is not None and self.words.ids() != self.rows.ids():
            raise IntegrityError("the index of words and the catalogue disagree")

    def close(self) -> None:
        """Save, and close the index of words."""
        self.save()
        if self.words is not None:
            self.words.close()

    def _look_for_others(self) -> None:
        """End the mismatch with the last reference of which only another embedder has a vector."""
        if self.mismatch:
            self.mismatch = self.rows.others()

    def _show(self, change: Callable[[], object]) -> None:
        """Bring the index up to date with a change of the rows. If that fails, rebuild the index; if that fails as
        well, the next change tries again."""
        if not self._diverged:
            try:
                change()
                if not self.index.outgrown:
                    return
            except Exception as error:
                log.warning("the vector index is made anew, because it could not be changed: %s", error)
                self._diverged = True
        self._rebuild()
        self._diverged = False

    def _rebuild(self) -> None:
        ids, vectors = self.rows.load()
        index = VectorIndex(self.rows.name.dimension, self._approximate_from, vectors)
        if len(ids):
            index.put(ids, vectors)
        self.index = index
