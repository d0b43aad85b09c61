"""Starts a server from a ``Config``."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import uvicorn

from mpic import memory, preflight
from mpic.config import Config, ConfigError, ServerConfig
from mpic.http.hosts import is_loopback, seen_from_here
from mpic.http.listening import bind, url_of
from mpic.keys import any_keys
from mpic.limits import MiB
from mpic.link import AUTO
from mpic.server import descriptors
from mpic.server.connections import Connections
from mpic.server.protocol import ClientConnection, FrontDoor, quiet_uvicorn
from mpic.server.shutdown import ShutdownTimer

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mpic.server.state import State

BACKLOG = 1024  # maximum number of connections that wait to be accepted
SWITCH_SECONDS = 0.0005
"""Seconds a thread may keep the interpreter while others want it, a tenth of Python's default.

The engine's thread releases the interpreter around every operation of the model, hundreds of times a step, and waits
this long for each thread that computes in Python. With the default, a few long prompts at once hold up every stream.
"""
log = logging.getLogger("mpic.server")


def serve(config: Config, as_json: bool = False) -> None:
    """Load the model, open the library, and listen until told to stop.

    Print one line once requests are answered; with ``as_json`` that line is a JSON object.

    Raises:
        ConfigError, Unavailable: see ``preflight.check``.
        ModelRefused: the model cannot be run correctly.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_SECONDS)
    preflight.check(config)
    has_keys = any_keys(Path(config.library.data_dir))
    limit = descriptors.raise_limit()
    with bind(config.server.host, config.server.port, has_keys) as sock:
        connections = Connections(
            config.server, descriptors.connection_limit(limit, config.server.max_connections)
        )
        app = build(config)
        app.state.mpic.metrics.registry.register(connections)
        settings = uvicorn_config(app, config.server, connections)
        with suppress(KeyboardInterrupt):  # Ctrl-C has stopped it, and no traceback is needed
            url = url_of(sock)
            said = json.dumps({"url": url}) if as_json else welcome(app.state.mpic, url, connections.most)
            _UvicornServer(settings, connections, said).run(sockets=[sock])


def uvicorn_config(app: FastAPI, config: ServerConfig, connections: Connections) -> uvicorn.Config:
    """Return how uvicorn serves the application: behind our limits, and without websockets."""
    quiet_uvicorn()
    return uvicorn.Config(
        FrontDoor(app, config),
        http=partial(ClientConnection, connections),  # ty: ignore[invalid-argument-type] (it only calls it)
        h11_max_incomplete_event_size=2
        * config.max_header_bytes,  # up to where ``FrontDoor`` says what is wrong
        ws="none",
        backlog=BACKLOG,
        log_level=config.log_level,
        access_log=config.log_level == "debug",
        timeout_keep_alive=config.keep_alive_seconds,  # ty: ignore[invalid-argument-type] (asyncio takes fractions)
        timeout_graceful_shutdown=config.grace_seconds,  # ty: ignore[invalid-argument-type] (as above)
        proxy_headers=False,  # ``FrontDoor`` has them
        server_header=False,
    )


@memory.collector_paused()
def build(config: Config, on_stage: Callable[[str], None] = lambda stage: None) -> FastAPI:
    """Return the application with a loaded engine. It is slow; its imports are here so that the CLI starts at once.

    Args:
        on_stage: called with each stage that begins.
    """
    import transformers.utils.logging

    from mpic.engine import load_engine
    from mpic.library import Library
    from mpic.model.load import choose_device
    from mpic.prompt import ChatTemplate
    from mpic.server.app import create_app
    from mpic.server.staging import with_staging

    memory.few_arenas()
    transformers.utils.logging.disable_progress_bar()
    host: Literal["none", "plain", "pinned"] = "none"
    host_bytes, limits = None, config.library.limits()
    if config.engine.engine == "native":
        device = choose_device(config.engine.device).type
        host = "none" if device == "cpu" else "pinned" if device == "cuda" else "plain"
        if device == "cuda":
            config, limits = with_staging(config, limits)
    else:  # vLLM's scheduler holds what it has read, on whatever device
        host_bytes = config.library.host_bytes
        if config.library.user_host_bytes:
            raise ConfigError(
                "user_host_bytes: the vllm engine has no shares of users in host memory; leave it 0",
                param="user_host_bytes",
            )
    on_stage(f"opening the library in {config.library.data_dir}")
    with ExitStack() as undo:
        remote = config.library.remote_tiers()
        library = Library.open(Path(config.library.data_dir), limits, host=host, remote=remote)
        undo.callback(library.close)
        on_stage(f"loading and checking the model {Path(config.engine.model).name}")
        engine, processor = load_engine(config.engine, library.store, host_bytes)  # ty: ignore[invalid-argument-type] (a TieredStore takes some of its methods from its disk)
        undo.callback(engine.close)
        app = create_app(engine, library, ChatTemplate(processor), config)
        undo.pop_all()  # the application closes both
        return app


class _UvicornServer(uvicorn.Server):
    """Says something once it listens, and ends in time even if a thread is blocked."""

    def __init__(self, config: uvicorn.Config, connections: Connections, said: str) -> None:
        super().__init__(config)
        self.connections = connections
        self.said = said
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = connections.config
        self.shutdown_timer = ShutdownTimer(limits.grace_seconds, limits.closing_seconds)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.should_exit:
            return
        self.connections.watch()
        print(self.said, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown at the first signal; a second signal ends the grace period of running answers."""
        self.shutdown_timer.signalled()
        if self.should_exit and self._loop is not None:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self.connections.drop)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then does not shut the application down
            await self.lifespan.shutdown()
        self.shutdown_timer.closed()


def welcome(state: State, url: str, most: int) -> str:
    """Return the first lines of a server at this address, which keeps so many connections."""
    info, config = state.engine.info, state.config
    weights = ""
    if quantized := info.details.get("quantization"):
        weights = f", weights quantised ({quantized['method']}, {quantized['bytes'] / MiB:,.0f} MiB)"
    if (kept := info.details.get("kv_dtype", info.dtype)) != info.dtype:
        weights += f", keys and values in {kept}"
    checks = f"  checks   self-test {info.details['self_test']}\n" if "self_test" in info.details else ""
    note = f"  note     {info.details['dtype_note']}\n" if info.details.get("dtype_note") else ""
    here = seen_from_here(url)
    return (
        f"MPIC listens on {url} ({_who_may_call(state)})\n"
        f"  page     {here}/ui\n"
        f"  docs     {here}/docs\n"
        f"  model    {info.name}, {info.dtype} on {info.device}, attention {info.attention}{weights}\n"
        f"{note}{checks}"
        f"  policy   {_policy(state)}\n"
        f"  library  {config.library.data_dir}\n"
        f"  clients  at most {most:,} connections, "
        f"{config.server.max_connections_per_address:,} of one address"
    )


def _policy(state: State) -> str:
    """Return the default policy, and what ``auto`` means."""
    named = state.config.engine.policy
    return named if named != AUTO else f"{AUTO}: {state.auto.explanation}"


def _who_may_call(state: State) -> str:
    """Return a description of who may call the server."""
    if not state.keys.exist():
        return "for this machine only: there are no API keys"
    if is_loopback(state.config.server.host):
        return "for this machine only, with an API key"
    return f"with an API key, by address{' or as ' + state.config.server.hosts if state.config.server.hosts else ''}"
