"""The resources of the API: files, caches, references, models, chat. Their methods are written once for both clients
(``calls``)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, ClassVar, Generic, Literal, TypeVar, Unpack, overload

from pydantic import BaseModel

from mpic.api.base import ItemPage
from mpic.api.requests import MOST_PARTS
from mpic.api.resources import CacheList, FileList, ModelList, ReferenceList
from mpic.client import endpoints, types
from mpic.client.calls import call, listed
from mpic.client.endpoints import ApiRequest, ChatOptions
from mpic.client.errors import ClientError
from mpic.client.io import AsyncIO, SyncIO, finish
from mpic.client.listing import PageRequest
from mpic.client.polling import WAIT, CompileWait
from mpic.client.sender import IO, Resource, Sender
from mpic.client.sources import Progress, Source
from mpic.client.stream import AsyncStream, Stream

M = TypeVar("M", bound=BaseModel)
C = TypeVar("C")
Order = Literal["asc", "desc"]
Seconds = int | EllipsisType | None
"""A lifetime; ``...`` leaves it unchanged."""
Messages = Sequence[Mapping[str, Any]] | str


class Collection(Resource[IO], Generic[IO, M]):
    """A resource whose items are uploaded and compiled."""

    _path: ClassVar[str]
    _model: ClassVar[type[BaseModel]]
    _page: ClassVar[type[ItemPage[Any]]]

    @listed
    def list(
        self, after: str | None = None, limit: int | None = None, order: Order | None = None
    ) -> tuple[PageRequest[M], str | None]:
        """List the items by age, newest first. ``limit`` is the length of a page."""
        return self._pages(limit=limit, order=order), after

    @call
    async def retrieve(self, id: str) -> M:
        """Return the current state of an item; for a reference, of its newest version."""
        request: ApiRequest[Any] = endpoints.get(self._model, self._path, id)
        return await self.sender.send(request)

    @call
    async def delete(self, id: str) -> types.Deleted:
        """Delete an item and everything compiled from it."""
        return await self.sender.send(endpoints.delete(self._path, id))

    @call
    async def wait(self, id: str, timeout: float = WAIT) -> M:
        """Wait until an item is compiled and return it.

        Raises:
            CompileFailed: the item cannot be compiled.
            TimedOut: the item is not compiled after ``timeout`` seconds.
        """
        wait, retrieve = CompileWait(timeout), type(self).retrieve
        while (pause := wait.pause(found := await retrieve(self, id))) is not None:
            await self.sender.io.sleep(pause)
        return found

    @call
    async def pin(self, id: str, pinned: bool = True) -> M:
        """Pin the compiled KV of an item, or unpin it: pinned KV stays even if it is unused for long or its owner's
        newer items need the room. Only administrators pin references."""
        request: ApiRequest[Any] = endpoints.update(self._path, self._model, id, pinned=pinned)
        return await self.sender.send(request)

    @call
    async def prefetch(self, id: str) -> M:
        """Bring the compiled KV of an item closer to the device in the background, ahead of questions that are about to
        come. KV that has expired or was evicted is compiled again."""
        request: ApiRequest[Any] = endpoints.prefetch(self._path, self._model, id)
        return await self.sender.send(request)

    async def _create(self, request: ApiRequest[M], wait: bool | float) -> M:
        made: Any = await self.sender.send(request)
        if not wait:
            return made
        done: Any = await Collection.wait(self, made.id, WAIT if wait is True else wait)
        return endpoints.with_outcome(done, made)

    def _pages(self, **params: Any) -> PageRequest[M]:
        def page_after(after: str | None) -> ApiRequest[ItemPage[M]]:
            return endpoints.get(self._page, self._path, after=after, **params)

        return page_after


class Files(Collection[IO, types.File]):
    """Uploaded images, clips and documents."""

    _path, _model, _page = "files", types.File, FileList

    @call
    async def create(
        self,
        file: Source,
        handle: str | None = None,
        *,
        ttl: int | None = None,
        replace: bool = False,
        split: Mapping[str, Any] | str | None = None,
        press: str | None = None,
        purpose: str = "user_data",
        wait: bool | float = False,
        progress: Progress | None = None,
        expires_in: int | None = None,
        kv_ttl: int | None = None,
    ) -> types.File:
        """Upload a file; it is streamed from the disk and compiled by the server in the background.

        Uploading the same bytes under the same handle again makes no second file: the ``outcome`` is then ``unchanged``
        (else ``created`` or ``replaced``), and only the lifetime starts again.

        Args:
            file: a path, bytes, a binary file, or (name, bytes or binary file).
            handle: NAME for ``IMAGE#NAME`` or ``FILE#NAME`` in prompts.
            ttl: seconds until it expires and is deleted; None: as the server is configured, which is never by default.
            replace: if another file has the handle, take it over and delete that file.
            split: the way a document is cut into chunks: ``auto`` (the default: cut if it is too long for one),
                ``none``, ``fixed``, ``sentence``, ``paragraph``, ``section``, or ``{"mode", "tokens", "overlap"}``.
            press: name of the press that compresses it, such as ``snapkv-50``; ``none``: no compression; None: the
                server's default.
            wait: True waits until it is compiled; a number is the maximum number of seconds to wait.
            progress: called with (bytes sent, total bytes); the bytes of the form around the file are not counted.
            expires_in: the older name of ``ttl``.
            kv_ttl: seconds for which its compiled KV is kept unused. The original stays, and the next use compiles it
                again. None: as the server is configured.

        Raises:
            HandleTaken: another file has this handle, and ``replace`` is False.
            InvalidUpload, TooLarge, StorageFull, ...: the server refuses the upload.
            CompileFailed, TimedOut: see ``wait``; only raised if that is set.
        """
        upload = self.sender.sources.upload(file, progress)
        life = endpoints.one_of_two("ttl", ttl, "expires_in", expires_in)
        request = endpoints.file_create(upload, handle, life, replace, split, press, purpose, kv_ttl)
        return await self._create(request, wait)

    @call
    async def put(
        self,
        handle: str,
        file: Source,
        *,
        ttl: int | None = None,
        replace: bool = True,
        split: Mapping[str, Any] | str | None = None,
        press: str | None = None,
        purpose: str = "user_data",
        wait: bool | float = False,
        progress: Progress | None = None,
        kv_ttl: int | None = None,
    ) -> types.File:
        """Upload a file under a handle, in place of the file that has it. The arguments are those of ``create``; the
        file is the whole body of the request, and an event loop does not wait while the disk is read.

        Args:
            replace: False: raise ``HandleTaken`` if another file has the handle, instead of replacing that file.
            progress: called with (bytes sent, total bytes), for ``AsyncMPIC`` on a thread.
        """
        upload = dataclasses.replace(self.sender.sources.upload(file, progress), field=None)
        request = endpoints.file_put(handle, upload, ttl, replace, split, press, purpose, kv_ttl)
        return await self._create(request, wait)

    @call
    async def content(self, id: str) -> bytes:
        """Return the bytes of the original."""
        return await self.sender.send(endpoints.content("files", id))

    @call
    async def update(self, id: str, ttl: Seconds = ..., *, kv_ttl: Seconds = ...) -> types.File:
        """Change the lifetimes of a file; a lifetime that is left out stays as it is.

        Args:
            ttl: seconds until it expires, from now; None: never.
            kv_ttl: seconds for which its compiled KV is kept unused; None: as the server is configured.
        """
        return await self.sender.send(endpoints.update("files", types.File, id, ttl=ttl, kv_ttl=kv_ttl))

    @call
    async def rename(self, id: str, handle: str | None) -> types.File:
        """Change the handle of a file, or remove it (None). Nothing is compiled again."""
        return await self.sender.send(endpoints.update("files", types.File, id, handle=handle))


class UploadsInParts(Resource[IO]):
    """Files that are sent in parts, so that only a lost part has to be sent again."""

    @call
    async def create(
        self,
        filename: str,
        bytes: int,
        handle: str | None = None,
        *,
        ttl: int | None = None,
        replace: bool = False,
        split: Mapping[str, Any] | str | None = None,
        press: str | None = None,
        purpose: str = "user_data",
        kv_ttl: int | None = None,
    ) -> types.Upload:
        """Begin an upload of a file of ``bytes`` bytes. The server waits an hour for each next part.

        Args:
            filename: its name, for display only.
            handle, ttl, replace, split, press, kv_ttl: see ``files.create``.
        """
        request = endpoints.upload_create(
            filename, bytes, handle, ttl, replace, split, press, purpose, kv_ttl
        )
        return await self.sender.send(request)

    @call
    async def retrieve(self, id: str) -> types.Upload:
        """Return the state of an upload, with the parts that the server has."""
        return await self.sender.send(endpoints.get(types.Upload, "uploads", id))

    @call
    async def add_part(self, id: str, data: Source, *, progress: Progress | None = None) -> types.UploadPart:
        """Add a part. Parts may be sent in any order and at the same time."""
        part = dataclasses.replace(self.sender.sources.upload(data, progress), name="part", field="data")
        return await self.sender.send(endpoints.upload_add_part(id, part))

    @call
    async def complete(self, id: str, part_ids: Sequence[str], md5: str | None = None) -> types.Upload:
        """Assemble these parts into the file, in this order; the result has it as ``file``.

        Args:
            md5: MD5 of the whole file, in hexadecimal; None skips the check.
        """
        return await self.sender.send(endpoints.upload_complete(id, part_ids, md5))

    @call
    async def cancel(self, id: str) -> types.Upload:
        """End an upload and remove its parts."""
        return await self.sender.send(endpoints.upload_cancel(id))

    @call
    async def send(
        self,
        id: str,
        file: Source,
        *,
        part_bytes: int = 8 << 20,
        wait: bool | float = False,
        progress: Progress | None = None,
    ) -> types.File:
        """Send a file, part by part, to an upload that was begun, and complete it. One part is in memory at a time.
        Called again after it was interrupted, with the same ``part_bytes``, it sends only the parts that the server
        does not have.

        Args:
            file: see ``files.create``.
            wait: see ``files.create``.
            progress: called with (bytes sent, total bytes) after each part.

        Raises:
            ClientError: the size of the file differs from the one announced when the upload was begun.
            ChecksumMismatch: the server has received different bytes.
        """
        if part_bytes < 1:
            raise ValueError("a part has one byte at least")
        done = await UploadsInParts.retrieve(self, id)
        if done.file is None:  # otherwise it was completed, and the answer was lost
            source, ids, whole = self.sender.sources.upload(file), [], hashlib.md5(usedforsecurity=False)
            held = {(part.sha256, part.bytes): part.id for part in done.parts}
            part_bytes = max(part_bytes, math.ceil(done.bytes / MOST_PARTS))
            with source.read() as content:
                if content.size is not None and content.size > done.bytes:
                    raise ClientError(
                        f"the file has {content.size:,} bytes, and the upload was to have {done.bytes:,}"
                    )
                for start in range(0, done.bytes, part_bytes):
                    size = min(part_bytes, done.bytes - start)
                    piece, digest = await self.sender.io.open(_next_part, content, size, start, whole)
                    part = held.pop((digest, size), None)
                    ids.append(part or (await UploadsInParts.add_part(self, id, piece)).id)
                    if progress is not None:
                        progress(start + size, done.bytes)
            done = await UploadsInParts.complete(self, id, ids, whole.hexdigest())
        made: Any = done.file
        if not wait:
            return made
        patience = WAIT if wait is True else wait
        return endpoints.with_outcome(await Files.wait(Files(self.sender), made.id, patience), made)


def _next_part(content: Any, size: int, start: int, whole: Any) -> tuple[bytes, str]:
    """Read and hash the next part of a file, and return it with its SHA-256."""
    pieces: list[bytes] = []
    while (left := size - sum(map(len, pieces))) and (piece := content.read(left)):
        pieces.append(piece)
    part = b"".join(pieces)
    if len(part) < size:
        raise ClientError(f"the file ended after {start + len(part):,} bytes, before all was sent")
    whole.update(part)
    return part, hashlib.sha256(part).hexdigest()


class Caches(Collection[IO, types.Cache]):
    """Explicit context caches: texts that are cut into chunks and compiled, and linked by id in any order."""

    _path, _model, _page = "caches", types.Cache, CacheList

    @call
    async def create(
        self,
        text: str | None = None,
        *,
        chunks: Sequence[str] | None = None,
        split: Mapping[str, Any] | str | None = None,
        name: str | None = None,
        ttl: int | None = None,
        wait: bool | float = False,
    ) -> types.Cache:
        """Cache ``text``, cut according to ``split``, or ``chunks`` as they are.

        Args:
            split: ``fixed``, ``sentence``, ``paragraph``, ``section``, or ``{"mode", "tokens", "overlap"}``.
            ttl: seconds until it expires; None: as the server is configured, which is never by default.
            wait: see ``files.create``.
        """
        return await self._create(endpoints.cache_create(text, chunks, split, name, ttl), wait)

    @call
    async def retrieve(self, id: str) -> types.Cache | types.CacheChunk:
        """Return a cache (``group-...``) or one of its chunks (``cache-...``)."""
        return await self.sender.send(endpoints.cache_retrieve(id))

    @call
    async def update(self, id: str, ttl: Seconds = ..., *, kv_ttl: Seconds = ...) -> types.Cache:
        """Change the lifetimes of a cache and its chunks; see ``files.update``."""
        return await self.sender.send(endpoints.update("caches", types.Cache, id, ttl=ttl, kv_ttl=kv_ttl))


class References(Collection[IO, types.Reference]):
    """The reference library, which every user can search and administrators can change."""

    _path, _model, _page = "references", types.Reference, ReferenceList

    @call
    async def create(
        self,
        file: Source,
        title: str | None = None,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        id: str | None = None,
        ttl: int | None = None,
        wait: bool | float = False,
        progress: Progress | None = None,
    ) -> types.Reference:
        """Add an image or a text. ``file``, ``wait`` and ``progress`` are as in ``files.create``; without ``ttl`` it
        never expires."""
        upload = self.sender.sources.upload(file, progress)
        request = endpoints.reference_write(id, upload, title, description, metadata, replace=False, ttl=ttl)
        return await self._create(request, wait)

    @call
    async def replace(
        self,
        id: str,
        file: Source,
        title: str | None = None,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl: int | None = None,
        wait: bool | float = False,
        progress: Progress | None = None,
    ) -> types.Reference:
        """Replace a reference by a new version; arguments that are left out keep their values."""
        upload = self.sender.sources.upload(file, progress)
        request = endpoints.reference_write(id, upload, title, description, metadata, replace=True, ttl=ttl)
        return await self._create(request, wait)

    @listed
    def list(
        self,
        after: str | None = None,
        limit: int | None = None,
        order: Order | None = None,
        kind: Literal["image", "text"] | None = None,
    ) -> tuple[PageRequest[types.Reference], str | None]:
        """List the references by age, newest first. ``limit`` is the length of a page."""
        return self._pages(limit=limit, order=order, kind=kind), after

    @call
    async def content(self, id: str) -> bytes:
        """Return the bytes of the original."""
        return await self.sender.send(endpoints.content("references", id))

    @call
    async def search(
        self,
        query: str | None = None,
        *,
        image: str | Path | None = None,
        top_k: int | None = None,
        min_score: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> tuple[types.ReferenceHit, ...]:
        """Return the references most similar to a text, an image, or both, best first.

        Args:
            image: a path, or a data URL.
            filter: for each metadata key a value, a list of values, or comparisons (``{"year": {"gte": 2020}}``).
        """
        url = await self.sender.io.open(self.sender.sources.image, image)
        request = endpoints.reference_search(query, url, top_k, min_score, filter)
        return (await self.sender.send(request)).data

    @call
    async def index(self) -> types.ReferenceIndex:
        """Return the number of references that can be found and of those still to be embedded. For administrators."""
        return await self.sender.send(endpoints.reference_index())

    @call
    async def reindex(self) -> types.ReferenceIndex:
        """Embed references without a vector in the background; ``index`` reports the progress."""
        return await self.sender.send(endpoints.reference_index(start=True))

    @call
    async def update(self, id: str, ttl: int | None) -> types.Reference:
        """Let a reference expire ``ttl`` seconds from now; None: never."""
        return await self.sender.send(endpoints.update("references", types.Reference, id, ttl=ttl))

    @call
    async def sync(self, start: bool = False) -> types.ReferenceSync:
        """Return the outcome of the last sync with the server's folder; ``start`` begins one now, in the background.
        For administrators."""
        return await self.sender.send(endpoints.reference_sync(start))


class Models(Resource[IO]):
    """The served model."""

    @call
    async def list(self) -> tuple[types.Model, ...]:
        """Return the served model, as the only one of a list."""
        return (await self.sender.send(endpoints.get(ModelList, "models"))).data

    @call
    async def retrieve(self, id: str) -> types.Model:
        """Return the served model.

        Raises:
            ModelNotFound: another model is served.
        """
        return await self.sender.send(endpoints.model(id))


class Chat(Generic[C]):
    """The parent of ``completions``, as in OpenAI's SDK."""

    def __init__(self, completions: C) -> None:
        self.completions = completions


class Completions(Resource[SyncIO]):
    """Chat completions."""

    @overload
    def create(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> types.ChatCompletion: ...

    @overload
    def create(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Stream: ...

    def create(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> types.ChatCompletion | Stream:
        """Answer a conversation.

        Args:
            messages: messages in OpenAI's format; a plain string is one message of the user.
            stream: returns the answer piece by piece; ``Stream.usage`` has the usage at the end. The chunk with
                the usage is among the chunks if ``stream_options`` asks for it.
            **options: see ``ChatOptions``.
        """
        return finish(_answer(self.sender, Stream, messages, stream, options))


class AsyncCompletions(Resource[AsyncIO]):
    """Chat completions."""

    @overload
    async def create(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> types.ChatCompletion: ...

    @overload
    async def create(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncStream: ...

    async def create(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> types.ChatCompletion | AsyncStream:
        """Answer a conversation; see ``Completions.create``."""
        return await _answer(self.sender, AsyncStream, messages, stream, options)


async def _answer(
    sender: Sender[Any],
    streamed: type[Stream | AsyncStream],
    messages: Messages,
    stream: bool,
    options: ChatOptions,
) -> Any:
    request = endpoints.chat(endpoints.conversation(messages), stream, options)
    if not stream:
        return await sender.send(request)
    response = await sender.stream(request)
    return streamed(response, keep_usage=options.get("stream_options") is not None)
