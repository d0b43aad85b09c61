"""The dynamic library: references for retrieval, kept by administrators and readable by every user (MPIC, section 4.2).

A reference has versions. Replacing or removing one makes the old version invisible to new prompts at once; its
original and its compiled chunk stay until no chunk handed out for it is alive any more, so requests in flight end well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import RLock

from PIL import Image

from mpic.durable import Files
from mpic.errors import BadRequest, CorruptFile, IntegrityError, ReferenceNotFound
from mpic.kv.chunk import Chunk, Kind
from mpic.library.catalog import Catalog
from mpic.library.decode import decode_image, decode_text
from mpic.library.limits import Limits
from mpic.library.links import Links
from mpic.library.names import sidecar_of
from mpic.library.originals import Originals
from mpic.library.records import (
    SHARED,
    AsyncReader,
    Change,
    Reference,
    ReferencePage,
    Removed,
    Scalar,
    State,
    TokenCache,
    Tokenize,
)
from mpic.library.reference_intake import ReferenceIntake
from mpic.library.reference_rows import ReferenceRows
from mpic.library.sidecars import Sidecars
from mpic.library.store.disk import DiskStore

log = logging.getLogger(__name__)


class DynamicLibrary:
    """References. Thread-safe. Methods block on the disk, except the async ones. Who may write is the caller's affair.

    Attributes:
        tokenize: text -> token ids of the served model.
        listeners: called after each committed change, on the thread that made it; what they raise is logged.
    """

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        store: DiskStore,
        limits: Limits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root
        self.tokenize: Tokenize | None = None
        self.listeners: list[Callable[[Change], None]] = []
        self._catalog = catalog
        self._store = store
        self._limits = limits
        files = files or Files()
        self._rows = ReferenceRows(catalog, root, clock, Sidecars(root, files))
        self._originals = Originals(root, files, guard)
        self._intake = ReferenceIntake(self._rows, self._originals, limits, clock, self._tell)
        self._tokens = TokenCache()
        self._links = Links()
        self._lock = RLock()  # guards links, and that none is made while its version is collected

    # Writing

    async def add(
        self,
        source: bytes | AsyncReader,
        filename: str,
        *,
        title: str,
        description: str = "",
        metadata: Mapping[str, Scalar] | None = None,
        id: str | None = None,
    ) -> Reference:
        """Store a reference; when this returns it survives a crash. Its state is ``compiling``.

        Args:
            id: ``ref_`` and 1 to 124 letters, digits, ``_ . -``; None chooses one.

        Raises:
            InvalidUpload, InvalidImage, InvalidText, TooLarge: what was sent is not accepted.
            ReferenceExists: there is one of this id.
            BadRequest: malformed id, title, description or metadata.
            StorageFull: the disk is full; nothing was stored.
        """
        words = title, description, metadata or {}
        return await self._intake.first(id, source, filename, *words)

    async def replace(
        self,
        id: str,
        source: bytes | AsyncReader,
        filename: str | None = None,
        *,
        title: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Reference:
        """Store a new version; what is None stays as it was. Prompts made from now on see the new one only.

        Raises:
            ReferenceNotFound: there is none, or it was removed meanwhile.
            Others as ``add``.
        """
        await asyncio.to_thread(self.get, id)  # before anything is received
        return await self._intake.next(id, source, filename, title, description, metadata)

    def remove(self, id: str) -> Removed:
        """Remove a reference: invisible at once, its files gone when nothing links it. Raises ReferenceNotFound."""
        gone = False
        while not gone:  # again when it is replaced meanwhile
            reference = self.get(id)
            with self._store.lock, self._catalog.write() as db:
                gone = self._rows.remove(db, reference)
                shared = self._rows.has_content(db, reference.key, retired=False)
        self._originals.remove_files([sidecar_of(reference.path)])  # the rest stays while a request links it
        self._tell("removed", reference)
        self._collect([reference])
        return Removed(reference, None if shared else self._bare(reference))

    def set_state(
        self, reference: Reference, state: State, tokens: int | None = None, error: str | None = None
    ) -> None:
        """Record what became of the compilation. A version that was replaced or removed meanwhile is no error."""
        self._rows.set_state(reference, state, tokens, error)

    def pin(self, id: str, pinned: bool = True) -> Reference:
        """Keep a reference's compiled chunk from eviction in favour of newer references, or no longer. The dynamic
        library's guaranteed part of the disk is the bound. Raises ReferenceNotFound."""
        self._rows.set_pin(id, pinned)
        return self.get(id)

    def collect_retired(self) -> list[Removed]:
        """Remove versions that were replaced or removed and that nothing links any more. Call it now and then, and
        give what comes back to ``Engine.forget``."""
        return self._collect(self._rows.retired())

    # Finding

    def get(self, id: str) -> Reference:
        """The current version. Raises ReferenceNotFound."""
        reference = self._rows.get(id)
        if reference is None:
            raise ReferenceNotFound(f"no reference {id!r}", param="id", id=id)
        return reference

    def many(self, ids: Iterable[str]) -> list[Reference]:
        """The current versions in the order of ``ids``; those that are not there are left out."""
        ids = list(ids)
        found = self._rows.many(ids)
        return [found[id] for id in ids if id in found]

    def listing(
        self, after: str | None = None, limit: int = 10_000, order: str = "desc", kind: Kind | None = None
    ) -> ReferencePage:
        """References by age, newest first (``order`` is ``asc | desc``).

        Args:
            after: id of the last reference of the previous page. Raises ReferenceNotFound when it is gone.
        """
        if order not in ("asc", "desc"):
            raise BadRequest(f"order is asc or desc, not {order!r}", param="order")
        if limit < 1:
            raise BadRequest(f"limit must be at least 1, not {limit}", param="limit")
        if after is not None:
            self.get(after)
        found = self._rows.listing(after, limit + 1, order, kind)
        return ReferencePage(found[:limit], len(found) > limit)

    def pending(self) -> list[Reference]:
        """References that wait for compilation, oldest first."""
        return self._rows.pending()

    def chunk(self, reference: Reference, tokenize: Tokenize | None = None) -> Chunk:
        """The content of this version as a prompt refers to it, labelled with its title. While the chunk is alive, its
        version stays, replaced or not.

        Raises:
            ReferenceNotFound: the version has been replaced or removed, and nothing linked it.
            CorruptFile: the original is damaged.
        """
        ids = None if reference.kind == "image" else self._token_ids(reference, tokenize)
        load = partial(self.image, reference) if reference.kind == "image" else None
        chunk = Chunk(reference.key, SHARED, ids, load, reference.title, reference.id)
        with self._lock:
            if not self._rows.exists(reference):
                raise _gone(reference)
            self._links.add(reference, chunk)
        return chunk

    def content(self, reference: Reference) -> bytes:
        """The original of this version, verified. Raises ReferenceNotFound, CorruptFile."""
        try:
            return self._originals.read(reference.path, reference.sha256)
        except FileNotFoundError as error:
            if not self._rows.exists(reference):
                raise _gone(reference) from error
            raise CorruptFile(f"the original of {reference.id} is lost") from error

    def text(self, reference: Reference) -> str:
        """The text of a text reference. Raises ReferenceNotFound, CorruptFile."""
        if reference.kind != "text":
            raise ValueError(f"{reference.id} is an image")
        return decode_text(self.content(reference), self._limits)

    def image(self, reference: Reference) -> Image.Image:
        """The decoded RGB image of an image reference. Raises ReferenceNotFound, CorruptFile."""
        return decode_image(self.content(reference), self._limits)

    # Keeping house

    def paths(self) -> set[str]:
        """Where originals should lie, relative to the root."""
        return self._rows.paths()

    def mark_lost(self, lost: set[str], here: set[str]) -> None:
        """At start-up: references whose originals are gone have failed, until the originals are back."""
        self._rows.mark_lost(lost, here)

    def stats(self) -> dict[str, int]:
        count, size = self._rows.totals()
        return {"references": count, "bytes": size, "retired": len(self._rows.retired())}

    def check(self) -> None:
        """Every row has its original. Raises IntegrityError."""
        with self._store.lock:
            gone = [path for path in self._rows.paths() if not (self.root / path).is_file()]
        if gone:
            raise IntegrityError(f"{len(gone)} originals of references are not there, the first is {gone[0]}")

    # Inside

    def _collect(self, retired: list[Reference]) -> list[Removed]:
        """Rows first, then files, so that a crash in between leaves only garbage."""
        if not retired:
            return []
        removed, rows = [], []
        with self._store.lock, self._lock:
            with self._catalog.write() as db:
                for reference in retired:
                    if self._links.linked(reference) or not self._rows.collect(db, reference):
                        continue
                    held = self._rows.has_content(db, reference.key, retired=True)
                    if not held:
                        rows += self._store.drop(db, SHARED, reference.key)
                    removed.append(Removed(reference, None if held else self._bare(reference)))
            self._store.erase(rows)
        for reference, _ in removed:
            self._tokens.drop(_name(reference))
        self._originals.remove(reference.path for reference, _ in removed)
        return removed

    def _bare(self, reference: Reference) -> Chunk:
        return Chunk(reference.key, SHARED, label=reference.title, file_id=reference.id)

    def _token_ids(self, reference: Reference, tokenize: Tokenize | None) -> tuple[int, ...]:
        tokenize = tokenize or self.tokenize
        if tokenize is None:
            raise RuntimeError("the library has no tokenizer; set DynamicLibrary.tokenize")
        ids = self._tokens.get(_name(reference), tokenize)
        if ids is None:
            ids = tuple(tokenize(self.text(reference)))
            self._tokens.put(_name(reference), tokenize, ids)
        return ids

    def _tell(self, what: str, reference: Reference) -> None:
        for listener in self.listeners:
            try:
                listener(Change(what, reference))
            except Exception:
                log.exception("a listener failed over %s of %s", what, reference.id)


def _name(reference: Reference) -> str:
    return reference.path.name  # unlike id and version, of this content for ever


def _gone(reference: Reference) -> ReferenceNotFound:
    return ReferenceNotFound(
        f"version {reference.version} of {reference.id} is gone", param="id", id=reference.id
    )
