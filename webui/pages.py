"""The page itself and its files. Only names known at the start are served, so none leads to another file."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mpic.errors import NotFound, cut
from mpic.webui.proxy import ROOT

TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class StaticFile(NamedTuple):
    data: bytes
    type: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Returns the files of the page by name."""
    found = {}
    for item in (files("mpic.webui") / "static").iterdir():
        kind = TYPES.get(item.name.rpartition(".")[2])
        if kind is not None:
            data = item.read_bytes()
            found[item.name] = StaticFile(data, kind, f'"{hashlib.sha256(data).hexdigest()[:24]}"')
    return found


@cache
def shell() -> bytes:
    """Returns the page, with every module it needs named in its head, so that they are fetched at the same time."""
    page = (files("mpic.webui") / "static" / "index.html").read_text(encoding="utf-8")
    links = "".join(
        f'<link rel="modulepreload" href="{ROOT}/static/{name}">'
        for name in sorted(static_files())
        if name.endswith(".js")
    )
    return page.replace("<!-- modules -->", links).encode()


def router() -> APIRouter:
    routes = APIRouter(prefix=ROOT, include_in_schema=False)

    @routes.get("")
    @routes.get("/")
    def page() -> Response:
        # no-store: another user of this browser must not get the page of the one before from a cache
        return Response(shell(), media_type="text/html", headers={"cache-control": "no-store"})

    @routes.get("/static/{name}")
    def static(name: str, request: Request) -> Response:
        file = static_files().get(name)
        if file is None:
            raise NotFound(f"no file {cut(name)!r}")
        headers = {"cache-control": "no-cache", "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, media_type=file.type, headers=headers)

    return routes
