"""The access proxy of ``/ui``: ASGI middleware in front of everything else.

It identifies the visitor by the cookie, lets a short list of paths through, and turns the page's requests
(``/ui/v1/...``) into requests of the API itself with the visitor's key, so that the API checks sizes, validity, quotas,
limits and ownership as for any client.
"""

from __future__ import annotations

import re
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import Forbidden, MPICError, NotFound, Unauthorized, cut
from mpic.http import errors
from mpic.http.sse import NOT_KEPT
from mpic.webui.sessions import COOKIE, Visitor

if TYPE_CHECKING:
    from mpic.keys import KeyStore

ROOT = "/ui"
LOGIN = f"{ROOT}/login"
OPEN = {("GET", "/login"), ("POST", "/login"), ("POST", "/logout")}
FILE = r"file-[A-Za-z0-9]{1,64}"
REFERENCE = r"ref_[A-Za-z0-9_.-]{1,124}"

PAGES = re.compile(
    r"GET (?:/?|/static/[A-Za-z0-9_.-]+|/about|/alive|/live|/policy|/samples/[A-Za-z0-9_]+|/thumbs/[A-Za-z0-9_.-]+"
    r"|/plots/[A-Za-z0-9_-]+\.png)"
)
PUBLIC = re.compile(r"GET /static/(?:login\.css|icon\.svg)")
"""What the login page shows."""
API = re.compile(
    rf"(?:GET|POST) /v1/(?:files|references)|(?:GET|PATCH|DELETE) /v1/files/{FILE}|GET /v1/files/{FILE}/content"
    rf"|(?:GET|DELETE) /v1/references/{REFERENCE}|GET /v1/references/{REFERENCE}/content"
    r"|POST /v1/references/search|POST /v1/chat/completions|GET /v1/savings"
)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""No inline script, no ``eval``, nothing from elsewhere; and nothing may turn a text into markup."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Proxy:
    """See the module. Puts the ``Visitor`` into ``scope["state"]["visitor"]``.

    Args:
        keys: the server's API keys, and the logins.
        always: require a key even while none exist.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore, always: bool) -> None:
        self.app = app
        self.keys = keys
        self.always = always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path != ROOT and not path.startswith(ROOT + "/"):
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # a websocket, which the page does not use
            return await send({"type": "websocket.close", "code": 1008})
        send = _with_headers(send)
        try:
            self._admit(scope, path.removeprefix(ROOT))
        except Unauthorized as error:
            if scope["method"] == "GET" and "text/html" in Headers(scope=scope).get("accept", ""):
                return await RedirectResponse(LOGIN, 303)(scope, receive, send)
            return await errors.response(error)(scope, receive, send)
        except MPICError as error:
            return await errors.response(error)(scope, receive, send)
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope, path: str) -> None:
        """Admits a request or raises."""
        headers = Headers(scope=scope)
        method = scope["method"]
        if method not in ("GET", "HEAD"):
            _same_origin(headers)
        asked = f"{'GET' if method == 'HEAD' else method} {path}"
        if (method, path) in OPEN or PUBLIC.fullmatch(asked):
            return
        visitor = self.visitor(_cookie(headers))
        # a new dictionary for this request, since the server may share one between requests
        scope["state"] = {**scope.get("state", {}), "visitor": visitor}
        if PAGES.fullmatch(asked):
            return
        if not API.fullmatch(asked):
            raise NotFound(f"no such route: {method} {cut(scope['path'])}")
        _same_user(headers, visitor)
        _to_api(scope, visitor)

    def visitor(self, cookie: str | None) -> Visitor:
        """Returns the visitor who has this cookie. Raises Unauthorized."""
        if not self.always and not self.keys.exist():
            return Visitor("local", "admin", None)
        key = self.keys.logged_in(cookie) if cookie else None
        if key is None:
            raise Unauthorized(f"log in at {LOGIN}")
        return Visitor(key.user, key.role, key)


def _same_origin(headers: Headers) -> None:
    """Refuses requests that another site's page makes a browser send; besides, the cookie is SameSite=Strict."""
    origin = headers.get("origin")
    if origin is not None and re.sub("^https?://", "", origin) != headers.get("host"):
        raise Forbidden(f"requests from pages of {cut(origin)!r} are refused", param="Origin")


def _same_user(headers: Headers, visitor: Visitor) -> None:
    """Refuses requests of a page whose user is no longer the one who is logged in in this browser."""
    user = headers.get("x-mpic-user")
    if user is not None and unquote(user) != visitor.user:
        raise Unauthorized("somebody else has logged in in this browser; reload the page")


def _cookie(headers: Headers) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return morsel and morsel.value


def _to_api(scope: Scope, visitor: Visitor) -> None:
    """Turns the request into the API's own, in the name of the visitor's key (``server/auth.py`` looks for it)."""
    scope["path"] = scope["path"].removeprefix(ROOT)
    scope["raw_path"] = scope["path"].encode()
    scope["headers"] = [(n, v) for n, v in scope["headers"] if n.lower() not in (b"authorization", b"cookie")]
    if visitor.key is not None:
        scope["state"]["login"] = visitor.key


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", NOT_KEPT)
        await send(message)

    return sending
