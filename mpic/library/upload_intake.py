"""Accepts uploads: an upload is received, checked, made durable, then committed. Uploading the same bytes under the
same handle again makes no second file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypedDict, Unpack, cast

from mpic.errors import BadRequest, CorruptFile, HandleTaken
from mpic.imaging.budget import on_behalf_of
from mpic.keys import KeyLimits
from mpic.kv.chunk import Chunk, ChunkKey, Kind
from mpic.library.catalog.file_rows import FileRows, handle_taken
from mpic.library.catalog.quotas import NO_KEY
from mpic.library.folder.originals import PIECE, Incoming, too_large
from mpic.library.folder.sidecars import Sidecar
from mpic.library.inline import InlineChunks
from mpic.library.intake.checks import (
    check_life,
    check_metadata,
    checked_handle,
    clean_name,
    identify,
    new_id,
)
from mpic.library.intake.receive import Arriving, receive
from mpic.library.part import Storage
from mpic.library.records import SHARED, AsyncReader, File, Removed, Scalar

log = logging.getLogger(__name__)
WHOLE_PAGES = {"mode": "none", "tokens": 512, "overlap": 0}
"""How a document is cut at its pages and nowhere else."""
Outcome = Literal["created", "unchanged", "replaced"]


class UploadOutcome(NamedTuple):
    """The outcome of an upload.

    Args:
        file: the user's file of these bytes.
        outcome: ``unchanged``: the user had it already under this handle; ``replaced``: it took over the handle.
        removed: the file that lost its handle and was deleted, if any; one that could not be is collected as expired.
        compile: True if it is to be compiled; an unchanged file only if it is not ready. Engines join a compile of the
            same content that is under way.
    """

    file: File
    outcome: Outcome
    removed: tuple[Removed, ...] = ()
    compile: bool = True


class UploadTerms(TypedDict, total=False):
    """The options of an upload.

    Args:
        expires_after: seconds until it expires; None: never.
        metadata: scalars to attach to it, see ``check_metadata``.
        replace: takes the handle from another file, which is deleted.
        split: the settings by which a document is cut into chunks, for ``cut``; None: it is one chunk.
        split_asked: True if the client has asked for ``split``, so that a file which is cut differently counts as
            different; False for a default.
        press: name of the press that compresses its chunks, or ``none``; None: the client did not say.
        key: limits of the API key that is used.
        kv_ttl: seconds for which its compiled chunks are kept unused; None: as the limits say.
    """

    expires_after: int | None
    metadata: Mapping[str, Scalar] | None
    replace: bool
    split: Mapping[str, Any] | None
    split_asked: bool
    press: str | None
    key: KeyLimits
    kv_ttl: int | None


class Wanted(NamedTuple):
    """The checked arguments of an upload; those that have the names of ``UploadTerms`` are described there."""

    owner: str
    filename: str
    handle: str | None
    metadata: dict[str, Scalar]
    split: dict[str, Any] | None
    expires_after: int | None = None
    replace: bool = False
    split_asked: bool = False
    press: str | None = None
    key: KeyLimits = NO_KEY
    kv_ttl: int | None = None


class UploadIntake(InlineChunks):
    """The part of ``UploadLibrary`` that accepts uploads."""

    def __init__(self, storage: Storage, rows: FileRows) -> None:
        super().__init__(storage)
        self._rows = rows

    def add(
        self,
        user: str,
        source: bytes | Path | BinaryIO | Iterable[bytes],
        filename: str,
        handle: str | None = None,
        **terms: Unpack[UploadTerms],
    ) -> File:
        """Store an upload; when this returns, the upload survives a crash. Its state is ``compiling``, unless the user
        has this file under this handle already: then that one is returned, see ``upload``.

        Args:
            handle: name for ``IMAGE#NAME`` and ``FILE#NAME``, unique per user ignoring case.

        Raises:
            InvalidUpload, InvalidImage, InvalidText, TooLarge: the content is not accepted.
            HandleTaken: the user has another file of this handle.
            StorageQuotaExceeded: a quota of the user or the key would be exceeded; see ``catalog.quotas``.
            BadRequest: the handle or the expiry is malformed.
            StorageFull: the disk is full; nothing was stored.
            LibraryGone, DatabaseBusy: nothing was stored; see ``Catalog.write``.
        """
        wanted = self.admit(user, 1, filename, handle, **terms)
        with self._originals.incoming(self._limits.upload_bytes) as incoming:
            for piece in _pieces(source):
                incoming.write(piece)
            return self._accept(wanted, incoming).file

    def arriving(self, param: str | None = "file") -> Arriving:
        """Return an upload of anybody, to which the bytes are written as they come in, for ``upload`` or for a
        reference. The caller closes it in the end.

        Args:
            param: the field of the request that it is in; None: it is the whole body.
        """
        return Arriving(self._originals, self._limits.upload_bytes, param)

    def admit(
        self,
        user: str,
        size: int,
        filename: str,
        handle: str | None = None,
        **terms: Unpack[UploadTerms],
    ) -> Wanted:
        """Make the checks of ``upload`` that are possible before a byte is read, of an upload that has ``size`` bytes
        at least. Raise as ``add``."""
        given: dict[str, Any] = {**terms}
        metadata, split = given.pop("metadata", None), given.pop("split", None)
        if not user or user == SHARED:
            raise ValueError(f"a file needs an owner, not {user!r}")
        if size > self._limits.upload_bytes:
            raise too_large(self._limits.upload_bytes)
        for name in ("expires_after", "kv_ttl"):
            check_life(name, given.get(name))
        metadata, handle = check_metadata(metadata or {}), checked_handle(handle)
        name = clean_name(filename, self._limits)
        wanted = Wanted(user, name, handle, metadata, dict(split) if split else None, **given)
        if wanted.replace and handle is None:
            raise BadRequest("replace needs the handle whose file is replaced", param="replace")
        if handle is None or self._rows.by_handle(user, handle) is None:
            self._rows.check_quota(user, size, key=wanted.key)
        return wanted

    async def upload(
        self,
        user: str,
        source: AsyncReader | Arriving,
        filename: str,
        handle: str | None = None,
        **terms: Unpack[UploadTerms],
    ) -> UploadOutcome:
        """Do the same as ``add`` on an event loop, which it never blocks (see ``receive``), and return the outcome.
        It is idempotent: uploading the same bytes under the same handle again only restarts the lifetime."""
        wanted = await asyncio.to_thread(self.admit, user, 1, filename, handle, **terms)
        accept = partial(self._accept, wanted)
        return await receive(self._originals, self._limits.upload_bytes, source, accept)

    def _accept(self, wanted: Wanted, incoming: Incoming) -> UploadOutcome:
        """Check the content, make the original durable, then commit its row."""
        now = self._clock()
        expires_at = None if wanted.expires_after is None else now + wanted.expires_after
        kept = self._unchanged(wanted, incoming, expires_at)
        if kept is not None:
            return kept
        file = self._describe(wanted, incoming, now, expires_at)
        # not one that another request has stored just now, whose answer names it
        may_replace = lambda old: (
            (wanted.replace and not _same(old, wanted, incoming))
            or (old.sha256 == file.sha256 and not self._intact(old))
        )
        self._originals.publish([(incoming, file.path)], Sidecar.of("file", self._rows.values(file)))
        try:
            old = self._rows.insert(file, may_replace, wanted.key)
        except BaseException as error:
            self._originals.remove([file.path])
            kept = self._unchanged(wanted, incoming, expires_at) if isinstance(error, HandleTaken) else None
            if kept is not None:  # another request has just uploaded the same file
                return kept
            raise
        if old is None:
            return UploadOutcome(file, "created")
        try:
            removed = tuple(self._remove([old], "expired"))
        except Exception:  # the upload is committed, so the client must not be told that it failed
            log.exception(
                "The replaced file %s could not be removed; it has expired and is collected later.", old.id
            )
            removed = ()
        return UploadOutcome(file, "replaced", removed)

    def _unchanged(
        self, wanted: Wanted, incoming: Incoming, expires_at: float | None
    ) -> UploadOutcome | None:
        """Set the new lifetime of the user's file of this handle, if it has these bytes and they can still be read.
        Raise HandleTaken if it has other bytes and may not be replaced."""
        old = self._rows.by_handle(wanted.owner, wanted.handle) if wanted.handle is not None else None
        if old is None:
            return None
        if not _same(old, wanted, incoming):
            if not wanted.replace:
                raise handle_taken(old.handle or "")
            return None
        if not self._intact(old):  # the upload replaces it
            return None
        self._rows.set_column(old.owner, old.id, "expires_at", expires_at)
        if wanted.kv_ttl is not None:
            self._rows.set_column(old.owner, old.id, "kv_ttl", wanted.kv_ttl)
        if old.state == "failed":  # compiling may succeed this time, especially if the file is cut now
            split = _split(wanted, old.kind, old.pages)
            if split != old.split:
                self._cut_anew(old, split, old.key, old.pages)
            self._rows.set_state(old.owner, old.id, "compiling", None, None)
        kept = self._rows.by_id(old.owner, old.id)  # None: it was deleted meanwhile
        # one that is compiling may have been left so by a request that failed after it was stored
        if kept is None:
            return None
        return UploadOutcome(kept, "unchanged", compile=kept.state != "ready")

    def _intact(self, file: File) -> bool:
        try:
            self._originals.open(file.path, file.sha256).close()  # verified a piece at a time
        except (CorruptFile, FileNotFoundError):
            return False
        return True

    def _describe(self, wanted: Wanted, incoming: Incoming, now: float, expires_at: float | None) -> File:
        """Return the record of an upload. Raise as ``identify``."""
        with on_behalf_of(wanted.owner):
            key, format, pages = identify(incoming, self._limits, self.no_clips)
        if wanted.split_asked and wanted.split and key.kind != "text":
            raise BadRequest(
                f"only documents can be cut; {'an image' if key.kind == 'image' else 'a clip'} is one chunk",
                param="split",
            )
        file_id = new_id("file-")
        return File(
            id=file_id,
            owner=wanted.owner,
            handle=wanted.handle,
            kind=key.kind,
            filename=wanted.filename,
            bytes=incoming.bytes,
            key=key,
            created_at=now,
            expires_at=expires_at,
            sha256=incoming.sha256,
            path=self._originals.path(wanted.owner, file_id),
            metadata=wanted.metadata,
            split=_split(wanted, key.kind, pages),
            press=wanted.press or "",
            format=format,
            pages=pages,
            kv_ttl=wanted.kv_ttl,
        )

    def _remove(self, files: list[File], state: str | None) -> list[Removed]:
        """Remove rows first, then files, so that a crash in between leaves only garbage."""
        removed, rows = [], []
        with self._store.lock:
            with self._catalog.write() as db:
                caches = self._rows.caches_of(db, files)
                for file in files:
                    keys = self._rows.keys_of(db, file)
                    if not self._rows.delete(db, file, expired=state == "expired"):
                        continue
                    keys = [key for key in keys if not self._rows.has_content(db, file.owner, key)]
                    for key in keys:
                        rows += self._store.drop(db, file.owner, key, state)
                    bare = partial(Chunk, owner=file.owner, label=file.label, file_id=file.id)
                    removed.append(Removed(file, tuple(map(bare, keys))))
                emptied = self._rows.settle_caches(db, caches)
            self._store.erase(rows)
        for file, _ in removed:
            self._tokens.drop(file.id)
        # removed first, because a recovery must not bring back a part of a cache
        self._originals.remove_files(emptied)
        self._originals.remove(file.path for file, _ in removed)
        return removed

    def _cut_anew(
        self, file: File, split: dict[str, Any] | None, content: ChunkKey, pages: int | None
    ) -> None:
        """Set what the text of a document is and how it is to be cut, and remove the compiled chunks of what it was:
        no deletion of the file would find them any more."""
        with self._store.lock:
            with self._catalog.write() as db:
                keys = self._rows.set_cut(db, file, split, content, pages)
                rows = [row for key in keys for row in self._store.drop(db, file.owner, key)]
            self._store.erase(rows)


def _same(old: File, wanted: Wanted, incoming: Incoming) -> bool:
    """Return whether a file is what an upload would make of its handle."""
    same = old.sha256 == incoming.sha256 and old.metadata == wanted.metadata
    return same and not _compiled_otherwise(old, wanted)


def _compiled_otherwise(old: File, wanted: Wanted) -> bool:
    """Return whether a file is cut or compressed differently from what the upload asks for. Settings that it does not
    ask for may differ."""
    if wanted.press is not None and wanted.press != old.press:
        return True
    return wanted.split_asked and _split(wanted, old.kind, old.pages) != old.split


def _split(wanted: Wanted, kind: Kind, pages: int | None) -> dict[str, Any] | None:
    """Return how a file is to be cut. A document that has pages is cut at least at these."""
    if kind != "text":
        return None
    return wanted.split or (None if pages is None else WHOLE_PAGES)


def _pieces(source: bytes | Path | BinaryIO | Iterable[bytes]) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
    elif isinstance(source, Path):
        with source.open("rb") as stream:
            yield from iter(partial(stream.read, PIECE), b"")
    elif hasattr(source, "read"):
        yield from iter(partial(cast(BinaryIO, source).read, PIECE), b"")
    else:
        yield from source
