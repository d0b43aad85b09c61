"""Helpers of the routers: parameters of listings, forms, objects, downloads, and the tiers of compiled KV."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from aiofiles.threadpool import wrap
from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mpic.errors import (
    BadRequest,
    CorruptFile,
    PreconditionFailed,
    RangeNotSatisfiable,
    UnsupportedParameter,
    cut,
)
from mpic.library import File, Reference
from mpic.library.folder.originals import PIECE, OpenOriginal
from mpic.server.state import State

T = TypeVar("T", bound=BaseModel)
Tiers = dict[str, tuple[str, ...]]
"""File id -> tiers below the device that hold its compiled KV."""
After = Annotated[str | None, Query(description="id of the last item of the previous page")]
Order = Literal["asc", "desc"]
OCTETS = "application/octet-stream"
RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})", re.ASCII | re.IGNORECASE)
PARTS: dict[int | str, dict[str, Any]] = {
    206: {"description": "the range that was asked for"},
    304: {"description": "the client has it (`If-None-Match`)"},
}
ENTITY_TAG = re.compile(r'(W/)?("[^"]*")')


def form_fields(*known: str) -> Any:
    """Return a dependency that refuses unknown form fields, and a form without the first of the known ones, its
    file."""

    async def check(request: Request) -> None:
        form = await request.form()
        unknown = sorted(set(form.keys()) - set(known))
        if unknown:
            raise UnsupportedParameter(
                f"{cut(unknown[0])} is not supported by this server", param=cut(unknown[0])
            )
        if known[0] not in form:
            raise BadRequest(
                f"{known[0]} is required, in a form that is sent as multipart/form-data", param=known[0]
            )

    return Depends(check)


async def known_query(request: Request) -> None:
    """Refuse query fields that the route does not have. Raise UnsupportedParameter."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    for name in sorted(set(request.query_params) - known):
        raise UnsupportedParameter(f"{cut(name)} is not supported by this server", param=cut(name))


class _Download(StreamingResponse):
    """Sends a range of an original piece by piece, as fast as the client reads, and closes it. It is read on
    threads."""

    def __init__(self, original: OpenOriginal, wanted: range, status: int, headers: dict[str, str]) -> None:
        super().__init__(self._pieces(wanted), status, headers, OCTETS)
        self._original = original

    async def _pieces(self, wanted: range) -> AsyncIterator[bytes]:
        self._original.seek(wanted.start)
        file, left = wrap(self._original), len(wanted)
        while left:
            piece = await file.read(min(PIECE, left))
            if not piece:
                raise CorruptFile("the original was cut off while it was sent")
            left -= len(piece)
            yield piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # on a thread, as a disk may hang; not awaited, so that no cancellation can prevent it
            asyncio.get_running_loop().run_in_executor(None, self._original.close)


def download(request: Request, file: File | Reference, open: Callable[[], OpenOriginal]) -> Response:
    """Return the response to a request of an original: all of it or one range (RFC 9110, section 14), its headers
    alone for HEAD, or nothing if the client has it. Browsers save it and never display it, whatever the content is.

    Args:
        open: opens and verifies it; only called if some of it is sent, and the response then closes it.

    Raises:
        PreconditionFailed: it is not the one that the client has a part of.
        RangeNotSatisfiable: the range begins behind the end.
    """
    tag = f'"{file.sha256}"'
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "ETag": tag,
        "X-Content-Type-Options": "nosniff",
    }
    if "if-match" in request.headers and not _names(request, "if-match", tag, weakly=False):
        raise PreconditionFailed(f"the content has the ETag {tag}", param="If-Match")
    if _names(request, "if-none-match", tag, weakly=True):
        return Response(status_code=304, headers=headers)
    wanted = None
    if request.method == "GET" and request.headers.get("if-range", tag) == tag:
        wanted = _range(",".join(request.headers.getlist("range")), file.bytes)
    status = 200 if wanted is None else 206
    if wanted is None:
        wanted = range(file.bytes)
    else:
        headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{file.bytes}"
    headers["Content-Length"] = str(len(wanted))
    if request.method == "HEAD":
        return Response(headers=headers, media_type=OCTETS)
    return _Download(open(), wanted, status, headers)


def _names(request: Request, field: str, tag: str, weakly: bool) -> bool:
    """Return whether a field with entity tags names this one (RFC 9110, section 13.1)."""
    value = ",".join(request.headers.getlist(field))
    found = ENTITY_TAG.findall(value)
    return value.strip() == "*" or any(one == tag and (weakly or not weak) for weak, one in found)


def _range(header: str, size: int) -> range | None:
    """Return the bytes that a ``Range`` header asks for; None if it asks for several ranges or is not valid, for which
    all bytes may be sent.

    Raises:
        RangeNotSatisfiable: there are no such bytes.
    """
    asked = RANGE.fullmatch(header.strip())
    if asked is None or not any(asked.groups()):
        return None
    first, last = (int(digits) if digits else None for digits in asked.groups())
    if first is None:
        wanted = range(max(0, size - (last or 0)), size)
    elif last is not None and last < first:
        return None
    else:
        wanted = range(first, size if last is None else min(last + 1, size))
    if not wanted:
        raise RangeNotSatisfiable(f"the file has {size:,} bytes", param="Range", bytes=size)
    return wanted


def shown(kind: type[T], source: object, **more: Any) -> T:
    """Return an object of the API, whose fields come from ``source`` and ``more``. Times are in whole seconds."""
    found = {
        name: getattr(source, name)
        for name in kind.model_fields
        if name not in more and hasattr(source, name)
    }
    times = {name: int(at) for name, at in found.items() if name.endswith("_at") and at is not None}
    return kind(**found | times | more)


async def listed(request: Request, state: State, make: Callable[[], BaseModel]) -> Response:
    """Return what ``make`` returns as JSON. All of that is work in proportion to the rows shown, so it is done on the
    threads for listings, of which each user has few."""
    return await state.pools.listings.run(request, lambda: _json(make()))


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(by_alias=True), media_type="application/json")


def tiers_of(state: State, user: str, ids: Iterable[str]) -> Tiers:
    """Return the tiers below the device that hold KV of these files of the user for the served model."""
    wanted = "files.owner = :user AND c.model = :model AND c.state = 'ready'"
    asked = "FROM json_each(:ids) AS asked CROSS JOIN files ON files.id = asked.value"
    same = "c.owner = files.owner AND c.kind = files.kind"
    rows = state.library.catalog.read(
        f"SELECT files.id, c.tier {asked} CROSS JOIN chunks c ON {same} AND c.digest = files.digest WHERE {wanted} "
        f"UNION SELECT files.id, c.tier {asked} CROSS JOIN pieces ON pieces.file = files.id "
        f"CROSS JOIN chunks c ON {same} AND c.digest = pieces.digest WHERE {wanted} AND files.split IS NOT NULL",
        user=user,
        model=state.engine.info.digest,
        ids=json.dumps(list(ids)),
    )
    found: Tiers = {}
    for row in rows:
        found[row["id"]] = (*found.get(row["id"], ()), row["tier"])
    return found
