"""``/ui/login`` and ``/ui/logout``: exchange an API key for a cookie, and drop the cookie."""

from __future__ import annotations

import html
import math
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Cookie, FastAPI, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from mpic.errors import RateLimited
from mpic.http.hosts import is_loopback
from mpic.keys import LOGIN_SECONDS
from mpic.webui.proxy import HEADERS, LOGIN, ROOT
from mpic.webui.sessions import COOKIE

if TYPE_CHECKING:
    from mpic.keys import KeyStore


def router(app: FastAPI) -> APIRouter:
    keys: KeyStore = app.state.mpic.keys
    routes = APIRouter(prefix=ROOT, include_in_schema=False)

    @routes.get("/login")
    def form() -> Response:
        return RedirectResponse(f"{ROOT}/", 303) if not keys.exist() else _page()

    @routes.post("/login")
    async def login(request: Request, key: Annotated[str, Form(max_length=256)] = "") -> Response:
        if request.url.scheme != "https" and not is_loopback(request.url.hostname or ""):
            return _page(
                "Log in over https or from this machine: a key must not cross a network in the clear.", 403
            )
        found = keys.find(key.strip())
        if found is None:
            return _page("This key is not known here, or it was revoked.", 401)
        if found.role == "metrics":
            return _page("This key is for metrics only.", 403)
        state = app.state.mpic
        try:
            state.rates.count(found)
        except RateLimited as error:
            return _page(f"Log in again in {math.ceil(error.retry_after or 1)} s: {error.message}.", 429)
        # it waits for the disk, on the user's own share of the threads
        cookie = await state.pools.prompts.call(found.user, keys.log_in, found)
        response = RedirectResponse(f"{ROOT}/", 303)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=LOGIN_SECONDS,
            path=ROOT,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",  # over http only this machine may log in; see above
        )
        return response

    @routes.post("/logout")
    def logout(session: Annotated[str | None, Cookie(alias=COOKIE)] = None) -> Response:
        if session:
            keys.log_out(session)
        response = RedirectResponse(LOGIN, 303)
        response.delete_cookie(COOKIE, path=ROOT)
        return response

    return routes


def _page(error: str = "", status: int = 200) -> HTMLResponse:
    page = (files("mpic.webui") / "static" / "login.html").read_text(encoding="utf-8")
    shown = f'<p class="error" role="alert">{html.escape(error)}</p>' if error else ""
    return HTMLResponse(
        page.replace("<!-- error -->", shown), status, headers={**HEADERS, "cache-control": "no-store"}
    )
