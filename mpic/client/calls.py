"""Methods that are written once for both clients: calls on ``MPIC`` block, those on ``AsyncMPIC`` are awaited."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from mpic.client.io import AsyncIO, SyncIO, finish
from mpic.client.listing import AsyncListing, Listing, PageRequest
from mpic.client.sender import Resource

P = ParamSpec("P")
T = TypeVar("T")


class call(Generic[P, T]):
    """A method of a resource, written as a coroutine function. Looking it up on the class gives that function, which
    other methods of the class can await."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self._method = method

    @overload
    def __get__(
        self, resource: None, owner: Any = None
    ) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, resource: Resource[SyncIO], owner: Any = None) -> Callable[P, T]: ...

    @overload
    def __get__(
        self, resource: Resource[AsyncIO], owner: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, resource: Any, owner: Any = None) -> Any:
        if resource is None:
            return self._method
        method = self._method.__get__(resource, owner)  # ty: ignore[missing-attribute] (it is a function)
        if isinstance(resource.sender.io, AsyncIO):
            return method
        return functools.wraps(method)(lambda *args, **options: finish(method(*args, **options)))


class listed(Generic[P, T]):
    """A method that lists items, written as a function that returns the request for a page and the id after which the
    first page begins."""

    def __init__(self, method: Callable[Concatenate[Any, P], tuple[PageRequest[T], str | None]]) -> None:
        self._method = method
        method.__annotations__["return"] = (
            "Listing[M]"  # the type that callers get, for help() and the documentation
        )

    @overload
    def __get__(self, resource: Resource[SyncIO], owner: Any = None) -> Callable[P, Listing[T]]: ...

    @overload
    def __get__(self, resource: Resource[AsyncIO], owner: Any = None) -> Callable[P, AsyncListing[T]]: ...

    def __get__(self, resource: Any, owner: Any = None) -> Any:
        if resource is None:
            return self._method
        method, send = self._method.__get__(resource, owner), resource.sender.send  # ty: ignore[missing-attribute] (as above)
        if isinstance(resource.sender.io, AsyncIO):
            return functools.wraps(method)(
                lambda *args, **options: AsyncListing(send, *method(*args, **options))
            )
        blocking = lambda request: finish(send(request))
        return functools.wraps(method)(lambda *args, **options: Listing(blocking, *method(*args, **options)))
