"""The nouns of the synchronous client: files, caches, references, models, chat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

from mpic.client import base, calls, types
from mpic.client.calls import Call, ChatOptions, Page
from mpic.client.sources import Progress, Source
from mpic.client.stream import Stream

if TYPE_CHECKING:
    from mpic.client.sync import MPIC

T = TypeVar("T")
WAIT = 600.0


class Listing(Generic[T]):
    """A listing: ``data`` is its first page, iterating goes through all of it."""

    def __init__(self, client: MPIC, call: Call[Page[T]], follow: Callable[[str], Call[Page[T]]]) -> None:
        self._client = client
        self._follow = follow
        self._first = client.send(call)

    @property
    def data(self) -> tuple[T, ...]:
        return self._first.data

    @property
    def has_more(self) -> bool:
        return self._first.has_more

    def __iter__(self) -> Iterator[T]:
        page: Page[T] | None = self._first
        while page is not None:
            items = page.data
            # before its items are given away: who deletes them deletes the last one too
            page = self._next(page)
            yield from items

    def _next(self, page: Page[T]) -> Page[T] | None:
        if not page.has_more or page.last_id is None:
            return None
        return self._client.send(self._follow(page.last_id))


class Resource:
    """One noun of the API."""

    def __init__(self, client: MPIC) -> None:
        self._client = client

    def _list(self, noun: str, model: type[T], after: str | None, **params: Any) -> Listing[T]:
        def follow(after: str | None) -> Call[Page[T]]:
            return calls.listing(noun, model, after=after, **params)

        return Listing(self._client, follow(after), follow)

    def _until_ready(self, look: Callable[[], T], timeout: float) -> T:
        deadline = time.monotonic() + timeout
        for pause in base.pauses():
            thing = look()
            what = base.name_of(thing)
            if base.settled(thing, what):
                return thing
            if time.monotonic() > deadline:
                raise base.too_slow(what, timeout)
            time.sleep(pause)
        raise AssertionError("pauses do not end")


class Files(Resource):
    """Uploaded images and documents."""

    def create(
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
        made = self._client.send(calls.file_create(upload, handle, expires_in, purpose))
        return self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def list(
        self, after: str | None = None, limit: int | None = None, order: Literal["asc", "desc"] | None = None
    ) -> Listing[types.File]:
        """Files by age, newest first. ``limit`` is the length of a page."""
        return self._list("files", types.File, after, limit=limit, order=order)

    def retrieve(self, id: str) -> types.File:
        return self._client.send(calls.retrieve("files", types.File, id))

    def content(self, id: str) -> bytes:
        """The original, byte by byte."""
        return self._client.send(calls.content("files", id))

    def update(self, id: str, ttl: int | None) -> types.File:
        """Let it live for ``ttl`` seconds from now; None: for ever."""
        return self._client.send(calls.update("files", types.File, id, ttl))

    def delete(self, id: str) -> types.Deleted:
        """Delete a file and everything compiled from it."""
        return self._client.send(calls.delete("files", id))

    def wait(self, id: str, timeout: float = WAIT) -> types.File:
        """The file once it is compiled. Raises CompileFailed or TimedOut."""
        return self._until_ready(lambda: self.retrieve(id), timeout)


class Caches(Resource):
    """Explicit context caching: texts, cut and compiled, linked by id in any order."""

    def create(
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
        made = self._client.send(calls.cache_create(text, chunks, split, name, ttl))
        return self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def list(
        self, after: str | None = None, limit: int | None = None, order: Literal["asc", "desc"] | None = None
    ) -> Listing[types.Cache]:
        return self._list("caches", types.Cache, after, limit=limit, order=order)

    def retrieve(self, id: str) -> types.Cache | types.CacheChunk:
        """A cache (``group-...``) or one of its chunks (``cache-...``)."""
        return self._client.send(calls.cache_retrieve(id))

    def update(self, id: str, ttl: int | None) -> types.Cache:
        """Let it live for ``ttl`` seconds from now; None: for ever."""
        return self._client.send(calls.update("caches", types.Cache, id, ttl))

    def delete(self, id: str) -> types.Deleted:
        return self._client.send(calls.delete("caches", id))

    def wait(self, id: str, timeout: float = WAIT) -> types.Cache:
        """The cache once all of it is compiled."""
        return self._until_ready(
            lambda: self._client.send(calls.retrieve("caches", types.Cache, id)), timeout
        )


class References(Resource):
    """The dynamic library: everybody searches, administrators write."""

    def create(
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
        made = self._client.send(
            calls.reference_write(id, upload, title, description, metadata, replace=False)
        )
        return self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def replace(
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
        made = self._client.send(
            calls.reference_write(id, upload, title, description, metadata, replace=True)
        )
        return self.wait(made.id, WAIT if wait is True else wait) if wait else made

    def list(
        self,
        after: str | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] | None = None,
        kind: Literal["image", "text"] | None = None,
    ) -> Listing[types.Reference]:
        return self._list("references", types.Reference, after, limit=limit, order=order, kind=kind)

    def retrieve(self, id: str) -> types.Reference:
        return self._client.send(calls.retrieve("references", types.Reference, id))

    def content(self, id: str) -> bytes:
        return self._client.send(calls.content("references", id))

    def delete(self, id: str) -> types.Deleted:
        return self._client.send(calls.delete("references", id))

    def wait(self, id: str, timeout: float = WAIT) -> types.Reference:
        return self._until_ready(lambda: self.retrieve(id), timeout)

    def search(
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
        url = self._client.sources.image(image)
        return self._client.send(calls.reference_search(query, url, top_k, min_score, filter))

    def index(self) -> types.ReferenceIndex:
        """How many references can be found, and what is still to be embedded; for administrators."""
        return self._client.send(calls.reference_index())

    def reindex(self) -> types.ReferenceIndex:
        """Embed what has no vector of the configured embedder, in the background; ``index`` tells how far it is."""
        return self._client.send(calls.reference_index(start=True))


class Models(Resource):
    def list(self) -> tuple[types.Model, ...]:
        return self._client.send(calls.models()).data

    def retrieve(self, id: str) -> types.Model:
        return self._client.send(calls.model(id))


class Chat:
    def __init__(self, client: MPIC) -> None:
        self.completions = Completions(client)


class Completions(Resource):
    @overload
    def create(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> types.ChatCompletion: ...

    @overload
    def create(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Stream: ...

    def create(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> types.ChatCompletion | Stream:
        """Answer a conversation.

        Args:
            messages: as OpenAI's; a plain text is one question of the user.
            stream: give the answer piece by piece; ``Stream.usage`` says at the end what it cost. Who asks for the
                usage chunk by ``stream_options`` gets it among the chunks too.
            **options: see ``ChatOptions``.
        """
        call = calls.chat(calls.conversation(messages), stream, options)
        if not stream:
            return self._client.send(call)
        response = self._client.stream(call)
        return Stream(response, keep_usage=options.get("stream_options") is not None)
