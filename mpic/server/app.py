"""The FastAPI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from mpic import __version__, webui
from mpic.config import Config
from mpic.keys import KeyStore
from mpic.retriever import Embedder, Retriever
from mpic.server import docs, errors
from mpic.server.auth import Authenticate
from mpic.server.guard import BodyLimit, HostGuard, OneCookie, is_loopback
from mpic.server.metrics import Counted, Metrics
from mpic.server.quotas import Quotas
from mpic.server.replies import ErrorBody
from mpic.server.routers import caches, chat, files, health, metrics, models, references
from mpic.server.state import State
from mpic.server.uploads import Uploads
from mpic.webui.sessions import COOKIE, COOKIE_VALUE

if TYPE_CHECKING:
    from mpic.engine.base import Engine
    from mpic.library import Library
    from mpic.prompt import ChatTemplate

KEY_PATIENCE = 0.25
"""Seconds a request waits for the key store; it is asked on the event loop, where everybody waits."""

ROUTERS = (
    chat.router,
    files.router,
    caches.router,
    references.router,
    models.router,
    health.router,
    metrics.router,
)


def create_app(
    engine: Engine, library: Library, template: ChatTemplate, config: Config | None = None
) -> FastAPI:
    """The application over running parts. It closes engine and library when it shuts down."""
    config = config or Config()
    template = template.within(engine.info.context_length)
    library.files.tokenize = library.references.tokenize = template.tokenize_document
    app = FastAPI(
        title="MPIC",
        version=__version__,
        description="Multimodal LLM serving with position-independent KV caching. OpenAI-shaped.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody, "description": "what the caller can mend"}},
    )
    keys = KeyStore(library.root, patience=KEY_PATIENCE)
    measured = Metrics(engine, library)
    found = config.retrieval
    embedder = Embedder(found.embedder, found.embedder_weights, found.embedder_device)
    retriever = Retriever(library, embedder, found.duplicates)
    quotas = Quotas(library.catalog)
    app.state.mpic = State(
        engine, library, template, config, int(time.time()), keys, quotas, measured, retriever
    )
    for router in ROUTERS:
        app.include_router(router)
    app.add_api_route("/", _home, include_in_schema=False)
    app.add_api_route("/docs", _docs, include_in_schema=False)
    errors.install(app)
    app.add_middleware(BodyLimit, uploads=config.library.upload_bytes, other=config.server.max_body_bytes)
    reachable = not is_loopback(config.server.host)
    app.add_middleware(Authenticate, keys=keys, always=reachable)
    app.add_middleware(HostGuard, keys=keys, names=config.server.hosts)
    app.add_middleware(Counted, metrics=measured)
    webui.mount(app, config)
    app.add_middleware(OneCookie, name=COOKIE, value=COOKIE_VALUE)  # in front of the web interface, too
    return app


async def _docs(request: Request) -> HTMLResponse:
    return HTMLResponse(docs.page(request.app.openapi()), headers={"Content-Security-Policy": docs.CSP})


async def _home() -> RedirectResponse:
    return RedirectResponse("/ui")


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: State = app.state.mpic
    app.state.uploads = Uploads(state)
    await app.state.uploads.start()
    yield
    async with AsyncExitStack() as closing:  # from the last line to the first, also when one of them fails
        closing.callback(state.keys.close)
        closing.push_async_callback(_aside, state.library.close)
        closing.push_async_callback(_aside, state.retriever.close)
        closing.push_async_callback(app.state.uploads.stop)
        closing.push_async_callback(_aside, state.engine.close)  # while compilations are still waited for


async def _aside(close: Callable[[], None]) -> None:
    """Run ``close`` on a thread that is there even when blocked requests hold all the others."""
    await to_thread.run_sync(close, limiter=CapacityLimiter(1))
