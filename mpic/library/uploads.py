"""Uploads, the *static library* of the paper (MPIC, section 4.2): each file is found by its owner only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from mpic.errors import CorruptFile, FileNotFound, InvalidText, UnknownHandle
from mpic.keys import KeyLimits
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library.catalog.database import Catalog
from mpic.library.catalog.file_rows import FileRows, Piece
from mpic.library.catalog.quotas import NO_KEY
from mpic.library.folder.originals import Originals
from mpic.library.intake.checks import check_handle, check_life, check_page
from mpic.library.intake.decode import decode_image, decode_text, image_key
from mpic.library.intake.image_keys import ImageKeys
from mpic.library.intake.tokens import TokenCache
from mpic.library.limits import Limits
from mpic.library.records import AsyncReader, File, FilePage, Removed, Scalar, State, Tokenize
from mpic.library.store import DiskStore, TieredStore
from mpic.library.upload_intake import Stored, UploadIntake

Cut = Callable[[str, Mapping[str, Any]], Iterable[tuple[int, int]]]


class UploadLibrary:
    """Uploads of all users. Thread-safe. Methods block on the disk, except the async ones.

    Attributes:
        tokenize: text -> token ids of the served model; must be set before the first text is linked.
        cut: text, how it is to be cut -> characters ``[start, end)`` of its pieces; must be set before the first
            document that is to be cut is used.
    """

    def __init__(
        self,
        catalog: Catalog,
        rows: FileRows,
        originals: Originals,
        store: DiskStore | TieredStore,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.tokenize: Tokenize | None = None
        self.cut: Cut | None = None
        self._catalog = catalog
        self._rows = rows
        self._originals = originals
        self._store = store
        self._limits = limits
        self._clock = clock
        self._tokens = TokenCache()
        self._image_keys = ImageKeys()
        self._intake = UploadIntake(rows, originals, limits, clock, self._remove)

    # Uploading

    def add(
        self,
        user: str,
        source: bytes | Path | BinaryIO | Iterable[bytes],
        filename: str,
        handle: str | None = None,
        expires_after: int | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        replace: bool = False,
        split: Mapping[str, Any] | None = None,
        split_asked: bool = False,
        key: KeyLimits = NO_KEY,
    ) -> File:
        """Stores an upload; when this returns, the upload survives a crash. Its state is ``compiling``, unless the user
        has this file under this handle already: then that one is returned, see ``upload``.

        Args:
            handle: name for ``IMAGE#NAME`` and ``FILE#NAME``, unique per user ignoring case.
            expires_after: seconds until it expires; None: never.
            metadata: scalars to attach to it, see ``check_metadata``.
            replace: takes the handle from another file, which is deleted.
            split: how a document is cut into chunks, for ``cut``; None: it is one chunk.
            split_asked: the client has said so, so a file that is cut otherwise is not the same; False for a default.
            key: limits of the API key that is used.

        Raises:
            InvalidUpload, InvalidImage, InvalidText, TooLarge: the content is not accepted.
            HandleTaken: the user has another file of this handle.
            StorageQuotaExceeded: the user or the key may not keep as much; see ``catalog.quotas``.
            BadRequest: malformed handle or expiry.
            StorageFull: the disk is full; nothing was stored.
            LibraryGone, DatabaseBusy: nothing was stored; see ``Catalog.write``.
        """
        wanted = self._intake.admit(
            user, filename, handle, expires_after, metadata, replace, split, split_asked, key
        )
        return self._intake.take(wanted, source).file

    async def upload(
        self,
        user: str,
        source: AsyncReader,
        filename: str,
        handle: str | None = None,
        expires_after: int | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        replace: bool = False,
        split: Mapping[str, Any] | None = None,
        split_asked: bool = False,
        key: KeyLimits = NO_KEY,
    ) -> Stored:
        """Does what ``add`` does on an event loop, which it never blocks (see ``receive``), and tells what became of
        the upload. It is idempotent: the same bytes under the same handle once more change nothing but the lifetime,
        which is counted anew."""
        arguments = (user, filename, handle, expires_after, metadata, replace, split, split_asked, key)
        wanted = await asyncio.to_thread(self._intake.admit, *arguments)
        return await self._intake.receive(wanted, source)

    # Finding

    def get(self, user: str, file_id: str) -> File:
        """Returns the user's file of this id.

        Raises:
            FileNotFound: there is none, it has expired, or it is another user's.
        """
        file = self._rows.by_id(user, file_id)
        if file is None:
            raise FileNotFound(f"no file {file_id!r}", param="file_id", id=file_id)
        return file

    def by_handle(self, user: str, handle: str) -> File:
        """Returns the user's file of this handle, ignoring case.

        Raises:
            UnknownHandle: there is none, or it has expired.
        """
        file = self._rows.by_handle(user, handle)
        if file is None:
            raise UnknownHandle(f"no file with the handle {handle!r}", handle=handle)
        return file

    def held(self, user: str, handle: str | None) -> File | None:
        """Returns the user's file of this handle, ignoring case, if there is one."""
        return self._rows.by_handle(user, handle) if handle else None

    def page(
        self,
        user: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
        kind: str | None = None,
    ) -> FilePage:
        """Lists the user's files by age, newest first (``order`` is ``asc | desc``).

        Args:
            after: id of the last file of the previous page.

        Raises:
            FileNotFound: the file ``after`` is gone.
            BadRequest: an impossible order or limit.
        """
        check_page(order, limit)
        if after is not None:
            self.get(user, after)
        files = self._rows.listing(user, after, limit + 1, order, kind)
        return FilePage(files[:limit], len(files) > limit)

    def content(self, user: str, file_id: str) -> bytes:
        """Returns the original as uploaded, verified.

        Raises:
            FileNotFound: as ``get``.
            CorruptFile: the original is damaged or lost.
        """
        return self._read(self.get(user, file_id))

    async def download(self, user: str, file_id: str) -> bytes:
        """Does what ``content`` does, on an event loop."""
        return await asyncio.to_thread(self.content, user, file_id)

    def chunk(self, user: str, file: File | str, tokenize: Tokenize | None = None) -> Chunk:
        """Returns the file's content as a prompt refers to it.

        An image is decoded again from the original when ``load_image`` is called. A text is tokenized here, and its
        token ids are kept for the next link.

        Raises:
            FileNotFound: as ``get``.
            CorruptFile: the original is damaged or lost.
        """
        if isinstance(file, str) or file.owner != user:
            file = self.get(user, file if isinstance(file, str) else file.id)
        make = partial(Chunk, file.key, user, label=file.label, file_id=file.id)
        if file.kind == "image":
            return make(load_image=partial(self._load_image, file))
        read = lambda: decode_text(self._read(file), self._limits)
        return make(token_ids=self._tokens.ids(file.id, tokenize or self._tokenizer(), read))

    def chunks(self, user: str, file: File | str) -> list[Chunk]:
        """Returns the file's content as a prompt refers to it: one chunk, or the chunks into which a long document is
        cut, in order. It is cut when this is first called for it, which may take seconds.

        Raises:
            As ``chunk``.
            BadRequest: it would have too many pieces.
        """
        if isinstance(file, str) or file.owner != user:
            file = self.get(user, file if isinstance(file, str) else file.id)
        if file.split is None:
            return [self.chunk(user, file)]
        pieces = self._rows.pieces(file.id) or self._rows.set_pieces(file.id, self._cut(file))
        if len(pieces) <= 1:
            return [self.chunk(user, file)]
        text = cache(lambda: decode_text(self._read(file), self._limits))
        found = []
        for number, (start, end, digest) in enumerate(pieces):
            read = lambda start=start, end=end: text()[start:end]
            ids = self._tokens.ids(f"{file.id} {number}", self._tokenizer(), read)
            name = f"{file.label} {number + 1}/{len(pieces)}"
            found.append(Chunk(ChunkKey("text", digest), user, ids, label=name, file_id=file.id))
        return found

    def counts(self, user: str, file_id: str | None = None) -> dict[str, int]:
        """Returns the number of chunks of the user's documents that are cut, by the file's id."""
        return self._rows.counts(user, file_id)

    def borders(self, user: str, file_id: str) -> list[Piece]:
        """Returns where the chunks of a document begin and end; none while it is not cut.

        Raises:
            FileNotFound: as ``get``.
        """
        return self._rows.pieces(self.get(user, file_id).id)

    def _cut(self, file: File) -> list[Piece]:
        if self.cut is None:
            raise RuntimeError("the library cannot cut texts; set UploadLibrary.cut")
        text = decode_text(self._read(file), self._limits)
        spans = self.cut(text, file.split or {})
        return [Piece(start, end, ChunkKey.of_text(text[start:end]).digest) for start, end in spans]

    def inline_image(self, user: str, data: bytes, label: str | None = None) -> Chunk:
        """Returns the chunk of an image that came inside a request (data URL). It is checked like an upload and owned
        by the user, but no file. The same bytes once more are not decoded again to find their chunk.

        Raises:
            InvalidImage, TooLarge, DecoderBusy: as ``image_key``.
        """
        load = partial(decode_image, data, self._limits)
        key = self._image_keys.key(user, data, partial(image_key, data, self._limits))
        return Chunk(key, user, load_image=load, label=label)

    def inline_text(self, user: str, text: str, label: str | None = None) -> Chunk:
        """Returns the chunk of a document that came inside a request. It is checked like an upload and owned by the
        user, but no file.

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
        """Records the outcome of compiling. A file that was deleted meanwhile is no error."""
        self._rows.set_state(user, file_id, state, tokens, error)

    def extend(self, user: str, file_id: str, expires_after: int | None) -> File:
        """Lets a file live for so many seconds from now (None: for ever).

        Raises:
            FileNotFound: as ``get``; also when it has expired meanwhile.
            BadRequest: an impossible number of seconds.
        """
        check_life("expires_after", expires_after)
        self._rows.set_expiry(user, file_id, None if expires_after is None else self._clock() + expires_after)
        return self.get(user, file_id)

    def rename(self, user: str, file_id: str, handle: str | None) -> File:
        """Gives a file another handle, or takes it away (None). Its compiled chunk stays.

        Raises:
            FileNotFound: as ``get``; also when it has expired meanwhile.
            BadRequest: an impossible handle.
            HandleTaken: another file of the user has it, ignoring case.
        """
        self.get(user, file_id)
        check_handle(handle)
        self._rows.set_handle(user, file_id, handle)
        return self.get(user, file_id)

    def pin(self, user: str, file_id: str, pinned: bool = True) -> File:
        """Protects a file's compiled chunk from eviction for the user's newer files, or ends that. A pin does not take
        more of the disk than the user's share.

        Raises:
            FileNotFound: as ``get``.
        """
        self._rows.set_pin(user, file_id, pinned)
        return self.get(user, file_id)

    def delete(self, user: str, file_id: str) -> Removed:
        """Deletes a file. It is invisible at once; its original and, unless another file of the user holds the same
        content, its compiled chunks are removed from the disk.

        Raises:
            FileNotFound: as ``get``.
        """
        removed = self.delete_all([self.get(user, file_id)])
        if not removed:  # somebody else has just deleted it
            raise FileNotFound(f"no file {file_id!r}", param="file_id", id=file_id)
        return removed[0]

    def delete_all(self, files: list[File]) -> list[Removed]:
        """Deletes several files at once, all or none. Files that are gone already are left out of the result."""
        return self._remove(files, None)

    def collect_expired(self) -> list[Removed]:
        """Removes expired files, which are invisible already. Call it now and then."""
        return self._remove(self._rows.expired(), "expired")

    def pending(self) -> list[File]:
        """Returns the files of all users that wait for compilation, oldest first."""
        return self._rows.pending()

    def paths(self) -> set[str]:
        """Returns the paths of all originals, relative to the library's root."""
        return self._rows.paths()

    def check(self) -> None:
        """Checks that every row has its original.

        Raises:
            IntegrityError: some are not there.
        """
        with self._store.lock:
            self._originals.check(self.paths(), "originals")

    # Inside

    def _remove(self, files: list[File], state: str | None) -> list[Removed]:
        """Removes rows first, then files, so that a crash in between leaves only garbage."""
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
        self._originals.remove_files(emptied)  # first: a recovery must not bring back a part of a cache
        self._originals.remove(file.path for file, _ in removed)
        return removed

    def _tokenizer(self) -> Tokenize:
        if self.tokenize is None:
            raise RuntimeError("the library has no tokenizer; set UploadLibrary.tokenize")
        return self.tokenize

    def _load_image(self, file: File) -> Image.Image:
        return decode_image(self._read(file), self._limits)

    def _read(self, file: File) -> bytes:
        try:
            return self._originals.read(file.path, file.sha256)
        except FileNotFoundError as error:
            self.get(file.owner, file.id)  # raises FileNotFound if it was deleted meanwhile
            raise CorruptFile(f"the original of {file.id} is lost") from error
