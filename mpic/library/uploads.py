"""Uploads, the *static library* of the paper (MPIC, section 4.2): each file is found by its owner only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from mpic.errors import (
    BadRequest,
    CorruptFile,
    FileNotFound,
    MPICError,
    NoPages,
    PageNotFound,
    UnknownHandle,
    cut,
)
from mpic.imaging.stored_file import FileBytes
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library.catalog.file_rows import DocumentPiece, FileRows
from mpic.library.folder.originals import OpenOriginal
from mpic.library.intake.checks import check_life, check_page, checked_handle
from mpic.library.intake.decode import decode_clip, decode_image, read_pages
from mpic.library.part import Storage
from mpic.library.records import File, FilePage, Removed, Tokenize
from mpic.library.upload_intake import UploadIntake

log = logging.getLogger(__name__)
T = TypeVar("T")
Cut = Callable[[str, Mapping[str, Any]], Iterable[tuple[int, int]]]


MOST_CHUNKS = 1024
"""Most chunks of a document or a cache."""


class _ReadOtherwise(Exception):
    """Another version of a parser than the one at the upload reads another text in a document."""

    def __init__(self, pages: list[str]) -> None:
        super().__init__("the document reads otherwise than when it was uploaded")
        self.pages = pages


class UploadLibrary(UploadIntake):
    """Uploads of all users. Thread-safe. Methods block on the disk, except the async ones.

    Attributes:
        cut: text, how it is to be cut -> characters ``[start, end)`` of its pieces; must be set before the first
            document that is to be cut is used.
    """

    def __init__(self, storage: Storage, rows: FileRows) -> None:
        super().__init__(storage, rows)
        self.cut: Cut | None = None
        self.set_state, self.pending, self.paths = rows.set_state, rows.pending, rows.paths
        self.counts = rows.counts

    # Finding

    def get(self, user: str, file_id: str) -> File:
        """Return the user's file of this id.

        Raises:
            FileNotFound: there is no such file, it has expired, or it belongs to another user.
        """
        file = self._rows.by_id(user, file_id)
        if file is None:
            raise FileNotFound(f"no file {cut(file_id)!r}", param="file_id", id=file_id)
        return file

    def check_exist(self, user: str, ids: Iterable[str]) -> None:
        """Raise FileNotFound if one of some files that the user had a moment ago is gone."""
        if gone := self._rows.missing(user, ids):
            raise FileNotFound(
                f"file {gone[0]!r} was deleted or replaced while it was asked about", id=gone[0]
            )

    def by_handle(self, user: str, handle: str) -> File:
        """Return the user's file of this handle, ignoring case.

        Raises:
            UnknownHandle: there is none, or it has expired.
        """
        file = self._rows.by_handle(user, handle)
        if file is None:
            raise UnknownHandle(f"no file with the handle {cut(handle)!r}", handle=handle)
        return file

    def page(
        self,
        user: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
        kinds: Sequence[str] | None = None,
    ) -> FilePage:
        """List the user's files by age, newest first (``order`` is ``asc | desc``).

        Args:
            after: id of the last file of the previous page.
            kinds: only these; None: all.

        Raises:
            FileNotFound: the file ``after`` is gone.
            BadRequest: the order or the limit is not valid.
        """
        check_page(order, limit)
        if after is not None:
            self.get(user, after)
        files = self._rows.listing(user, after, limit + 1, order, kinds)
        return FilePage(files[:limit], len(files) > limit)

    def content(self, user: str, file_id: str) -> bytes:
        """Return the original bytes, verified.

        Raises:
            FileNotFound: see ``get``.
            CorruptFile: the original is damaged or lost.
        """
        return self._verified(self.get(user, file_id), self._originals.read)

    def open(self, user: str, file_id: str) -> OpenOriginal:
        """Open the original, verified, to be read in pieces; the caller closes it. Raise as ``content``."""
        return self._verified(self.get(user, file_id), self._originals.open)

    def chunk(self, user: str, file: File | str, tokenize: Tokenize | None = None) -> Chunk:
        """Return the file's content as a chunk, for prompts.

        An image or a clip is decoded again from the original when ``load_image`` or ``load_clip`` is called. A text is
        tokenized here, and its token ids are kept for the next link.

        Raises:
            FileNotFound: see ``get``.
            CorruptFile: the original is damaged or lost.
        """
        if isinstance(file, str) or file.owner != user:
            file = self.get(user, file if isinstance(file, str) else file.id)
        make = partial(Chunk, file.key, user, label=file.label, file_id=file.id, press=file.press)
        if file.kind == "image":
            return make(load_image=lambda: self._decoded(file, partial(decode_image, limits=self._limits)))
        if file.kind == "video":
            decode = lambda sample: partial(decode_clip, sample=sample, limits=self._limits)
            return make(load_clip=lambda sample: self._decoded(file, decode(sample)))
        read = lambda: "".join(self._pages(file))
        return make(token_ids=self._tokens.ids(file.id, tokenize or self._tokenizer(), read))

    def chunks(self, user: str, file: File | str, pages: tuple[int, int] | None = None) -> list[Chunk]:
        """Return the file's content for prompts: one chunk, or the chunks into which a long document is cut, in order.
        It is cut when this is first called for it, which may take seconds.

        Args:
            pages: the first and the last of the pages that are wanted, from 1; None: all of the file.

        Raises:
            The errors of ``chunk``.
            NoPages: the file has none.
            PageNotFound: it has none of these numbers.
            BadRequest: it would have too many pieces.
        """
        if isinstance(file, str) or file.owner != user:
            file = self.get(user, file if isinstance(file, str) else file.id)
        try:
            return self._chunks(user, file, pages)
        except _ReadOtherwise as other:
            content = ChunkKey.of_text("".join(other.pages))
            self._cut_anew(file, file.split, content, len(other.pages) if file.pages else None)
        try:
            return self._chunks(user, self.get(user, file.id), pages)
        except _ReadOtherwise as error:
            raise CorruptFile(f"{file.label} reads otherwise every time") from error

    def _chunks(self, user: str, file: File, pages: tuple[int, int] | None) -> list[Chunk]:
        """Do the work of ``chunks``. Raise _ReadOtherwise, too."""
        if pages is not None:
            _check_pages(file, *pages)
        pieces = None
        while file.split is not None and pieces is None:
            pieces = self._rows.pieces(file.id) or self._rows.set_pieces(file, self._cut(file))
            if pieces is None:  # it is to be cut in another way now, or was deleted
                file = self.get(user, file.id)
        if pieces is None or (len(pieces) <= 1 and file.pages is None):
            return [self.chunk(user, file)]
        text = cache(lambda: "".join(self._pages(file)))
        found = []
        for number, (start, end, digest, page) in enumerate(pieces):
            if pages is not None and not pages[0] <= (page or 0) <= pages[1]:
                continue
            read = lambda start=start, end=end: text()[start:end]
            # by content, because a document that failed may be cut in another way while its id stays
            ids = self._tokens.ids(f"{file.id} {digest}", self._tokenizer(), read)
            name = f"{file.label} page {page}" if page else f"{file.label} {number + 1}/{len(pieces)}"
            key = ChunkKey("text", digest)
            found.append(Chunk(key, user, ids, label=name, file_id=file.id, press=file.press, page=page))
        return found

    def with_pieces(self, user: str, keys: Iterable[str]) -> dict[str, list[str]]:
        """Return which chunks are pieces of the user's documents that are cut: file id -> their keys, written as
        ``str(ChunkKey)`` like ``keys``."""
        texts = [key.removeprefix("text:") for key in keys if key.startswith("text:")]
        found = self._rows.with_pieces(user, texts)
        return {id: [f"text:{one}" for one in beginnings] for id, beginnings in found.items()}

    def borders(self, user: str, file_id: str) -> list[DocumentPiece]:
        """Return where the chunks of a document begin and end; none while it is not cut.

        Raises:
            FileNotFound: see ``get``.
        """
        return self._rows.pieces(self.get(user, file_id).id)

    def _cut(self, file: File) -> list[DocumentPiece]:
        if self.cut is None:
            raise RuntimeError("the library cannot cut texts; set UploadLibrary.cut")
        found, at = [], 0
        for number, text in enumerate(self._pages(file), 1):
            for start, end in self.cut(text, file.split or {}):
                digest = ChunkKey.of_text(text[start:end]).digest
                found.append(DocumentPiece(at + start, at + end, digest, number if file.pages else None))
            if len(found) > MOST_CHUNKS:
                raise BadRequest(
                    f"the document would be cut into more than {MOST_CHUNKS} chunks; larger ones (split.tokens) make "
                    "fewer",
                    limit=MOST_CHUNKS,
                )
            at += len(text)
        return found

    # Changing

    def extend(self, user: str, file_id: str, expires_after: int | None) -> File:
        """Set a file to expire in this many seconds from now (None: never).

        Raises:
            FileNotFound: see ``get``; also when it has expired meanwhile.
            BadRequest: the number of seconds is not valid.
        """
        check_life("expires_after", expires_after)
        at = None if expires_after is None else self._clock() + expires_after
        self._rows.set_column(user, file_id, "expires_at", at)
        return self.get(user, file_id)

    def rename(self, user: str, file_id: str, handle: str | None) -> File:
        """Change the handle of a file, or remove it (None). Its compiled chunk stays.

        Raises:
            FileNotFound: see ``get``; also when it has expired meanwhile.
            BadRequest: the handle is not valid.
            HandleTaken: another file of the user has it, ignoring case.
        """
        self.get(user, file_id)
        self._rows.set_handle(user, file_id, checked_handle(handle))
        return self.get(user, file_id)

    def pin(self, user: str, file_id: str, pinned: bool = True) -> File:
        """Protect a file's compiled chunk from eviction for the user's newer files, or end that. A pin does not take
        more of the disk than the user's share.

        Raises:
            FileNotFound: see ``get``.
        """
        self._rows.set_column(user, file_id, "pinned", pinned)
        return self.get(user, file_id)

    def keep_kv(self, user: str, file_id: str, seconds: int | None) -> File:
        """Keep a file's compiled chunks until they were not used for so many seconds; None: as the limits say. The
        original stays, and the next use compiles them again.

        Raises:
            FileNotFound: see ``get``.
            BadRequest: the number of seconds is not valid.
        """
        check_life("kv_ttl", seconds)
        self._rows.set_column(user, file_id, "kv_ttl", seconds)
        return self.get(user, file_id)

    def delete(self, user: str, file_id: str) -> Removed:
        """Delete a file. It is invisible at once; its original and, unless another file of the user holds the same
        content, its compiled chunks are removed from the disk.

        Raises:
            FileNotFound: see ``get``.
        """
        removed = self.delete_all([self.get(user, file_id)])
        if not removed:  # another request has just deleted it
            raise FileNotFound(f"no file {cut(file_id)!r}", param="file_id", id=file_id)
        return removed[0]

    def delete_all(self, files: list[File]) -> list[Removed]:
        """Delete several files at once, all or none. Files that are gone already are left out of the result."""
        return self._remove(files, None)

    def collect_expired(self) -> list[Removed]:
        """Remove expired files, which are invisible already; one user's at a time, so that what fails for one of them
        keeps nobody else's. Call it periodically.

        Raises:
            MPICError, OSError: some of them could not be removed, and nothing was.
        """
        removed: list[Removed] = []
        failed: MPICError | OSError | None = None
        expired = sorted(self._rows.expired(), key=attrgetter("owner"))
        for owner, files in groupby(expired, attrgetter("owner")):
            try:
                removed += self._remove(list(files), "expired")
            except (MPICError, OSError) as error:
                log.error(
                    "the expired files of %s could not be removed, and are tried again: %s", owner, error
                )
                failed = error
        if failed is not None and not removed:
            raise failed
        return removed

    def check(self) -> None:
        """Check that every row has its original. Raise IntegrityError: some are not there."""
        with self._store.lock:
            self._originals.check(self.paths, "originals")

    # Inside

    def _pages(self, file: File) -> list[str]:
        """Return the text of a file, by page. Raise _ReadOtherwise: it is not the one at the upload."""
        pages = self._decoded(file, partial(read_pages, limits=self._limits, format=file.format))
        if ChunkKey.of_text("".join(pages)) != file.key:
            raise _ReadOtherwise(pages)
        return pages

    def _decoded(self, file: File, decode: Callable[[FileBytes], T]) -> T:
        with self._verified(file, self._originals.open) as original:
            return decode(original.content())

    def _verified(self, file: File, get: Callable[[Path, str], T]) -> T:
        try:
            return get(file.path, file.sha256)
        except FileNotFoundError as error:
            self.get(file.owner, file.id)  # raises FileNotFound if it was deleted meanwhile
            raise CorruptFile(f"the original of {file.id} is lost") from error


def _check_pages(file: File, first: int, last: int) -> None:
    if file.pages is None:
        raise NoPages(f"{file.label} has no pages", handle=file.handle)
    if not 1 <= first <= last <= file.pages:
        raise PageNotFound(
            f"{file.label} has the pages 1 to {file.pages}", handle=file.handle, pages=file.pages
        )
