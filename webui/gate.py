"""Decides who may come in, and to which routes: ASGI middleware in front of everything below ``/ui``.

Only what the page needs is let through. Of Gradio's routes these are its static files, its configuration and its queue.
Routes that read files, fetch URLs, write links or bypass the queue are blocked.
"""

from __future__ import annotations

import re
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import Forbidden, MPICError, NotFound, Unauthorized, cut
from mpic.http import errors
from mpic.http.sse import NOT_KEPT
from mpic.webui.visitors import COOKIE, Logins

ROOT = "/ui"
OPEN = {("GET", "/login"), ("POST", "/login"), ("POST", "/logout")}
ID = r"(?:file-[A-Za-z0-9]{1,64}|ref_[A-Za-z0-9_.-]{1,124})"
NAME = r"(?!\.)[A-Za-z0-9_.-]{1,128}"
ROUTES = re.compile(
    rf"GET (?:/?|/alive|/config|/theme\.css|/(?:assets|static)(?:/{NAME}){{1,6}}|/(?:thumbs|originals)/{ID}"
    r"|/plots/[A-Za-z0-9_-]{1,100}\.png|/gradio_api/(?:info|app_id|queue/data|upload_progress|file=[A-Za-z0-9_-]{32}))"
    r"|POST /gradio_api/(?:upload|cancel|reset|queue/join)"
)

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Content security policy of every response that sets none of its own; the page itself has another one
(``page.py``)."""


class PageGate:
    """See the module's docstring. Puts the ``Visitor`` into ``scope["state"]["visitor"]``."""

    def __init__(self, app: ASGIApp, logins: Logins) -> None:
        self.app = app
        self.logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path != ROOT and not path.startswith(ROOT + "/"):
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # a websocket, which the page does not use
            return await send({"type": "websocket.close", "code": 1008})
        root, send = scope.get("root_path", "") + ROOT, _with_headers(send)
        try:
            await self._admit(scope, path.removeprefix(ROOT))
        except Unauthorized as error:
            if scope["method"] == "GET" and "text/html" in Headers(scope=scope).get("accept", ""):
                return await RedirectResponse(f"{root}/login", 303)(scope, receive, send)
            return await errors.response(error)(scope, receive, send)
        except MPICError as error:
            return await errors.response(error)(scope, receive, send)
        if path == ROOT:  # the page names its files relative to its own address
            return await RedirectResponse(f"{root}/")(scope, receive, send)
        await self.app(scope, receive, send)

    async def _admit(self, scope: Scope, path: str) -> None:
        """Admit a request or raise."""
        headers, method = Headers(scope=scope), scope["method"]
        if method not in ("GET", "HEAD"):
            _same_origin(headers)
        if (method, path) in OPEN:
            return
        visitor = await self.logins.visitor(_cookie(headers))
        if visitor is None:
            raise Unauthorized(f"log in at {ROOT}/login")
        # a new dictionary for this request, since the server may share one between requests
        scope["state"] = {**scope.get("state", {}), "visitor": visitor}
        if not ROUTES.fullmatch(f"{'GET' if method == 'HEAD' else method} {path}"):
            raise NotFound(f"no such route: {method} {cut(scope['path'])}")


def _same_origin(headers: Headers) -> None:
    """Refuse requests that another site's page makes a browser send; besides, the cookie is SameSite=Strict."""
    origin = headers.get("origin")
    if origin is not None and re.sub("^https?://", "", origin) != headers.get("host"):
        raise Forbidden(f"requests from pages of {cut(origin)!r} are refused", param="Origin")
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("requests from pages of other sites are refused", param="Sec-Fetch-Site")


def _cookie(headers: Headers) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if morsel is None else morsel.value


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", NOT_KEPT)
        await send(message)

    return sending
