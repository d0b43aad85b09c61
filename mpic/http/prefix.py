"""The path at which a reverse proxy shows the server, such as ``/mpic``."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mpic.config import ROOT_PATH
from mpic.errors import BadRequest
from mpic.http import errors

HEADER = "X-Forwarded-Prefix"


class ProxyPrefix:
    """ASGI middleware that sets ``root_path``, from which links to other routes are made.

    A proxy may take the prefix off the path or leave it there. It is believed from anybody, unlike other forwarded
    headers: it changes nothing but links in the response to this one request, and those only to other paths of this
    host; a page of another site cannot make a browser send it.

    Args:
        root_path: the prefix of requests without the header; "" for none.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        prefix = Headers(scope=scope).get(HEADER, "").rstrip("/") or self.root_path
        if prefix and not ROOT_PATH.fullmatch(prefix):
            error = BadRequest(
                f"X-Forwarded-Prefix must be a path such as /mpic, not {prefix[:80]!r}", param=HEADER
            )
            return await errors.response(error)(scope, receive, send)
        if prefix:
            path = scope["path"]
            if path == prefix or path.startswith(f"{prefix}/"):
                path = path.removeprefix(prefix)
            scope = {**scope, "root_path": prefix, "path": path or "/"}
        await self.app(scope, receive, send)
