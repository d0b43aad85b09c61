"""The resources of the API: files, caches, references, models, chat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, Unpack, overload

import httpx
from pydantic import BaseModel

from mpic.api.base import ItemPage
from mpic.api.resources import CacheList, FileList, ReferenceList
from mpic.client import endpoints, types
from mpic.client.endpoints import ApiRequest, ChatOptions
from mpic.client.listing import AsyncListing
from mpic.client.polling import WAIT, CompileWait
from mpic.client.sources import Progress, Source, Sources
from mpic.client.stream import AsyncStream

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Order = Literal["asc", "desc"]


class Sender(Protocol):
    """The part of the client that resources need."""

    sources: Sources

    async def send(self, request: ApiRequest[T]) -> T: ...

    async def stream(self, request: ApiRequest[Any]) -> httpx.Response: ...


class Resource:
    """A resource of the API."""

    def __init__(self, client: Sender) -> None:
        self._client = client


class Collection(Resource, Generic[M]):
    """A resource whose items are uploaded and compiled."""

    _path: ClassVar[str]
    _model: ClassVar[type[BaseModel]]
    _page: ClassVar[type[ItemPage[Any]]]

    def list(
        self, after: str | None = None, limit: int | None = None, order: Order | None = None
    ) -> AsyncListing[M]:
        """Lists the items by age, newest first. ``limit`` is the length of a page."""
        return self._list(after, limit=limit, order=order)

    async def retrieve(self, id: str) -> M:
        """Returns the current state of an item; of a reference the newest version."""
        request: ApiRequest[Any] = endpoints.retrieve(self._path, self._model, id)
        return await self._client.send(request)

    async def delete(self, id: str) -> types.Deleted:
        """Deletes an item and everything compiled from it."""
        return await self._client.send(endpoints.delete(self._path, id))

    async def wait(self, id: str, timeout: float = WAIT) -> M:
        """Waits until an item is compiled and returns it.

        Raises:
            CompileFailed: the item cannot be compiled.
            TimedOut: the item is not compiled after ``timeout`` seconds.
        """
        wait = CompileWait(timeout)
        while (pause := wait.pause(found := await self.retrieve(id))) is not None:
            await asyncio.sleep(pause)
        return found

    async def _create(self, request: ApiRequest[M], wait: bool | float) -> M:
        made: Any = await self._client.send(request)
        if not wait:
            return made
        done: Any = await self.wait(made.id, WAIT if wait is True else wait)
        return endpoints.with_outcome(done, made)

    def _list(self, after: str | None, **params: Any) -> AsyncListing[M]:
        def page_after(after: str | None) -> ApiRequest[ItemPage[M]]:
            return endpoints.listing(self._path, self._page, after=after, **params)

        return AsyncListing(self._client.send, page_after, after)


class Files(Collection[types.File]):
    """Uploaded images, clips and documents."""

    _path, _model, _page = "files", types.File, FileList

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
    ) -> types.File:
        """Uploads a file; it is streamed from the disk and compiled by the server in the background.

        Uploading the same bytes under the same handle again makes no second file: the ``outcome`` is then ``unchanged``
        (else ``created`` or ``replaced``), and only the lifetime starts again.

        Args:
            file: a path, bytes, a binary file, or (name, bytes or binary file).
            handle: NAME for ``IMAGE#NAME`` or ``FILE#NAME`` in prompts.
            ttl: seconds until it expires and is deleted; None: never.
            replace: takes the handle from another file, which is deleted.
            split: the way a document is cut into chunks: ``auto`` (the default: cut if it is too long for one),
                ``none``, ``fixed``, ``sentence``, ``paragraph``, ``section``, or ``{"mode", "tokens", "overlap"}``.
            press: name of the press that compresses it, such as ``snapkv-50``; ``none``: no compression; None: the
                server's default.
            wait: True waits until it is compiled; a number is the maximum number of seconds to wait.
            progress: called with (bytes sent, total bytes); the bytes of the form around the file are not counted.
            expires_in: the older name of ``ttl``.

        Raises:
            HandleTaken: another file has this handle, and ``replace`` is False.
            InvalidUpload, TooLarge, StorageFull, ...: the server refuses the upload.
            CompileFailed, TimedOut: see ``wait``; only raised if that is set.
        """
        upload = self._client.sources.upload(file, progress)
        life = endpoints.one_of_two("ttl", ttl, "expires_in", expires_in)
        request = endpoints.file_create(upload, handle, life, replace, split, press, purpose)
        return await self._create(request, wait)

    async def content(self, id: str) -> bytes:
        """Returns the bytes of the original."""
        return await self._client.send(endpoints.content("files", id))

    async def update(self, id: str, ttl: int | None) -> types.File:
        """Sets a file to expire in ``ttl`` seconds from now; None: never."""
        return await self._client.send(endpoints.update("files", types.File, id, ttl))

    async def rename(self, id: str, handle: str | None) -> types.File:
        """Changes the handle of a file, or removes it (None). Nothing is compiled again."""
        return await self._client.send(endpoints.rename(id, handle))


class Caches(Collection[types.Cache]):
    """Explicit context caches: texts that are cut into chunks and compiled, and linked by id in any order."""

    _path, _model, _page = "caches", types.Cache, CacheList

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
        """Caches ``text``, cut according to ``split``, or ``chunks`` as they are.

        Args:
            split: ``fixed``, ``sentence``, ``paragraph``, ``section``, or ``{"mode", "tokens", "overlap"}``.
            ttl: seconds until it expires; None: never.
            wait: see ``files.create``.
        """
        return await self._create(endpoints.cache_create(text, chunks, split, name, ttl), wait)

    async def retrieve(self, id: str) -> types.Cache | types.CacheChunk:
        """Returns a cache (``group-...``) or one of its chunks (``cache-...``)."""
        return await self._client.send(endpoints.cache_retrieve(id))

    async def update(self, id: str, ttl: int | None) -> types.Cache:
        """Sets a cache to expire in ``ttl`` seconds from now; None: never."""
        return await self._client.send(endpoints.update("caches", types.Cache, id, ttl))


class References(Collection[types.Reference]):
    """The reference library, which every user can search and administrators can change."""

    _path, _model, _page = "references", types.Reference, ReferenceList

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
        """Adds an image or a text. ``file``, ``wait`` and ``progress`` are as in ``files.create``."""
        upload = self._client.sources.upload(file, progress)
        request = endpoints.reference_write(id, upload, title, description, metadata, replace=False)
        return await self._create(request, wait)

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
        """Replaces a reference by a new version; arguments that are left out keep their values."""
        upload = self._client.sources.upload(file, progress)
        request = endpoints.reference_write(id, upload, title, description, metadata, replace=True)
        return await self._create(request, wait)

    def list(
        self,
        after: str | None = None,
        limit: int | None = None,
        order: Order | None = None,
        kind: Literal["image", "text"] | None = None,
    ) -> AsyncListing[types.Reference]:
        """Lists the references by age, newest first. ``limit`` is the length of a page."""
        return self._list(after, limit=limit, order=order, kind=kind)

    async def content(self, id: str) -> bytes:
        """Returns the bytes of the original."""
        return await self._client.send(endpoints.content("references", id))

    async def search(
        self,
        query: str | None = None,
        *,
        image: str | Path | None = None,
        top_k: int | None = None,
        min_score: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> tuple[types.ReferenceHit, ...]:
        """Returns the references most similar to a text, an image, or both, best first.

        Args:
            image: a path, or a data URL.
            filter: for each metadata key a value, a list of values, or comparisons (``{"year": {"gte": 2020}}``).
        """
        url = await asyncio.to_thread(self._client.sources.image, image)
        request = endpoints.reference_search(query, url, top_k, min_score, filter)
        return (await self._client.send(request)).data

    async def index(self) -> types.ReferenceIndex:
        """Returns the number of references that can be found, and of those still to be embedded; for administrators."""
        return await self._client.send(endpoints.reference_index())

    async def reindex(self) -> types.ReferenceIndex:
        """Embeds references without a vector in the background; ``index`` reports the progress."""
        return await self._client.send(endpoints.reference_index(start=True))


class Models(Resource):
    """The served model."""

    async def list(self) -> tuple[types.Model, ...]:
        return (await self._client.send(endpoints.models())).data

    async def retrieve(self, id: str) -> types.Model:
        return await self._client.send(endpoints.model(id))


class Chat:
    """The parent of ``completions``, as in OpenAI's SDK."""

    def __init__(self, client: Sender) -> None:
        self.completions = Completions(client)


class Completions(Resource):
    """Chat completions."""

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
        """Answers a conversation.

        Args:
            messages: messages in OpenAI's format; a plain string is one message of the user.
            stream: returns the answer piece by piece; ``AsyncStream.usage`` has the usage at the end. The chunk with
                the usage is among the chunks if ``stream_options`` asks for it.
            **options: see ``ChatOptions``.
        """
        request = endpoints.chat(endpoints.conversation(messages), stream, options)
        if not stream:
            return await self._client.send(request)
        response = await self._client.stream(request)
        return AsyncStream(response, keep_usage=options.get("stream_options") is not None)
