"""Pictures on the page: thumbnails of the visitor's images and of references, and plots of results."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, Response

from mpic.errors import InvalidUpload, NotFound, TooLarge, cut
from mpic.library import Library, Limits, thumbnail
from mpic.webui.plots import plot
from mpic.webui.proxy import FILE, REFERENCE, ROOT
from mpic.webui.sessions import Visitor

SIDE = 192  # pixels; shown at up to 96, and screens may have two pixels for one
KEPT = 2_000
PICTURE_ID = re.compile(f"{FILE}|{REFERENCE}")

Kept = OrderedDict[tuple[str, str, str], bytes]


def router(app: FastAPI) -> APIRouter:
    routes = APIRouter(prefix=ROOT, include_in_schema=False)
    kept: Kept = OrderedDict()

    @routes.get("/thumbs/{id}")
    async def thumb(id: str, request: Request) -> Response:
        visitor: Visitor = request.state.visitor
        if not PICTURE_ID.fullmatch(id):
            raise NotFound(f"no picture {cut(id)!r}")
        state = app.state.mpic
        # on the visitor's own share of the threads: a page asks for many pictures at once
        png = await state.pools.prompts.call(visitor.user, _thumbnail, state.library, visitor.user, id, kept)
        headers = {"Cache-Control": "private, max-age=600", "Vary": "Cookie"}
        return Response(png, media_type="image/png", headers=headers)

    @routes.get("/plots/{name}.png")
    def show_plot(name: str) -> Response:
        path: Path | None = plot(name)
        if path is None:
            raise NotFound(f"no plot {cut(name)!r}")
        return FileResponse(path, media_type="image/png")

    return routes


def _thumbnail(library: Library, user: str, id: str, kept: Kept) -> bytes:
    """Returns the thumbnail of a file of this user or of a reference. Raises NotFound or a subclass of it."""
    if id.startswith("ref"):
        reference = library.references.get(id)
        key = ("", id, reference.sha256)
    else:
        file = library.files.get(user, id)
        key = (user, id, file.sha256)
    png = kept.get(key)
    if png is None:
        data = library.references.content(reference) if key[0] == "" else library.files.content(user, id)
        png = kept[key] = shrink(data, library.limits)
        if len(kept) > KEPT:
            kept.popitem(last=False)
    return png


def shrink(data: bytes, limits: Limits | None = None) -> bytes:
    """Returns a small PNG of an image; the pixels of a tiny one are enlarged. Raises NotFound for other files."""
    try:
        return thumbnail(data, limits, side=SIDE, least=SIDE // 2, transparent=True)
    except (InvalidUpload, TooLarge):
        raise NotFound("not an image") from None
