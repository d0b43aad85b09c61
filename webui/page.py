"""The routes below ``/ui``: login, uploads and pictures here, all others in the Gradio app, which is built when it is
first asked for."""

from __future__ import annotations

import asyncio
import html
import json
import math
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, cast
from weakref import WeakValueDictionary

from fastapi import Cookie, FastAPI, Form, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.datastructures import UploadFile
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import (
    BadRequest,
    Forbidden,
    InvalidUpload,
    MPICError,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from mpic.http import errors
from mpic.http.body import parse
from mpic.http.hosts import is_loopback
from mpic.keys import LOGIN_SECONDS
from mpic.library import thumbnail
from mpic.webui.plots import plot
from mpic.webui.uploads import MOST, Uploads
from mpic.webui.visitors import COOKIE, Logins, Visitor

if TYPE_CHECKING:
    import gradio

POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Content security policy of the page. Gradio compiles templates and event scripts with ``new Function``, and sets
styles from scripts; inline scripts need the nonce of this response."""
SIDE = 192  # pixels of a thumbnail; shown at up to 96, and screens may have two pixels for one
SESSIONS = 64
"""Maximum open pages of one user; beyond that the oldest is forgotten, and is registered again with its next event."""
PENDING = 16
"""Maximum events of one open page that wait, run, or have unread results."""
SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
PICTURES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
PRIVATE = {"cache-control": "private, max-age=600", "vary": "Cookie"}


class Page:
    """An ASGI application for the routes below ``/ui``, behind a ``PageGate``.

    Args:
        logins: the logins.
        upload_bytes: largest file, and largest form, of an upload.
    """

    def __init__(self, logins: Logins, upload_bytes: int) -> None:
        self.logins = logins
        self.uploads = Uploads(upload_bytes)
        self._routes = self._make_routes()
        self._lock = asyncio.Lock()
        self._gradio: ASGIApp | None = None
        self._blocks: gradio.Blocks | None = None
        self._running = AsyncExitStack()
        self._pictures: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session -> user, least recently used first
        self._events: dict[str, Callable[..., Any]] = {
            "/gradio_api/queue/join": self._check_join,
            "/gradio_api/cancel": self._check_cancel,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get(
            "app_root_path", ""
        )  # the path prefix under which a proxy serves us, already stripped from the path
        scope = {**scope, "path": prefix + scope["path"]}
        await self._routes(scope, receive, send)

    async def close(self) -> None:
        """End the Gradio app and the visitors' clients, and remove uploads."""
        await self._running.aclose()
        await self.logins.close()
        self.uploads.close()

    # ---- our own routes

    def _make_routes(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        errors.install(app)
        app.add_exception_handler(MPICError, _refusal)

        @app.get("/login")
        async def login_page(request: Request) -> Response:
            visitor = await self.logins.visitor(None)
            return RedirectResponse(f"{_root(request)}/", 303) if visitor else _login_page()

        @app.post("/login")
        async def login(request: Request, key: Annotated[str, Form(max_length=256)] = "") -> Response:
            if request.url.scheme != "https" and not is_loopback(request.url.hostname or ""):
                return _login_page(
                    "Log in over https or from this machine: a key must not cross a network in the clear.",
                    403,
                )
            try:
                cookie = await self.logins.log_in(key.strip())
            except Unauthorized as error:
                return _login_page(error.message, 401)
            except Forbidden as error:
                return _login_page(error.message, 403)
            except RateLimited as error:
                return _login_page(
                    f"Log in again in {math.ceil(error.retry_after or 1)} s: {error.message}.", 429
                )
            response = RedirectResponse(f"{_root(request)}/", 303)
            response.set_cookie(
                COOKIE,
                cookie,
                max_age=LOGIN_SECONDS,
                path=_root(request),
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",  # over http only this machine may log in; see above
            )
            return response

        @app.post("/logout")
        async def logout(
            request: Request, session: Annotated[str | None, Cookie(alias=COOKIE)] = None
        ) -> Response:
            if session:
                await self.logins.log_out(session)
            response = RedirectResponse(f"{_root(request)}/login", 303)
            response.delete_cookie(COOKIE, path=_root(request))
            return response

        @app.get("/alive")
        async def alive(request: Request) -> JSONResponse:
            """Confirm that the server answers, and name the user; an open page asks when it has lost the connection."""
            return JSONResponse({"user": _visitor(request).user}, headers={"cache-control": "no-store"})

        @app.post("/gradio_api/upload")
        async def upload(request: Request) -> list[str]:
            """Take files as Gradio's own route does, and return a random name for each."""
            user = _visitor(request).user
            async with request.form(max_files=MOST, max_fields=MOST) as form:
                sent = form.getlist("files")
                if not sent or not all(isinstance(file, UploadFile) for file in sent):
                    raise BadRequest("an upload is a form with files", param="files")
                names = []
                for file in sent:
                    assert isinstance(file, UploadFile)
                    name = (file.filename or "file")[-255:]
                    names.append(await asyncio.to_thread(self.uploads.add, user, name, file.file))
                return names

        @app.get("/gradio_api/upload_progress")
        def progress() -> Response:
            """End the bar of an upload at once: the browser's own request is the upload."""
            return Response('data: {"msg": "done"}\n\n', media_type="text/event-stream")

        @app.get("/gradio_api/file={token}")
        async def uploaded(token: str, request: Request) -> Response:
            """Return a picture that this user has just sent, which the question's box shows."""
            sent = self.uploads.find(_visitor(request).user, token)
            with sent.path.open("rb") as file:
                kind = _picture_type(file.read(16))
            return FileResponse(sent.path, media_type=kind, headers=PRIVATE)

        @app.get("/thumbs/{id}")
        async def thumb(id: str, request: Request) -> Response:
            data = await self._original(_visitor(request), id)
            try:
                shrunk = partial(thumbnail, data, side=SIDE, least=SIDE // 2, transparent=True)
                png = await asyncio.to_thread(shrunk)
            except (InvalidUpload, TooLarge):
                raise NotFound("not an image") from None
            return Response(png, media_type="image/png", headers=PRIVATE)

        @app.get("/originals/{id}")
        async def original(id: str, request: Request) -> Response:
            data = await self._original(_visitor(request), id)
            return Response(data, media_type=_picture_type(data), headers=PRIVATE)

        @app.get("/plots/{name}.png")
        def show_plot(name: str) -> Response:
            path = plot(name)
            if path is None:
                raise NotFound(f"no plot {name!r}")
            return FileResponse(path, media_type="image/png")

        app.mount("/", self._to_gradio)
        return app

    async def _original(self, visitor: Visitor, id: str) -> bytes:
        """Return the bytes of a file of this user, or of a reference. Raise NotFound.

        Serve each user one request at a time, because a page shows many pictures at once and a key may allow a single
            request.
        """
        collection = visitor.client.references if id.startswith("ref_") else visitor.client.files
        lock = self._pictures.setdefault(visitor.user, asyncio.Lock())
        async with lock:
            return await collection.content(id)

    # ---- Gradio

    async def _to_gradio(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the Gradio app, with bodies checked."""
        if self._gradio is None:
            async with self._lock:
                if self._gradio is None:
                    self._gradio = await self._start()
        scope = {**scope, "headers": [h for h in scope["headers"] if not _misleading(h[0])]}
        path = scope["path"].removeprefix(scope["root_path"])
        user = scope["state"]["visitor"].user
        if path in ("", "/"):
            return await self._index(scope, receive, send)
        if path == "/gradio_api/queue/data":
            self._claim(user, Request(scope).query_params.get("session_hash"))
        elif path in self._events:
            try:
                body = parse(await Request(scope, receive).body())
            except ValueError as error:
                raise BadRequest(f"the body cannot be read: {error}") from None
            if not isinstance(body, dict):
                raise BadRequest("the body is not an object")
            checked = self._events[path](user, body)
            if checked is None:
                return await JSONResponse({"success": True})(scope, receive, send)
            receive = _once(json.dumps(checked).encode())
        await self._gradio(scope, receive, send)

    async def _start(self) -> ASGIApp:
        """Import Gradio and start the app; it takes seconds, so others are served meanwhile."""
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

        def build() -> tuple[FastAPI, gradio.Blocks]:
            from mpic.webui.app import mounted

            return mounted(self.uploads)

        parent, self._blocks = await asyncio.to_thread(build)
        await self._running.enter_async_context(parent.router.lifespan_context(parent))
        return cast(Mount, parent.routes[-1]).app

    async def _index(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with Gradio's page. Give its inline scripts a nonce, and remove references to other hosts."""
        assert self._gradio is not None
        start, body = None, b""

        async def collect(message: Message) -> None:
            nonlocal start, body
            start = message if message["type"] == "http.response.start" else start
            body += message.get("body", b"")

        await self._gradio(scope, receive, collect)
        nonce = secrets.token_urlsafe(16)
        foreign = r"<meta\s+(?:property|name)=\"(?:og|twitter):[^>]*>|<link rel=\"manifest\"[^>]*>"
        page = re.sub(foreign, "", body.decode())
        # before Gradio's scripts; and without an icon browsers ask for one at /
        ours = f'<link rel="icon" href="data:,"><script>{_stream_script()}</script>'
        page = page.replace("<head>", f"<head>{ours}", 1).replace("<script", f'<script nonce="{nonce}"')
        headers = {"content-security-policy": POLICY.format(nonce), "cache-control": "no-store"}
        assert start is not None
        await HTMLResponse(page, start["status"], headers)(scope, receive, send)

    def _check_join(self, user: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the checked body of an event for Gradio. Raise BadRequest, Forbidden, RateLimited."""
        assert self._blocks is not None
        session, index, data = body.get("session_hash"), body.get("fn_index"), body.get("data")
        self._claim(user, session)
        if type(index) is not int or index not in self._blocks.fns:
            raise BadRequest("fn_index names no event of this page", param="fn_index")
        if not isinstance(data, list) or len(data) != len(self._blocks.fns[index].inputs):
            raise BadRequest("data must be a list with a value for each input of the event", param="data")
        if len(self._blocks._queue.pending_event_ids_session.get(session, ())) >= PENDING:
            raise RateLimited(
                f"{PENDING} events of this page are waiting; read their results first", retry_after=1
            )
        kept = ("event_data", "trigger_id")
        named = {name: body.get(name) for name in kept}
        return {**named, "data": _without_files(data), "fn_index": index, "session_hash": session}

    def _check_cancel(self, user: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return a request to cancel an event of this page; None if it runs no such event. Raise as ``_claim``."""
        assert self._blocks is not None
        session, event, index = (body.get(name) for name in ("session_hash", "event_id", "fn_index"))
        self._claim(user, session)
        if type(index) is not int or event not in self._blocks._queue.pending_event_ids_session.get(
            session, ()
        ):
            return None
        return {"session_hash": session, "event_id": event, "fn_index": index}

    def _claim(self, user: str, session: Any) -> None:
        """Register an open page as this user's. Raise BadRequest if it has no valid name, Forbidden if it belongs to
        another user."""
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise BadRequest("session_hash must be 1 to 64 of A-Z a-z 0-9 _ -", param="session_hash")
        if self._sessions.setdefault(session, user) != user:
            raise Forbidden("this page is another user's", param="session_hash")
        self._sessions.move_to_end(session)
        own = [name for name, owner in self._sessions.items() if owner == user]
        if len(own) > SESSIONS:
            self._forget(own[0])

    def _forget(self, session: str) -> None:
        assert self._blocks is not None
        del self._sessions[session]
        queue, states = self._blocks._queue, self._blocks.state_holder
        for event in queue.pending_event_ids_session.pop(session, ()):
            queue.event_ids_to_events.pop(event, None)
        queue.pending_messages_per_session.pop(session, None)
        states.session_data.pop(session, None)
        states.time_last_used.pop(session, None)


@cache
def _stream_script() -> str:
    return (files("mpic.webui") / "stream.js").read_text(encoding="utf-8")


async def _refusal(request: Request, error: Exception) -> Response:
    """Answer with an error of ours. An error without a status comes from the client itself, whose server did not
    answer."""
    assert isinstance(error, MPICError)
    return errors.response(errors.as_mpic_error(error if error.status else Unavailable(error.message)))


def _root(request: Request) -> str:
    """Return the path of the page as the browser knows it."""
    return request.scope["root_path"].rstrip("/")


def _visitor(request: Request) -> Visitor:
    return request.state.visitor


def _picture_type(data: bytes) -> str:
    """Return the media type of a picture that browsers can show; other files are only downloaded."""
    return next(
        (kind for begin, kind in PICTURES.items() if data.startswith(begin)), "application/octet-stream"
    )


def _without_files(value: Any) -> Any:
    """Return a value in which Gradio recognises no file, because it would open or download the path in an object with
    ``meta``."""
    if isinstance(value, dict):
        return {name: _without_files(one) for name, one in value.items() if name not in ("meta", "url")}
    return [_without_files(one) for one in value] if isinstance(value, list) else value


def _misleading(name: bytes) -> bool:
    """Return whether a header must be dropped: Gradio would trust it for the page's address, or compress responses that
    are edited here."""
    return name.startswith(b"x-forwarded-") or name in (b"accept-encoding", b"x-gradio-server")


def _once(body: bytes) -> Receive:
    """Return the messages of a request with this body, whose client then stays."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()

    return receive


def _login_page(error: str = "", status: int = 200) -> HTMLResponse:
    page = (files("mpic.webui") / "login.html").read_text(encoding="utf-8")
    shown = f'<p class="error" role="alert">{html.escape(error)}</p>' if error else ""
    return HTMLResponse(page.replace("<!-- error -->", shown), status, {"cache-control": "no-store"})
