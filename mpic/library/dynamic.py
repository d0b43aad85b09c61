"""The dynamic library: references for retrieval, kept by administrators and readable by every user (MPIC, section 4.2).

A reference has versions. Replacing or removing one makes the old version invisible to new prompts at once; its
original and its compiled chunk stay until no chunk handed out for it is alive any more, so requests in flight end well.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock

from aiofiles.os import wrap
from PIL import Image

from mpic.durable import Files
from mpic.errors import BadRequest, CorruptFile, IntegrityError, ReferenceExists, ReferenceNotFound
from mpic.kv.chunk import Chunk, Kind
from mpic.library.catalog import Catalog
from mpic.library.decode import decode_image, decode_text
from mpic.library.intake import PIECE, check_metadata, clean_name, identify, is_text, new_id
from mpic.library.limits import Limits
from mpic.library.links import Links
from mpic.library.originals import Incoming, Originals
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
from mpic.library.reference_rows import ReferenceRows
from mpic.library.store.disk import DiskStore

REFERENCE_ID = re.compile(r"ref_[A-Za-z0-9_.-]{1,124}")
TITLE_CHARS, DESCRIPTION_CHARS = 255, 4096
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
    ) -> None:
        self.root = root
        self.tokenize: Tokenize | None = None
        self.listeners: list[Callable[[Change], None]] = []
        self._catalog = catalog
        self._store = store
        self._limits = limits
        self._rows = ReferenceRows(catalog, root, clock)
        self._originals = Originals(root, files or Files())
        self._clock = clock
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
        self._check_words(title, description)
        metadata = check_metadata(metadata or {})
        if id is None:
            id = new_id("ref_")
        elif not REFERENCE_ID.fullmatch(id):
            raise BadRequest(
                f"an id is ref_ and 1 to 124 letters, digits, '_', '.' or '-', not {id[:80]!r}", param="id"
            )
        elif await wrap(self._rows.get)(id) is not None:
            raise ReferenceExists(f"there is a reference {id!r}; replace it", param="id")
        make = partial(self._first, id, filename, title, description, metadata)
        return await self._take(source, make, self._commit_first, "added")

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
        old = await wrap(self.get)(id)
        title = old.title if title is None else title
        description = old.description if description is None else description
        self._check_words(title, description)
        words = {
            "title": title,
            "description": description,
            "metadata": old.metadata if metadata is None else check_metadata(metadata),
            "filename": old.filename if filename is None else clean_name(filename, self._limits),
        }
        return await self._take(source, partial(self._next, id, words), self._commit_next, "replaced")

    def remove(self, id: str) -> Removed:
        """Remove a reference: invisible at once, its files gone when nothing links it. Raises ReferenceNotFound."""
        gone = False
        while not gone:  # again when it is replaced meanwhile
            reference = self.get(id)
            with self._store.lock, self._catalog.write() as db:
                gone = self._rows.remove(db, reference)
                shared = self._rows.has_content(db, reference.key, retired=False)
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

    def mark_lost(self, paths: set[str]) -> None:
        """At start-up: references whose originals are gone have failed."""
        self._rows.mark_lost(paths)

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

    async def _take(
        self,
        source: bytes | AsyncReader,
        make: Callable[[Incoming], Reference],
        commit: Callable[[Reference], Reference],
        what: str,
    ) -> Reference:
        """Receive, check, make durable, commit, tell; never blocks the event loop."""
        incoming = await wrap(self._originals.incoming)(self._limits.upload_bytes)
        try:
            if isinstance(source, bytes):
                await wrap(incoming.write)(source)
            else:
                while piece := await source.read(PIECE):
                    await wrap(incoming.write)(piece)
            return await wrap(self._accept)(incoming, make, commit, what)
        finally:  # not awaited, so that cancellation cannot prevent it
            asyncio.get_running_loop().run_in_executor(None, incoming.discard)

    def _accept(
        self,
        incoming: Incoming,
        make: Callable[[Incoming], Reference],
        commit: Callable[[Reference], Reference],
        what: str,
    ) -> Reference:
        reference = make(incoming)
        incoming.publish(reference.path)
        try:
            committed = commit(reference)
        except BaseException:
            self._originals.remove(reference.path)
            raise
        self._tell(what, committed)
        return committed

    def _first(
        self,
        id: str,
        filename: str,
        title: str,
        description: str,
        metadata: dict[str, Scalar],
        incoming: Incoming,
    ) -> Reference:
        """Version 1 of what came in."""
        key, now = identify(incoming.content(), self._limits), self._clock()
        return Reference(
            id=id,
            version=1,
            kind=key.kind,
            title=title,
            description=description,
            metadata=metadata,
            filename=clean_name(filename, self._limits),
            bytes=incoming.bytes,
            path=self._new_path(id),
            key=key,
            created_at=now,
            updated_at=now,
            tokens=None,
            state="compiling",
            error=None,
            sha256=incoming.sha256,
        )

    def _next(self, id: str, words: dict[str, object], incoming: Incoming) -> Reference:
        """The version after the current one."""
        key = identify(incoming.content(), self._limits)
        old = self.get(id)
        return replace(
            old,
            **words,
            version=old.version + 1,
            kind=key.kind,
            key=key,
            bytes=incoming.bytes,
            path=self._new_path(id),
            sha256=incoming.sha256,
            updated_at=self._clock(),
            tokens=None,
            state="compiling",
            error=None,
        )

    def _commit_first(self, new: Reference) -> Reference:
        return self._rows.insert(new)

    def _commit_next(self, new: Reference) -> Reference:
        """Of several replacements at once, each gets a version of its own; the last to commit stays."""
        while not self._rows.replace(new):
            new = replace(new, version=self.get(new.id).version + 1)
        return new

    def _new_path(self, id: str) -> Path:
        """Every version has a name of its own, so that no two ever share a file."""
        return self._originals.path(SHARED, new_id(f"{id}@"))

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
            self._originals.remove(reference.path)
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

    def _check_words(self, title: str, description: str) -> None:
        if not 0 < len(title) <= TITLE_CHARS or not title.isprintable() or not title.strip():
            raise BadRequest(f"a title is 1 to {TITLE_CHARS} printable characters", param="title")
        if len(description) > DESCRIPTION_CHARS:
            raise BadRequest(f"a description has at most {DESCRIPTION_CHARS} characters", param="description")
        if not is_text(description):
            raise BadRequest("the description contains half of a surrogate pair", param="description")

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
