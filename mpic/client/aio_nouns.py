"""The nouns of the asynchronous client: as ``mpic.client.nouns``, with ``await``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

from mpic.client import base, calls, types
from mpic.client.calls import Call, ChatOptions, Page
from mpic.client.sources import Progress, Source
from mpic.client.stream import AsyncStream

if TYPE_CHECKING:
    from mpic.client.aio import AsyncMPIC

T = TypeVar("T")
WAIT = 600.0


class AsyncListing(Generic[T]):
    """A listing: awaited, it is its first page; ``async for`` goes through all of it."""

    def __init__(
        self, client: AsyncMPIC, follow: Callable[[str | None], Call[Page[T]]], after: str | None
    ) -> None:
        self._client = client
        self._follow = follow
        self._after = after

    def __await__(self) -> Generator[Any, None, Page[T]]:
        return self._client.send(self._follow(self._after)).__await__()

    async def __aiter__(self) -> AsyncIterator[T]:
        page: Page[T] | None = await self
        while page is not None:
            items = page.data
            # before its items are given away: who deletes them deletes the last one too
            page = await self._next(page)
            for item in items:
                yield item

    async def _next(self, page: Page[T]) -> Page[T] | None:
        if not page.has_more or page.last_id is None:
            return None
        return await self._client.send(self._follow(page.last_id))


class Resource:
    """One noun of the API."""

    def __init__(self, client: AsyncMPIC) -> None:
        self._client = client

    def _list(self, noun: str, model: type[T], after: str | None, **params: Any) -> AsyncListing[T]:
        def follow(after: str | None) -> Call[Page[T]]:
            return calls.listing(noun, model, after=after, **params)

        return AsyncListing(self._client, follow, after)

    async def _until_ready(self, look: Callable[[], Awaitable[T]], timeout: float) -> T:
        deadline = time.monotonic() + timeout
        for pause in base.pauses():
            thing = await look()
            what = base.name_of(thing)
            if base.settled(thing, what):
                return thing
            if time.monotonic() > deadline:
                raise base.too_slow(what, timeout)
            await asyncio.sleep(pause)
        raise AssertionError("pauses do not end")


class Files(Resource):
    """Uploaded images and documents."""

    async def create(
        self,
        file: Source,
        handle: str | None = None,
        *,
        expires_in: int | None = None,
        purpose: str = "user_data",
        wait: bool | float = False,
        progress: Progress | None = None,
    ) -> types.File:
        """Upload a file; it is streamed from the disk and compiled by the server in the background.

        Args:
            file: a path, bytes, a binary file, or (name, bytes or binary file).
            handle: NAME for ``IMAGE#NAME`` or ``FILE#NAME`` in prompts.
            expires_in: seconds after which it is deleted.
            wait: until it is compiled; a number is the most seconds to wait.
            progress: called with (bytes sent, bytes in all); the bytes of the form around the file are not counted.

        Raises:
            InvalidUpload, TooLarge, HandleTaken, StorageFull, ...: refused.
            CompileFailed, TimedOut: with ``wait``.
        """
        upload = self._client.sources.upload(file, progress)
        made = await self._client.send(calls.file_create(upload, handle, expires_in, purpose))
        return await self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def list(
        self, after: str | None = None, limit: int | None = None, order: Literal["asc", "desc"] | None = None
    ) -> AsyncListing[types.File]:
        """Files by age, newest first. ``limit`` is the length of a page."""
        return self._list("files", types.File, after, limit=limit, order=order)

    async def retrieve(self, id: str) -> types.File:
        return await self._client.send(calls.retrieve("files", types.File, id))

    async def content(self, id: str) -> bytes:
        """The original, byte by byte."""
        return await self._client.send(calls.content("files", id))

    async def update(self, id: str, ttl: int | None) -> types.File:
        """Let it live for ``ttl`` seconds from now; None: for ever."""
        return await self._client.send(calls.update("files", types.File, id, ttl))

    async def delete(self, id: str) -> types.Deleted:
        """Delete a file and everything compiled from it."""
        return await self._client.send(calls.delete("files", id))

    async def wait(self, id: str, timeout: float = WAIT) -> types.File:
        """The file once it is compiled. Raises CompileFailed or TimedOut."""
        return await self._until_ready(lambda: self.retrieve(id), timeout)


class Caches(Resource):
    """Explicit context caching: texts, cut and compiled, linked by id in any order."""

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
        """Cache ``text``, cut as ``split`` says, or ``chunks`` as they are.

        Args:
            split: ``fixed``, ``sentence``, ``paragraph``, ``section``, or ``{"mode", "tokens", "overlap"}``.
            ttl: seconds until it expires.
        """
        made = await self._client.send(calls.cache_create(text, chunks, split, name, ttl))
        return await self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def list(
        self, after: str | None = None, limit: int | None = None, order: Literal["asc", "desc"] | None = None
    ) -> AsyncListing[types.Cache]:
        return self._list("caches", types.Cache, after, limit=limit, order=order)

    async def retrieve(self, id: str) -> types.Cache | types.CacheChunk:
        """A cache (``group-...``) or one of its chunks (``cache-...``)."""
        return await self._client.send(calls.cache_retrieve(id))

    async def update(self, id: str, ttl: int | None) -> types.Cache:
        """Let it live for ``ttl`` seconds from now; None: for ever."""
        return await self._client.send(calls.update("caches", types.Cache, id, ttl))

    async def delete(self, id: str) -> types.Deleted:
        return await self._client.send(calls.delete("caches", id))

    async def wait(self, id: str, timeout: float = WAIT) -> types.Cache:
        """The cache once all of it is compiled."""
        return await self._until_ready(
            lambda: self._client.send(calls.retrieve("caches", types.Cache, id)), timeout
        )


class References(Resource):
    """The dynamic library: everybody searches, administrators write."""

    async def create(
        self,
        file: Source,
        title: str | None = None,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        id: str | None = None,
        wait: bool | float = False,
        progress: Progress | None = None,
    ) -> types.Reference:
        upload = self._client.sources.upload(file, progress)
        made = await self._client.send(
            calls.reference_write(id, upload, title, description, metadata, replace=False)
        )
        return await self.wait(made.id, WAIT if wait is True else wait) if wait else made

    async def replace(
        self,
        id: str,
        file: Source,
        title: str | None = None,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: bool | float = False,
        progress: Progress | None = None,
    ) -> types.Reference:
        """Its next version; what is left out stays as it was."""
        upload = self._client.sources.upload(file, progress)
        made = await self._client.send(
            calls.reference_write(id, upload, title, description, metadata, replace=True)
        )
        return await self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def list(
        self,
        after: str | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] | None = None,
        kind: Literal["image", "text"] | None = None,
    ) -> AsyncListing[types.Reference]:
        return self._list("references", types.Reference, after, limit=limit, order=order, kind=kind)

    async def retrieve(self, id: str) -> types.Reference:
        return await self._client.send(calls.retrieve("references", types.Reference, id))

    async def content(self, id: str) -> bytes:
        return await self._client.send(calls.content("references", id))

    async def delete(self, id: str) -> types.Deleted:
        return await self._client.send(calls.delete("references", id))

    async def wait(self, id: str, timeout: float = WAIT) -> types.Reference:
        return await self._until_ready(lambda: self.retrieve(id), timeout)

    async def search(
        self,
        query: str | None = None,
        *,
        image: str | Path | None = None,
        top_k: int | None = None,
        min_score: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> tuple[types.ReferenceHit, ...]:
        """References most like a text, an image, or both, best first.

        Args:
            image: a path, or a data URL.
            filter: metadata keys -> a value, values, or comparisons (``{"year": {"gte": 2020}}``).
        """
        url = await asyncio.to_thread(self._client.sources.image, image)  # it may have to be read
        return await self._client.send(calls.reference_search(query, url, top_k, min_score, filter))

    async def index(self) -> types.ReferenceIndex:
        """As ``MPIC.references.index``."""
        return await self._client.send(calls.reference_index())

    async def reindex(self) -> types.ReferenceIndex:
        """As ``MPIC.references.reindex``."""
        return await self._client.send(calls.reference_index(start=True))


class Models(Resource):
    async def list(self) -> tuple[types.Model, ...]:
        return (await self._client.send(calls.models())).data

    async def retrieve(self, id: str) -> types.Model:
        return await self._client.send(calls.model(id))


class Chat:
    def __init__(self, client: AsyncMPIC) -> None:
        self.completions = Completions(client)


class Completions(Resource):
    @overload
    async def create(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> types.ChatCompletion: ...

    @overload
    async def create(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> AsyncStream: ...

    async def create(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> types.ChatCompletion | AsyncStream:
        """Answer a conversation.

        Args:
            messages: as OpenAI's; a plain text is one question of the user.
            stream: give the answer piece by piece; ``AsyncStream.usage`` says at the end what it cost. Who asks for the
                usage chunk by ``stream_options`` gets it among the chunks too.
            **options: see ``ChatOptions``.
        """
        call = calls.chat(calls.conversation(messages), stream, options)
        if not stream:
            return await self._client.send(call)
        response = await self._client.stream(call)
        return AsyncStream(response, keep_usage=options.get("stream_options") is not None)
