"""Listings whose pages are fetched on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from mpic.api.base import ItemPage
from mpic.client.endpoints import ApiRequest

T = TypeVar("T")
PageRequest = Callable[[str | None], ApiRequest[ItemPage[T]]]
"""Returns the request for the page after an id, or for the first page if the id is None."""


def _next_id(page: ItemPage[Any]) -> str | None:
    return page.last_id if page.has_more else None


class Listing(Generic[T]):
    """A listing. ``data`` holds its first page; iterating over it fetches all pages."""

    def __init__(
        self,
        send: Callable[[ApiRequest[ItemPage[T]]], ItemPage[T]],
        page_after: PageRequest[T],
        after: str | None,
    ) -> None:
        self._send = send
        self._page_after = page_after
        self._first = send(page_after(after))

    @property
    def data(self) -> tuple[T, ...]:
        return self._first.data

    @property
    def has_more(self) -> bool:
        return self._first.has_more

    def __iter__(self) -> Iterator[T]:
        page: ItemPage[T] | None = self._first
        while page is not None:
            items, after = page.data, _next_id(page)
            # The next page is fetched before these items are handed out, because its start is named by the last of
            # them, which the caller may delete.
            page = None if after is None else self._send(self._page_after(after))
            yield from items


class AsyncListing(Generic[T]):
    """A listing. Awaiting it returns the first page; ``async for`` fetches all pages."""

    def __init__(
        self,
        send: Callable[[ApiRequest[ItemPage[T]]], Awaitable[ItemPage[T]]],
        page_after: PageRequest[T],
        after: str | None,
    ) -> None:
        self._send = send
        self._page_after = page_after
        self._after = after

    def __await__(self) -> Generator[Any, None, ItemPage[T]]:
        return self._send(self._page_after(self._after)).__await__()

    async def __aiter__(self) -> AsyncIterator[T]:
        page: ItemPage[T] | None = await self
        while page is not None:
            items, after = page.data, _next_id(page)
            page = None if after is None else await self._send(self._page_after(after))  # see Listing
            for item in items:
                yield item
