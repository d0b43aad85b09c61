"""The FastAPI application."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.routing import BaseRoute

from mpic import webui
from mpic.api.resources import ErrorBody
from mpic.config import Config, origins
from mpic.http import errors
from mpic.http.hosts import is_loopback
from mpic.http.prefix import ProxyPrefix
from mpic.keys import KeyStore
from mpic.link import AUTO
from mpic.retriever import Embedder, Retriever
from mpic.server import docs
from mpic.server.auth import Authenticate
from mpic.server.auto import Auto
from mpic.server.background import BackgroundJobs
from mpic.server.cutting import cut_document
from mpic.server.forms import FormCharset
from mpic.server.guard import BodyLimit, CookieFilter, HostGuard
from mpic.server.metrics import Metrics, ResponseCounter
from mpic.server.routers import (
    caches,
    chat,
    embeddings,
    files,
    health,
    messages,
    metrics,
    models,
    references,
    responses,
    savings,
    texts,
    uploads,
)
from mpic.server.savings import SavingsLedger
from mpic.server.state import State
from mpic.server.thread_pools import DiskProbe
from mpic.server.uploads import AT_ONCE, PartedUploads, UploadsUnderWay
from mpic.version import VERSION
from mpic.webui.visitors import COOKIE, COOKIE_VALUE

if TYPE_CHECKING:
    from mpic.engine.base import Engine
    from mpic.library import Library
    from mpic.prompt import ChatTemplate

KEY_PATIENCE = 0.25
"""Seconds a request waits for the key store, which is asked on the event loop, where everybody waits."""

ROUTERS = (
    chat.router,
    texts.router,
    messages.router,
    responses.router,
    embeddings.router,
    files.router,
    uploads.router,
    caches.router,
    references.router,
    savings.router,
    models.router,
    health.router,
    metrics.router,
)


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes of the API. All applications of a process share them, because FastAPI takes longer to prepare
    them than everything else takes together."""
    shared = APIRouter(
        responses={"4XX": {"model": ErrorBody, "description": "an error the caller can correct"}}
    )
    for router in ROUTERS:
        shared.include_router(router)
    return shared.routes


def create_app(
    engine: Engine, library: Library, template: ChatTemplate, config: Config | None = None
) -> FastAPI:
    """Return the application over a running engine and an open library, both of which it closes at shutdown."""
    config = config or Config()
    template = template.within(engine.info.context_length)
    library.files.tokenize = library.references.tokenize = template.tokenize_document
    library.files.no_clips = engine.info.no_clips
    library.files.cut = lambda text, split: cut_document(
        text, split, template.documents, engine.info.context_length
    )
    app = FastAPI(
        title="MPIC",
        version=VERSION,
        description="Multimodal LLM serving with position-independent KV caching. OpenAI-shaped.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
    )
    keys = KeyStore(library.root, patience=KEY_PATIENCE)
    collected = Metrics(engine, library)
    search = config.retrieval
    embedder = Embedder(search.embedder, search.embedder_weights, search.embedder_device)
    retriever = Retriever(library, embedder, search.duplicates, search.approximate_from)
    auto = Auto.of_model(engine.info, library.root)
    if config.engine.policy == AUTO:
        auto.check_press(config.engine.press)
    ledger = SavingsLedger(library.root, engine.info.digest)
    probe = DiskProbe(library.probe)
    under_way = UploadsUnderWay(AT_ONCE * config.library.upload_bytes, tempfile.gettempdir(), library.root)
    app.state.mpic = State(
        engine,
        library,
        template,
        config,
        int(time.time()),
        keys,
        collected,
        retriever,
        ledger,
        probe,
        under_way,
        PartedUploads(under_way, library.clock),
        auto,
    )
    app.router.routes.extend(_routes())
    app.add_api_route("/", _home, include_in_schema=False)
    app.add_api_route("/docs", _docs, include_in_schema=False)
    errors.install(app)
    app.add_middleware(FormCharset)
    largest = {"uploads": config.library.upload_bytes, "other": config.server.max_body_bytes}
    app.add_middleware(BodyLimit, under_way=under_way, **largest)
    reachable = not is_loopback(config.server.host)
    app.add_middleware(Authenticate, keys=keys, rates=app.state.mpic.rates, always=reachable)
    allowed = origins(config.server)
    app.add_middleware(HostGuard, keys=keys, names=config.server.hosts, origins=allowed)
    app.add_middleware(ResponseCounter, metrics=collected)
    app.state.page = webui.mount(app, config)
    if allowed:  # before the check of keys, which a browser does not send with a preflight request
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "Content-Disposition", "Content-Range", "ETag"],
            max_age=3600,
        )
    app.add_middleware(messages.MessagesErrors)
    app.add_middleware(CookieFilter, name=COOKIE, value=COOKIE_VALUE)  # before the web interface, too
    app.add_middleware(ProxyPrefix, root_path=config.server.root_path)
    return app


async def _docs(request: Request) -> HTMLResponse:
    return HTMLResponse(docs.page(request.app.openapi()), headers={"Content-Security-Policy": docs.CSP})


async def _home(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/ui")


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: State = app.state.mpic
    app.state.background = BackgroundJobs(state)
    # closes in reverse order, also after a start that failed, and even if one of the steps fails
    async with AsyncExitStack() as closing:
        closing.callback(state.keys.close)
        closing.push_async_callback(_on_own_thread, state.library.close)
        closing.push_async_callback(_on_own_thread, state.savings.flush)
        closing.push_async_callback(_on_own_thread, state.retriever.close)
        closing.callback(state.parted.close)
        closing.push_async_callback(app.state.background.stop)
        closing.push_async_callback(app.state.page.close)
        # while compilations are still waited for
        closing.push_async_callback(_on_own_thread, state.engine.close)
        await app.state.background.start()
        yield


async def _on_own_thread(close: Callable[[], None]) -> None:
    """Run ``close`` on an extra thread, because blocked requests may hold all the others."""
    await to_thread.run_sync(close, limiter=CapacityLimiter(1))
