"""The static library: what a user uploaded, found by that user only."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import string
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from sqlite3 import Connection, Row
from typing import BinaryIO

from aiofiles.os import wrap
from PIL import Image

from mpic.durable import Files, read_all
from mpic.errors import BadRequest, CorruptFile, FileNotFound, HandleTaken, UnknownHandle
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library.catalog import Catalog
from mpic.library.decode import decode_image, decode_text, sniff
from mpic.library.incoming import Incoming
from mpic.library.limits import Limits
from mpic.library.records import AsyncReader, File, Page, Removed, State, TokenCache, Tokenize
from mpic.library.store.disk import DiskStore, owner_folder

HANDLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ID_ALPHABET = string.ascii_letters + string.digits
LONGEST_LIFE = 10 * 366 * 86_400
PIECE = 1 << 20

ALIVE = "owner = :owner AND (expires_at IS NULL OR expires_at > :now)"
"""The condition every lookup carries: the user's own, and not expired."""


class StaticLibrary:
    """Uploads of all users. Thread-safe. Methods block on the disk, except the async ones.

    Args:
        root: originals lie in ``files/<hash of owner>/<id>``, uploads in progress in ``tmp``.
        tokenize: text -> token ids of the served model; may be set later, before the first text is linked.
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
    ) -> None:
        self.root = root
        self.tokenize = tokenize
        self._catalog = catalog
        self._store = store
        self._limits = limits
        self._files = files or Files()
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
    ) -> File:
        """Store an upload; when this returns it survives a crash. Its state is ``compiling``.

        Args:
            handle: name for ``IMAGE#NAME`` and ``FILE#NAME``, unique per user ignoring case.
            expires_after: seconds until it expires; None: never.

        Raises:
            InvalidUpload, InvalidImage, InvalidText, TooLarge: what was sent is not accepted.
            HandleTaken: the user has another file of this handle.
            BadRequest: malformed handle or expiry.
            StorageFull: the disk is full; nothing was stored.
        """
        self._admit(user, handle, expires_after)
        with self._incoming() as incoming:
            for piece in _pieces(source):
                incoming.write(piece)
            return self._accept(incoming, user, filename, handle, expires_after)

    async def upload(
        self,
        user: str,
        source: AsyncReader,
        filename: str,
        handle: str | None = None,
        expires_after: int | None = None,
    ) -> File:
        """``add`` for an event loop, which it never blocks; ``source`` is read in pieces of 1 MiB.

        When the task is cancelled (the client went away) nothing is left behind.
        """
        await wrap(self._admit)(user, handle, expires_after)
        incoming = await wrap(self._incoming)()
        try:
            while piece := await source.read(PIECE):
                await wrap(incoming.write)(piece)
            return await wrap(self._accept)(incoming, user, filename, handle, expires_after)
        finally:  # not awaited, so that cancellation cannot prevent it
            asyncio.get_running_loop().run_in_executor(None, incoming.discard)

    # Finding

    def get(self, user: str, file_id: str) -> File:
        """The user's file of this id. Raises FileNotFound: none, expired, or another user's."""
        rows = self._select(user, "id = :id", id=file_id)
        if not rows:
            raise FileNotFound(f"no file {file_id!r}", param="file_id", id=file_id)
        return rows[0]

    def by_handle(self, user: str, handle: str) -> File:
        """The user's file of this handle, ignoring case. Raises UnknownHandle."""
        rows = self._select(user, "handle = :handle COLLATE NOCASE", handle=handle)
        if not rows:
            raise UnknownHandle(f"no file with the handle {handle!r}", handle=handle)
        return rows[0]

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
        where, values = ["TRUE"], {}
        if after is not None:
            self.get(user, after)
            where.append(f"seq {'>' if order == 'asc' else '<'} (SELECT seq FROM files WHERE id = :after)")
            values["after"] = after
        if kind is not None:
            where.append("kind = :kind")
            values["kind"] = kind
        tail = f"ORDER BY seq {order} LIMIT {limit + 1}"
        rows = self._select(user, " AND ".join(where), tail, **values)
        return Page(rows[:limit], len(rows) > limit)

    def content(self, user: str, file_id: str) -> bytes:
        """The original as uploaded, verified. Raises FileNotFound, CorruptFile."""
        return self._read(self.get(user, file_id))

    async def download(self, user: str, file_id: str) -> bytes:
        """``content`` for an event loop."""
        return await wrap(self.content)(user, file_id)

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
        tokenize = tokenize or self.tokenize
        if tokenize is None:
            raise RuntimeError("the library has no tokenizer; set StaticLibrary.tokenize")
        ids = self._tokens.get(file.id, tokenize)
        if ids is None:
            ids = tuple(tokenize(decode_text(self._read(file), self._limits)))
            self._tokens.put(file.id, tokenize, ids)
        return make(token_ids=ids)

    def inline_image(self, user: str, data: bytes, label: str | None = None) -> Chunk:
        """An image that came inside a request (data URL): checked like an upload, owned by the user, not a file.

        Raises:
            InvalidImage, TooLarge: as ``decode_image``.
        """
        image = decode_image(data, self._limits)
        return Chunk(ChunkKey.of_image(image), user, load_image=lambda: image, label=label)

    # Changing

    def set_state(
        self, user: str, file_id: str, state: State, tokens: int | None = None, error: str | None = None
    ) -> None:
        """Record what became of the compilation. A file that was deleted meanwhile is no error."""
        with self._catalog.write() as db:
            db.execute(
                "UPDATE files SET state = ?, tokens = COALESCE(?, tokens), error = ? WHERE owner = ? AND id = ?",
                (state, tokens, error, user, file_id),
            )

    def delete(self, user: str, file_id: str) -> Removed:
        """Delete a file: invisible at once, its original and (unless another file of the user holds the same content)
        its compiled chunks removed from the disk. Raises FileNotFound."""
        return self._remove([self.get(user, file_id)], None)[0]

    def collect_expired(self) -> list[Removed]:
        """Remove what has expired (it is invisible already). Call it now and then."""
        sql = "SELECT * FROM files WHERE expires_at <= ?"
        return self._remove([self._file(row) for row in self._catalog.read(sql, self._clock())], "expired")

    def pending(self) -> list[File]:
        """Files of all users that wait for compilation, oldest first; after a restart they are to be compiled."""
        sql = "SELECT * FROM files WHERE state = 'compiling' AND (expires_at IS NULL OR expires_at > ?) ORDER BY seq"
        return [self._file(row) for row in self._catalog.read(sql, self._clock())]

    def reconcile(self) -> dict[str, int]:
        """Make originals and rows agree, at start-up. Returns how many were ``lost`` and how many ``orphans``."""
        here = {str(p.relative_to(self.root)): p for p in self.root.glob("files/*/*")}
        rows = self._catalog.read("SELECT seq, path FROM files")
        lost = [(row["seq"],) for row in rows if here.pop(row["path"], None) is None]
        with self._catalog.write() as db:
            db.executemany(
                "UPDATE files SET state = 'failed', error = 'the original is lost' WHERE seq = ?", lost
            )
        garbage = [*here.values(), *self.root.glob("tmp/*")]
        for path in garbage:
            self._files.remove(path)
        return {"lost": len(lost), "orphans": len(garbage)}

    # Inside

    def _admit(self, user: str, handle: str | None, expires_after: int | None) -> None:
        """What can be refused before a byte is read."""
        if not user:
            raise ValueError("a file needs an owner")
        if expires_after is not None and not 0 < expires_after <= LONGEST_LIFE:
            raise BadRequest(
                f"expires_after must be 1 to {LONGEST_LIFE} seconds, not {expires_after}",
                param="expires_after",
            )
        if handle is None:
            return
        if not HANDLE.fullmatch(handle):
            raise BadRequest(
                f"a handle is 1 to 64 letters, digits, '_', '.' or '-', not {handle[:80]!r}", param="handle"
            )
        if self._select(user, "handle = :handle COLLATE NOCASE", handle=handle):
            raise _taken(handle)

    def _incoming(self) -> Incoming:
        return Incoming(self._files, self.root / "tmp", self._limits.upload_bytes)

    def _accept(
        self, incoming: Incoming, user: str, filename: str, handle: str | None, expires_after: int | None
    ) -> File:
        """Check the content, make the original durable, then commit its row."""
        data = incoming.content()
        if sniff(data[:32]) == "image":
            key = ChunkKey.of_image(decode_image(data, self._limits))
        else:
            key = ChunkKey.of_text(decode_text(data, self._limits))
        file_id = "file-" + "".join(secrets.choice(ID_ALPHABET) for _ in range(24))
        path = self.root / "files" / owner_folder(user) / file_id
        incoming.publish(path)
        now = self._clock()
        values = {
            "id": file_id,
            "owner": user,
            "handle": handle,
            "kind": key.kind,
            "filename": _clean(filename)[: self._limits.filename_chars] or "upload",
            "path": str(path.relative_to(self.root)),
            "bytes": incoming.bytes,
            "sha256": incoming.sha256,
            "digest": key.digest,
            "created_at": now,
            "expires_at": None if expires_after is None else now + expires_after,
            "state": "compiling",
        }
        columns, slots = ", ".join(values), ", ".join(f":{name}" for name in values)
        try:
            with self._catalog.write() as db:
                self._catalog.add_user(db, user, now)
                self._claim(db, user, handle, now)
                db.execute(f"INSERT INTO files ({columns}) VALUES ({slots})", values)
        except BaseException:
            self._files.remove(path)
            raise
        return self.get(user, file_id)

    def _claim(self, db: Connection, user: str, handle: str | None, now: float) -> None:
        """Within a transaction: free the handle if an expired file has it; HandleTaken if a living one has."""
        if handle is None:
            return
        where = "owner = ? AND handle = ? COLLATE NOCASE"
        db.execute(f"UPDATE files SET handle = NULL WHERE {where} AND expires_at <= ?", (user, handle, now))
        if db.execute(f"SELECT 1 FROM files WHERE {where}", (user, handle)).fetchone():
            raise _taken(handle)

    def _select(self, user: str, where: str, tail: str = "", **values: object) -> list[File]:
        sql = f"SELECT * FROM files WHERE {ALIVE} AND {where} {tail}"
        return [self._file(row) for row in self._catalog.read(sql, owner=user, now=self._clock(), **values)]

    def _file(self, row: Row) -> File:
        values = dict(row)
        key = ChunkKey(values["kind"], values.pop("digest"))
        path = self.root / values.pop("path")
        del values["seq"]
        return File(key=key, path=path, **values)

    def _remove(self, files: list[File], state: str | None) -> list[Removed]:
        """Rows first, then files, so that a crash in between leaves only garbage."""
        removed, rows = [], []
        with self._store.lock:
            with self._catalog.write() as db:
                for file in files:
                    if db.execute("DELETE FROM files WHERE id = ?", (file.id,)).rowcount == 0:
                        continue
                    same = "SELECT 1 FROM files WHERE owner = ? AND kind = ? AND digest = ?"
                    shared = db.execute(same, (file.owner, file.kind, file.key.digest)).fetchone()
                    if not shared:
                        rows += self._store.delete_rows(db, file.owner, file.key, state)
                    chunk = None if shared else Chunk(file.key, file.owner, label=file.label, file_id=file.id)
                    removed.append(Removed(file, chunk))
            self._store.erase(rows)
        for file, _ in removed:
            self._tokens.drop(file.id)
            self._files.remove(file.path)
        return removed

    def _load_image(self, file: File) -> Image.Image:
        return decode_image(self._read(file), self._limits)

    def _read(self, file: File) -> bytes:
        """The original, verified against its SHA-256."""
        try:
            fd = self._files.open(file.path)
        except FileNotFoundError as error:
            self.get(file.owner, file.id)  # deleted meanwhile: FileNotFound
            raise CorruptFile(f"the original of {file.id} is lost") from error
        try:
            data = bytearray(self._files.size(fd))
            read_all(self._files, fd, memoryview(data), 0)
        finally:
            self._files.close(fd)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise CorruptFile(f"the original of {file.id} is damaged")
        return bytes(data)


def _taken(handle: str) -> HandleTaken:
    return HandleTaken(f"you already have a file with the handle {handle!r}", param="handle", handle=handle)


def _clean(filename: str) -> str:
    return "".join(c for c in filename if c.isprintable())


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
