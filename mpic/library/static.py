"""The static library: what a user uploaded, found by that user only."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from mpic.durable import Files
from mpic.errors import BadRequest, CorruptFile, FileNotFound, IntegrityError, InvalidText, UnknownHandle
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library.catalog import Catalog
from mpic.library.decode import decode_image, decode_text, image_key
from mpic.library.intake import ACCEPTING, PIECE, check_life, check_metadata, clean_name, identify, new_id
from mpic.library.limits import Limits
from mpic.library.originals import Incoming, Originals
from mpic.library.records import (
    SHARED,
    AsyncReader,
    File,
    Page,
    Removed,
    Scalar,
    State,
    TokenCache,
    Tokenize,
)
from mpic.library.rows import FileRows, handle_taken
from mpic.library.sidecars import Sidecars, of_file
from mpic.library.store.disk import DiskStore

HANDLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StaticLibrary:
    """Uploads of all users. Thread-safe. Methods block on the disk, except the async ones.

    Args:
        root: of the library; see ``Originals`` for what lies where.
        tokenize: text -> token ids of the served model; may be set later, before the first text is linked.
        guard: raises when the library's folder is not there any more.
    """

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        store: DiskStore,
        limits: Limits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        tokenize: Tokenize | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root
        self.tokenize = tokenize
        self._catalog = catalog
        self._store = store
        self._limits = limits
        files = files or Files()
        self._rows = FileRows(catalog, root, limits, clock, Sidecars(root, files))
        self._originals = Originals(root, files, guard)
        self._clock = clock
        self._tokens = TokenCache()

    # Uploading

    def add(
        self,
        user: str,
        source: bytes | Path | BinaryIO | Iterable[bytes],
        filename: str,
        handle: str | None = None,
        expires_after: int | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> File:
        """Store an upload; when this returns it survives a crash. Its state is ``compiling``.

        Args:
            handle: name for ``IMAGE#NAME`` and ``FILE#NAME``, unique per user ignoring case.
            expires_after: seconds until it expires; None: never.
            metadata: what the user wants to remember of it, see ``check_metadata``.

        Raises:
            InvalidUpload, InvalidImage, InvalidText, TooLarge: what was sent is not accepted.
            HandleTaken: the user has another file of this handle.
            StorageQuotaExceeded: the user has too many files, or too large ones.
            BadRequest: malformed handle or expiry.
            StorageFull: the disk is full; nothing was stored.
            LibraryGone, DatabaseBusy: nothing was stored; see ``Catalog.write``.
        """
        metadata = self._admit(user, handle, expires_after, metadata)
        with self._originals.incoming(self._limits.upload_bytes) as incoming:
            for piece in _pieces(source):
                incoming.write(piece)
            return self._accept(incoming, user, filename, handle, expires_after, metadata)

    async def upload(
        self,
        user: str,
        source: AsyncReader,
        filename: str,
        handle: str | None = None,
        expires_after: int | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> File:
        """``add`` for an event loop, which it never blocks; ``source`` is read in pieces of 1 MiB.

        When the task is cancelled because the client went away, what had arrived is removed.
        """
        metadata = await asyncio.to_thread(self._admit, user, handle, expires_after, metadata)
        incoming = await asyncio.to_thread(self._originals.incoming, self._limits.upload_bytes)
        try:
            while piece := await source.read(PIECE):
                await asyncio.to_thread(incoming.write, piece)
            return await asyncio.get_running_loop().run_in_executor(
                ACCEPTING, self._accept, incoming, user, filename, handle, expires_after, metadata
            )
        finally:  # not awaited, so that cancellation cannot prevent it
            asyncio.get_running_loop().run_in_executor(None, incoming.discard)

    # Finding

    def get(self, user: str, file_id: str) -> File:
        """The user's file of this id. Raises FileNotFound: none, expired, or another user's."""
        file = self._rows.by_id(user, file_id)
        if file is None:
            raise FileNotFound(f"no file {file_id!r}", param="file_id", id=file_id)
        return file

    def by_handle(self, user: str, handle: str) -> File:
        """The user's file of this handle, ignoring case. Raises UnknownHandle."""
        file = self._rows.by_handle(user, handle)
        if file is None:
            raise UnknownHandle(f"no file with the handle {handle!r}", handle=handle)
        return file

    def page(
        self,
        user: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
        kind: str | None = None,
    ) -> Page:
        """The user's files by age, newest first (``order`` is ``asc | desc``).

        Args:
            after: id of the last file of the previous page. Raises FileNotFound when it is gone.
        """
        if order not in ("asc", "desc"):
            raise BadRequest(f"order is asc or desc, not {order!r}", param="order")
        if limit < 1:
            raise BadRequest(f"limit must be at least 1, not {limit}", param="limit")
        if after is not None:
            self.get(user, after)
        files = self._rows.listing(user, after, limit + 1, order, kind)
        return Page(files[:limit], len(files) > limit)

    def content(self, user: str, file_id: str) -> bytes:
        """The original as uploaded, verified. Raises FileNotFound, CorruptFile."""
        return self._read(self.get(user, file_id))

    async def download(self, user: str, file_id: str) -> bytes:
        """``content`` for an event loop."""
        return await asyncio.to_thread(self.content, user, file_id)

    def chunk(self, user: str, file: File | str, tokenize: Tokenize | None = None) -> Chunk:
        """The file's content as a prompt refers to it.

        An image is decoded again from the original when ``load_image`` is called; a text is tokenized here (and the
        ids are kept, so the second link does not).

        Raises:
            FileNotFound: not this user's, or expired.
            CorruptFile: the original is damaged.
        """
        if isinstance(file, str) or file.owner != user:
            file = self.get(user, file if isinstance(file, str) else file.id)
        make = partial(Chunk, file.key, user, label=file.label, file_id=file.id)
        if file.kind == "image":
            return make(load_image=partial(self._load_image, file))
        tokenize = tokenize or self._tokenizer()
        ids = self._tokens.get(file.id, tokenize)
        if ids is None:
            ids = tuple(tokenize(decode_text(self._read(file), self._limits)))
            self._tokens.put(file.id, tokenize, ids)
        return make(token_ids=ids)

    def inline_image(self, user: str, data: bytes, label: str | None = None) -> Chunk:
        """An image that came inside a request (data URL): checked like an upload, owned by the user, not a file.

        Raises:
            InvalidImage, TooLarge, DecoderBusy: as ``image_key``.
        """
        load = partial(decode_image, data, self._limits)
        return Chunk(image_key(data, self._limits), user, load_image=load, label=label)

    def inline_text(self, user: str, text: str, label: str | None = None) -> Chunk:
        """A document that came inside a request: checked like an upload, owned by the user, not a file.

        Raises:
            InvalidText, TooLarge: as ``decode_text``.
        """
        try:
            text = decode_text(text.encode(), self._limits)
        except UnicodeEncodeError as error:
            raise InvalidText("the text contains half of a surrogate pair") from error
        return Chunk(ChunkKey.of_text(text), user, token_ids=tuple(self._tokenizer()(text)), label=label)

    # Changing

    def set_state(
        self, user: str, file_id: str, state: State, tokens: int | None = None, error: str | None = None
    ) -> None:
        """Record what became of the compilation. A file that was deleted meanwhile is no error."""
        self._rows.set_state(user, file_id, state, tokens, error)

    def extend(self, user: str, file_id: str, expires_after: int | None) -> File:
        """Let a file live for so many seconds from now (None: for ever).

        Raises:
            FileNotFound: also when it has expired meanwhile.
            BadRequest: an impossible number of seconds.
        """
        check_life("expires_after", expires_after)
        self._rows.set_expiry(user, file_id, None if expires_after is None else self._clock() + expires_after)
        return self.get(user, file_id)

    def pin(self, user: str, file_id: str, pinned: bool = True) -> File:
        """Keep a file's compiled chunk from eviction in favour of the user's newer ones, or no longer. A pin does not
        take more of the disk than the user's share. Raises FileNotFound."""
        self._rows.set_pin(user, file_id, pinned)
        return self.get(user, file_id)

    def delete(self, user: str, file_id: str) -> Removed:
        """Delete a file: invisible at once, its original and (unless another file of the user holds the same content)
        its compiled chunks removed from the disk. Raises FileNotFound."""
        removed = self.delete_all([self.get(user, file_id)])
        if not removed:  # by someone else, just now
            raise FileNotFound(f"no file {file_id!r}", param="file_id", id=file_id)
        return removed[0]

    def delete_all(self, files: list[File]) -> list[Removed]:
        """``delete`` of several at once, all or none; those that are gone already are left out of the result."""
        return self._remove(files, None)

    def collect_expired(self) -> list[Removed]:
        """Remove what has expired (it is invisible already). Call it now and then."""
        return self._remove(self._rows.expired(), "expired")

    def pending(self) -> list[File]:
        """Files of all users that wait for compilation, oldest first; after a restart they are to be compiled."""
        return self._rows.pending()

    def paths(self) -> set[str]:
        """Where originals should lie, relative to the root."""
        return self._rows.paths()

    def mark_lost(self, lost: set[str], here: set[str]) -> None:
        """At start-up: files whose originals are gone have failed, until the originals are back."""
        self._rows.mark_lost(lost, here)

    def check(self) -> None:
        """Every row has its original. Raises IntegrityError."""
        with self._store.lock:
            gone = [path for path in self._rows.paths() if not (self.root / path).is_file()]
        if gone:
            raise IntegrityError(f"{len(gone)} originals are not there, the first is {gone[0]}")

    # Inside

    def _admit(
        self,
        user: str,
        handle: str | None,
        expires_after: int | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> dict[str, Scalar]:
        """What can be refused before a byte is read; the metadata, checked."""
        if not user or user == SHARED:
            raise ValueError(f"a file needs an owner, not {user!r}")
        check_life("expires_after", expires_after)
        self._rows.check_quota(user, 1)
        checked = check_metadata(metadata or {})
        if handle is None:
            return checked
        if not HANDLE.fullmatch(handle):
            raise BadRequest(
                f"a handle is 1 to 64 letters, digits, '_', '.' or '-', not {handle[:80]!r}", param="handle"
            )
        if self._rows.by_handle(user, handle) is not None:
            raise handle_taken(handle)
        return checked

    def _accept(
        self,
        incoming: Incoming,
        user: str,
        filename: str,
        handle: str | None,
        expires_after: int | None,
        metadata: dict[str, Scalar],
    ) -> File:
        """Check the content, make the original durable, then commit its row."""
        key = identify(incoming, self._limits)
        file_id = new_id("file-")
        path = self._originals.path(user, file_id)
        now = self._clock()
        file = File(
            id=file_id,
            owner=user,
            handle=handle,
            kind=key.kind,
            filename=clean_name(filename, self._limits),
            bytes=incoming.bytes,
            key=key,
            created_at=now,
            expires_at=None if expires_after is None else now + expires_after,
            tokens=None,
            state="compiling",
            error=None,
            sha256=incoming.sha256,
            path=path,
            metadata=metadata,
        )
        self._originals.publish([(incoming, path)], of_file(self._rows.values(file)))
        try:
            self._rows.insert(file)
        except BaseException:
            self._originals.remove([path])
            raise
        return file

    def _remove(self, files: list[File], state: str | None) -> list[Removed]:
        """Rows first, then files, so that a crash in between leaves only garbage."""
        removed, rows = [], []
        with self._store.lock:
            with self._catalog.write() as db:
                caches = self._rows.caches_of(db, files)
                for file in files:
                    if not self._rows.delete(db, file, expired=state == "expired"):
                        continue
                    shared = self._rows.has_content(db, file.owner, file.key)
                    if not shared:
                        rows += self._store.drop(db, file.owner, file.key, state)
                    chunk = None if shared else Chunk(file.key, file.owner, label=file.label, file_id=file.id)
                    removed.append(Removed(file, chunk))
                emptied = self._rows.settle_caches(db, caches)
            self._store.erase(rows)
        for file, _ in removed:
            self._tokens.drop(file.id)
        self._originals.remove_files(
            emptied
        )  # first, so that no lost catalogue comes back with a part of a cache
        self._originals.remove(file.path for file, _ in removed)
        return removed

    def _tokenizer(self) -> Tokenize:
        if self.tokenize is None:
            raise RuntimeError("the library has no tokenizer; set StaticLibrary.tokenize")
        return self.tokenize

    def _load_image(self, file: File) -> Image.Image:
        return decode_image(self._read(file), self._limits)

    def _read(self, file: File) -> bytes:
        try:
            return self._originals.read(file.path, file.sha256)
        except FileNotFoundError as error:
            self.get(file.owner, file.id)  # deleted meanwhile: FileNotFound
            raise CorruptFile(f"the original of {file.id} is lost") from error


def _pieces(source: bytes | Path | BinaryIO | Iterable[bytes]) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
    elif isinstance(source, Path):
        with source.open("rb") as stream:
            yield from iter(partial(stream.read, PIECE), b"")
    elif hasattr(source, "read"):
        yield from iter(partial(source.read, PIECE), b"")
    else:
        yield from source
