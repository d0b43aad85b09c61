"""``mpic ui``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from mpic.cli.common import DEFAULT_URL, Url, command_app, out

if TYPE_CHECKING:
    from fastapi import FastAPI

app = command_app()
PORT = 7860


@app.command()
def ui(
    url: Url = DEFAULT_URL,
    port: Annotated[
        int, typer.Option(help="where the page listens, on this machine; 0: any free port")
    ] = PORT,
) -> None:
    """Serve the web interface of a server that runs elsewhere. (Every server has the same page at /ui.)

    The page listens on this machine only. If the server has API keys, log in with yours: it stays in the memory of this
    process, and goes to that server only.

    Example: `mpic ui --url https://mpic.example.org`.
    """
    import uvicorn

    from mpic.http.listening import bind, url_of

    with bind("127.0.0.1", port) as sock:
        served = uvicorn.Config(standalone(url), log_level="warning", ws="none", server_header=False)
        out.print(f"The page of {url} listens on {url_of(sock)}/ui/")
        uvicorn.Server(served).run(sockets=[sock])


def standalone(url: str) -> FastAPI:
    """Return the web page of a server as a standalone application."""
    import tempfile

    from fastapi import FastAPI
    from fastapi.responses import RedirectResponse

    from mpic.http import errors
    from mpic.limits import StorageLimits
    from mpic.server.guard import BodyLimit, CookieFilter, HostGuard
    from mpic.server.uploads import AT_ONCE, UploadsUnderWay
    from mpic.webui.gate import ROOT, PageGate
    from mpic.webui.page import Page
    from mpic.webui.visitors import COOKIE, COOKIE_VALUE, LoginsAlone

    logins = LoginsAlone(url)
    limit = StorageLimits().upload_bytes
    page = Page(logins, limit)

    @asynccontextmanager
    async def closing(app: FastAPI) -> AsyncIterator[None]:
        yield
        await page.close()

    alone = FastAPI(lifespan=closing, openapi_url=None, docs_url=None, redoc_url=None)
    errors.install(alone)
    alone.add_api_route("/", lambda: RedirectResponse(f"{ROOT}/"))
    alone.mount(ROOT, page)
    under_way = UploadsUnderWay(AT_ONCE * limit, tempfile.gettempdir())
    alone.add_middleware(BodyLimit, under_way=under_way, uploads=limit, other=limit)
    alone.add_middleware(HostGuard)
    alone.add_middleware(PageGate, logins=logins)
    alone.add_middleware(CookieFilter, name=COOKIE, value=COOKIE_VALUE)
    return alone
