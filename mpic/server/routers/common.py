"""Helpers of the routers: parameters of listings, forms, objects, downloads, and the tiers of compiled KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mpic.errors import UnsupportedParameter, cut
from mpic.library.folder.originals import OpenOriginal
from mpic.server.state import State

T = TypeVar("T", bound=BaseModel)
Tiers = dict[str, tuple[str, ...]]
"""File id -> tiers below the device that hold its compiled KV."""
After = Annotated[str | None, Query(description="id of the last item of the previous page")]
Order = Literal["asc", "desc"]


def form_fields(*known: str) -> Any:
    """Returns a dependency that refuses unknown form fields."""

    async def check(request: Request) -> None:
        unknown = sorted(set((await request.form()).keys()) - set(known))
        if unknown:
            raise UnsupportedParameter(
                f"{cut(unknown[0])} is not supported by this server", param=cut(unknown[0])
            )

    return Depends(check)


class _Download(StreamingResponse):
    """Sends an original piece by piece, as fast as the client reads, and closes it. It is read on threads."""

    def __init__(self, original: OpenOriginal, headers: dict[str, str]) -> None:
        headers = {**headers, "Content-Length": str(original.bytes)}
        super().__init__(original.pieces(), media_type="application/octet-stream", headers=headers)
        self._original = original

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._original.close()


def download(original: OpenOriginal, filename: str) -> Response:
    """Returns a response that browsers save and never display, whatever the content is. It closes the original."""
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return _Download(original, headers)


def shown(kind: type[T], source: object, **more: Any) -> T:
    """Returns an object of the API, whose fields come from ``source`` and ``more``. Times are in whole seconds."""
    found = {
        name: getattr(source, name)
        for name in kind.model_fields
        if name not in more and hasattr(source, name)
    }
    times = {name: int(at) for name, at in found.items() if name.endswith("_at") and at is not None}
    return kind(**found | times | more)


async def listed(request: Request, state: State, make: Callable[[], BaseModel]) -> Response:
    """Returns what ``make`` returns as JSON. All of that is work in proportion to the rows shown, so it is done on the
    threads for listings, of which each user has few."""
    return await state.pools.listings.run(request, lambda: _json(make()))


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(by_alias=True), media_type="application/json")


def tiers_of(state: State, user: str, ids: Iterable[str]) -> Tiers:
    """Returns the tiers below the device that hold KV of these files of the user for the served model."""
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
