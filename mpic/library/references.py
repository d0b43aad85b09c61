"""References for retrieval, the *dynamic library* of the paper (MPIC, section 4.2): administrators maintain them, and
every user may read them.

A reference has versions. Replacing or removing one makes the old version invisible to new prompts at once. Its original
and its compiled chunk stay until no chunk made of it is alive any more, so that running requests can finish.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Literal, TypeVar
from weakref import WeakSet

from PIL import Image

from mpic.errors import BadRequest, CorruptFile, ReferenceExists, ReferenceNotFound, cut
from mpic.kv.chunk import Chunk, ChunkKey, Kind
from mpic.library.catalog.reference_rows import ReferenceRows
from mpic.library.folder.layout import sidecar_of
from mpic.library.folder.originals import Incoming, OpenOriginal
from mpic.library.folder.sidecars import Sidecar
from mpic.library.intake.checks import (
    check_life,
    check_metadata,
    check_page,
    clean_name,
    identify,
    is_text,
    new_id,
)
from mpic.library.intake.decode import decode_image, read_pages
from mpic.library.intake.receive import Arriving, receive
from mpic.library.intake.remembered import TokenCache
from mpic.library.part import LibraryPart, Storage
from mpic.library.records import (
    SHARED,
    AsyncReader,
    Change,
    Reference,
    ReferencePage,
    Removed,
    Scalar,
    Tokenize,
)

REFERENCE_ID = re.compile(r"ref_[A-Za-z0-9_.-]{1,124}")
TITLE_CHARS, DESCRIPTION_CHARS = 255, 4096

SMALL = 1 << 20
"""An original of at most so many bytes is synced within the transaction, together with its sidecar, which takes less
time in all; a larger one is synced before it."""

T = TypeVar("T")
Source = bytes | AsyncReader | Arriving
What = Literal["added", "replaced", "removed"]
Publish = Callable[[Sidecar], None]
"""Makes a version's original and this sidecar durable. It is called before the version is committed."""
Commit = Callable[[dict[str, Any], Publish], Reference]
"""Commits a version. Takes the fields that follow from its content, and how to publish it."""
log = logging.getLogger(__name__)


class ReferenceLibrary(LibraryPart):
    """References. Thread-safe. Methods block on the disk, except the async ones. The caller decides who may write.

    Attributes:
        tokenize: function from a text to its token ids in the served model.
        listeners: called after each committed change, on the thread that made it; their exceptions are logged.
        upload_bytes: most bytes of a version's content.
    """

    def __init__(self, storage: Storage, rows: ReferenceRows) -> None:
        super().__init__(storage)
        self.tokenize: Tokenize | None = None
        self.listeners: list[Callable[[Change], None]] = []
        self.upload_bytes = storage.limits.upload_bytes
        self._rows = rows
        self.set_state, self.pending, self.paths = rows.set_state, rows.pending, rows.paths
        self.synced_from = rows.synced_from
        self._tokens = TokenCache()
        # the versions of which a chunk is alive: a request holds the chunks of its prompt until it ends
        self._linked: defaultdict[tuple[str, int], WeakSet[Lease]] = defaultdict(WeakSet)
        self._lock = RLock()  # guards _linked; no chunk is made of a version while it is collected

    # Writing

    async def add(
        self,
        source: Source,
        filename: str,
        *,
        title: str,
        description: str = "",
        metadata: Mapping[str, Scalar] | None = None,
        id: str | None = None,
        expires_after: int | None = None,
        synced_from: str = "",
    ) -> Reference:
        """Store a reference; when this returns, the reference survives a crash. Its state is ``compiling``.

        Args:
            id: ``ref_`` and 1 to 124 letters, digits, ``_ . -``; None chooses one.
            expires_after: seconds until it expires; None: never.
            synced_from: the folder or listing from which a sync adds it.

        Raises:
            InvalidUpload, InvalidImage, InvalidText, TooLarge: the content is not accepted.
            ReferenceExists: another reference has this id.
            BadRequest: the id, title, description, metadata or lifetime is malformed.
            StorageFull: the disk is full; nothing was stored.
        """
        words = self._checked(filename, title, description, metadata or {})
        check_life("ttl", expires_after)
        name = new_id("ref_") if id is None else id
        if not REFERENCE_ID.fullmatch(name):
            raise BadRequest(
                f"an id is ref_ and 1 to 124 letters, digits, '_', '.' or '-', not {cut(name)!r}", param="id"
            )
        if await asyncio.to_thread(self._rows.get, name) is not None:
            raise ReferenceExists(f"there is a reference {cut(name)!r}; replace it", param="id")

        def commit(content: dict[str, Any], publish: Publish) -> Reference:
            now = content["updated_at"]
            end = None if expires_after is None else now + expires_after
            new = Reference(
                id=name,
                version=1,
                created_at=now,
                expires_at=end,
                synced_from=synced_from,
                **words,
                **content,
            )
            return self._rows.insert(new, publish)

        return await self._receive(name, source, commit, "added")

    async def replace(
        self,
        id: str,
        source: Source,
        filename: str | None = None,
        *,
        title: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        expires_after: int | None = None,
    ) -> Reference:
        """Store a new version; arguments that are None stay as they were, the time at which it expires, too. Prompts
        made from now on see only the new version.

        Raises:
            ReferenceNotFound: there is none, or it was removed meanwhile.
            MPICError: see ``add`` for the other errors.
        """
        await asyncio.to_thread(self.get, id)  # checked before anything is received
        check_life("ttl", expires_after)
        words = self._checked(filename, title, description, metadata)
        if expires_after is not None:
            words["expires_at"] = self._clock() + expires_after

        def commit(content: dict[str, Any], publish: Publish) -> Reference:
            # words that are missing come from the version that is replaced, which may have been made meanwhile
            make = lambda current: replace(current, **words, **content)
            committed = self._rows.replace(id, make, publish)
            if committed is None:
                raise ReferenceNotFound(f"no reference {cut(id)!r}", param="id", id=id)
            new, old = committed
            self._originals.remove_files([sidecar_of(old.path)])  # a recovery must not bring it back
            return new

        return await self._receive(id, source, commit, "replaced")

    def remove(self, id: str) -> Removed:
        """Remove a reference. It is invisible at once; its files go when no chunk of it is alive any more.

        Raises:
            ReferenceNotFound: there is none.
        """
        while True:  # repeated when it is replaced meanwhile
            if (removed := self._remove(self.get(id))) is not None:
                return removed

    def _remove(self, reference: Reference) -> Removed | None:
        """Remove a version that is the current one; None if it is not any more."""
        with self._store.lock, self._catalog.write() as db:
            if not self._rows.remove(db, reference):
                return None
            shared = self._rows.has_content(db, reference.key, retired=False)
        self._originals.remove_files([sidecar_of(reference.path)])  # the rest stays while a request links it
        self._notify("removed", reference)
        self._collect([reference])
        return Removed(reference, () if shared else (self._bare(reference),))

    def pin(self, id: str, pinned: bool = True) -> Reference:
        """Protect a reference's compiled chunk from eviction for newer references, or end that. Pins do not take more
        of the disk than the share that is guaranteed to references.

        Raises:
            ReferenceNotFound: there is none.
        """
        self._rows.set_column(id, "pinned", pinned)
        return self.get(id)

    def extend(self, id: str, expires_after: int | None) -> Reference:
        """Set a reference to expire in this many seconds from now (None: never).

        Raises:
            ReferenceNotFound: there is none, or it has expired.
            BadRequest: the number of seconds is not valid.
        """
        check_life("ttl", expires_after)
        self._rows.set_column(
            id, "expires_at", None if expires_after is None else self._clock() + expires_after
        )
        return self.get(id)

    def collect_expired(self) -> list[Removed]:
        """Remove references that have expired, which are invisible already. Call it periodically, and pass the result
        to ``Engine.forget``."""
        return [removed for one in self._rows.expired() if (removed := self._remove(one)) is not None]

    def collect_retired(self) -> list[Removed]:
        """Remove replaced and removed versions that nothing links any more. Call it periodically, and pass the result
        to ``Engine.forget``."""
        return self._collect(self._rows.retired())

    # Finding

    def get(self, id: str) -> Reference:
        """Return the current version. Raise ReferenceNotFound: there is none."""
        reference = self._rows.get(id)
        if reference is None:
            raise ReferenceNotFound(f"no reference {cut(id)!r}", param="id", id=id)
        return reference

    def many(self, ids: Iterable[str]) -> list[Reference]:
        """Return the current versions in the order of ``ids``; ids without a reference are left out."""
        ids = list(ids)
        found = self._rows.many(ids)
        return [found[id] for id in ids if id in found]

    def listing(
        self, after: str | None = None, limit: int = 10_000, order: str = "desc", kind: Kind | None = None
    ) -> ReferencePage:
        """List references by age, newest first (``order`` is ``asc | desc``).

        Args:
            after: id of the last reference of the previous page.

        Raises:
            ReferenceNotFound: the reference ``after`` is gone.
            BadRequest: the order or the limit is not valid.
        """
        check_page(order, limit)
        if after is not None:
            self.get(after)
        found = self._rows.listing(after, limit + 1, order, kind)
        return ReferencePage(found[:limit], len(found) > limit)

    def chunk(self, reference: Reference, tokenize: Tokenize | None = None) -> Chunk:
        """Return the content of this version as a chunk, labelled with its title. The version stays
        while the chunk or a copy of it is alive, replaced or not.

        Raises:
            ReferenceNotFound: the version has been replaced or removed, and nothing linked it.
            CorruptFile: the original is damaged or lost.
        """
        image = reference.kind == "image"
        ids = None if image else self._token_ids(reference, tokenize)
        load = partial(self.image, reference) if image else None
        lease = Lease()
        with self._lock:
            if not self._rows.exists(reference):
                raise _gone(reference)
            self._linked[reference.id, reference.version].add(lease)
        return Chunk(reference.key, SHARED, ids, load, reference.title, reference.id, lease=lease)

    def content(self, reference: Reference) -> bytes:
        """Return the original of this version, verified.

        Raises:
            ReferenceNotFound: the version is gone.
            CorruptFile: the original is damaged or lost.
        """
        return self._verified(reference, self._originals.read)

    def open(self, reference: Reference) -> OpenOriginal:
        """Open the original of this version, verified, to be read in pieces; the caller closes it. Raise as
        ``content``."""
        return self._verified(reference, self._originals.open)

    def text(self, reference: Reference) -> str:
        """Return the text of a text reference. Raise as ``content``."""
        if reference.kind != "text":
            raise ValueError(f"{reference.id} is an image")
        with self.open(reference) as original:
            text = "".join(read_pages(original.content(), self._limits, reference.format))
        if ChunkKey.of_text(text) != reference.key:
            raise CorruptFile(
                f"{reference.id} reads otherwise than when it was added: replace it by its file"
            )
        return text

    def image(self, reference: Reference) -> Image.Image:
        """Return the decoded RGB image of an image reference. Raise as ``content``."""
        with self.open(reference) as original:
            return decode_image(original.content(), self._limits)

    # Housekeeping

    def stats(self) -> dict[str, int]:
        """Return the number of references, the bytes of their originals, and the number of retired versions."""
        count, size = self._rows.totals()
        return {"references": count, "bytes": size, "retired": len(self._rows.retired())}

    def check(self) -> None:
        """Check that every row has its original. Raise IntegrityError: some are not there."""
        with self._store.lock:
            self._originals.check(self.paths, "originals of references")

    # Inside

    def _checked(
        self,
        filename: str | None,
        title: str | None,
        description: str | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> dict[str, Any]:
        """Check the arguments that are not None, and return them by name.

        Raises:
            BadRequest: an argument is malformed.
        """
        if title is not None and not (
            0 < len(title) <= TITLE_CHARS and title.isprintable() and title.strip()
        ):
            raise BadRequest(f"a title is 1 to {TITLE_CHARS} printable characters", param="title")
        if description is not None and len(description) > DESCRIPTION_CHARS:
            raise BadRequest(f"a description has at most {DESCRIPTION_CHARS} characters", param="description")
        if description is not None and not is_text(description):
            raise BadRequest("the description contains half of a surrogate pair", param="description")
        words = {
            "title": title,
            "description": description,
            "metadata": None if metadata is None else check_metadata(metadata),
            "filename": None if filename is None else clean_name(filename, self._limits),
        }
        return {name: value for name, value in words.items() if value is not None}

    async def _receive(self, id: str, source: Source, commit: Commit, what: What) -> Reference:
        """Receive, check and commit a version. Listeners are notified even if the task is cancelled meanwhile."""
        accept = lambda incoming: self._accept(id, incoming, commit, what)
        return await receive(self._originals, self._limits.upload_bytes, source, accept)

    def _accept(self, id: str, incoming: Incoming, commit: Commit, what: What) -> Reference:
        key, format, _ = identify(incoming, self._limits)
        path = self._originals.path(SHARED, new_id(f"{id}@"))  # no two versions ever share a file
        content = {
            "kind": key.kind,
            "key": key,
            "bytes": incoming.bytes,
            "path": path,
            "sha256": incoming.sha256,
            "updated_at": self._clock(),
            "tokens": None,
            "state": "compiling",
            "error": None,
            "format": format,
        }
        if incoming.bytes > SMALL:
            incoming.seal()  # done before the transaction, for which other writers wait
        try:
            committed = commit(content, lambda sidecar: self._originals.publish([(incoming, path)], sidecar))
        except BaseException:
            self._originals.remove([path])
            raise
        self._notify(what, committed)
        return committed

    def _verified(self, reference: Reference, get: Callable[[Path, str], T]) -> T:
        try:
            return get(reference.path, reference.sha256)
        except FileNotFoundError as error:
            if not self._rows.exists(reference):
                raise _gone(reference) from error
            raise CorruptFile(f"the original of {reference.id} is lost") from error

    def _collect(self, retired: list[Reference]) -> list[Removed]:
        """Remove rows first, then files, so that a crash in between leaves only garbage."""
        if not retired:
            return []
        removed, rows = [], []
        with self._store.lock, self._lock:
            with self._catalog.write() as db:
                for reference in retired:
                    version = reference.id, reference.version
                    if self._linked.get(version) or not self._rows.collect(db, reference):
                        continue
                    self._linked.pop(version, None)
                    held = self._rows.has_content(db, reference.key, retired=True)
                    if not held:
                        rows += self._store.drop(db, SHARED, reference.key)
                    removed.append(Removed(reference, () if held else (self._bare(reference),)))
            self._store.erase(rows)
        for reference, _ in removed:
            self._tokens.drop(reference.path.name)
        self._originals.remove(reference.path for reference, _ in removed)
        return removed

    def _bare(self, reference: Reference) -> Chunk:
        """Return the chunk of a version without its content."""
        return Chunk(reference.key, SHARED, label=reference.title, file_id=reference.id)

    def _token_ids(self, reference: Reference, tokenize: Tokenize | None) -> tuple[int, ...]:
        tokenize = tokenize or self.tokenize
        if tokenize is None:
            raise RuntimeError("the library has no tokenizer; set ReferenceLibrary.tokenize")
        # the file's name, unlike id and version, is never used again
        return self._tokens.ids(reference.path.name, tokenize, lambda: self.text(reference))

    def _notify(self, what: What, reference: Reference) -> None:
        for listener in self.listeners:
            try:
                listener(Change(what, reference))
            except Exception:
                log.exception("a listener failed over %s of %s", what, reference.id)


class Lease:
    """Lives as long as the chunk that was made of a version, or a copy of it under another press."""


def _gone(reference: Reference) -> ReferenceNotFound:
    return ReferenceNotFound(
        f"version {reference.version} of {reference.id} is gone", param="id", id=reference.id
    )
