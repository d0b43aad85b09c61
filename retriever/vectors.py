"""The vectors of one embedder: rows of the catalogue, and the index over them, which is a cache of these rows."""

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

if TYPE_CHECKING:
    from mpic.library import Library

log = logging.getLogger(__name__)


class Vectors:
    """Vectors, opened from the index's file if that is usable, from the catalogue otherwise. One thread changes them,
    any thread may search.

    Attributes:
        opened_from: ``file``, or the reason why the index had to be rebuilt.
        damaged: True if there was a file that could not be used.
        mismatch: embedders that have vectors of references of which this embedder has none.
    """

    def __init__(self, library: Library, name: EmbedderName) -> None:
        self.rows = VectorRows(library.catalog, name)
        self.rows.sweep()
        self._file = IndexFile(library.root / "index" / f"{name.weights[:16]}.vectors", name)
        self._saved, self._guard = -1, library.folder.check
        self._diverged = False  # the index differs from the rows
        revision = self.rows.revision()
        self.damaged = False
        try:
            self.index = self._file.read(revision)
            if self.index.ids() != self.rows.ids():
                raise ValueError("damaged: it does not have the vectors of the catalogue")
            self.opened_from, self._saved = "file", revision
        except (OSError, ValueError) as error:
            self.damaged = not isinstance(error, FileNotFoundError)
            if self.damaged:
                log.warning("the vector index is rebuilt from the catalogue: %s", error)
            self.opened_from = f"rebuilt: {error if self.damaged else 'no file'}"
            self._rebuild()
        self.mismatch = self.rows.others()

    def __len__(self) -> int:
        return len(self.index)

    def put(self, references: Sequence[Reference], vectors: np.ndarray) -> int:
        """Commit vectors, then show them; return how many of the references are still current and were kept.

        Args:
            vectors: ``[len(references), dimension]`` fp32 of length 1.
        """
        stored = self.rows.put(references, vectors)
        replaced = [one.replaced for one in stored if one.replaced is not None]

        def change() -> None:
            self.index.put([one.id for one in stored], vectors[[one.at for one in stored]])
            self.index.remove(replaced)

        if stored:
            self._show(change)
            self._look_for_others()
        return len(stored)

    def remove(self, reference: str) -> None:
        """Delete the vectors that any embedder made of a reference."""
        gone = self.rows.remove(reference)
        self._show(lambda: self.index.remove([] if gone is None else [gone]))
        self._look_for_others()

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

    def _look_for_others(self) -> None:
        """End the mismatch with the last reference of which only another embedder has a vector."""
        if self.mismatch:
            self.mismatch = self.rows.others()

    def _show(self, change: Callable[[], object]) -> None:
        """Bring the index up to date with a change of the rows. If that fails, the index is made anew; if that fails
        as well, the next change tries again."""
        if not self._diverged:
            try:
                change()
                return
            except Exception as error:
                log.warning("the vector index is made anew, because it could not be changed: %s", error)
                self._diverged = True
        self._rebuild()
        self._diverged = False

    def _rebuild(self) -> None:
        index = VectorIndex(self.rows.name.dimension)
        ids, vectors = self.rows.load()
        if len(ids):
            index.put(ids, vectors)
        self.index = index
