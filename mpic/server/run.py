"""From a Config to a listening server."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from mpic.config import Config, ConfigError, LibraryConfig
from mpic.keys import any_keys
from mpic.server.guard import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mpic.library import Limits
    from mpic.server.state import State

GRACE_SECONDS = 10  # running answers may finish when the server is told to stop
log = logging.getLogger("mpic.server")


def serve(config: Config, as_json: bool = False) -> None:
    """Load the model, open the library, listen until told to stop.

    Prints one line when requests are answered; with ``as_json`` that line is a JSON object.

    Raises:
        ConfigError: the address cannot be used.
        ModelRefused: the model cannot be run right.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    has_keys = any_keys(Path(config.library.data_dir))
    with bind(config.server.host, config.server.port, has_keys) as sock:
        app = build(config)
        settings = uvicorn.Config(
            app,
            log_level=config.server.log_level,
            access_log=config.server.log_level == "debug",
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
        )
        with suppress(KeyboardInterrupt):  # Ctrl-C has stopped it; there is nothing more to say
            _Server(settings, url_of(sock), as_json).run(sockets=[sock])


def bind(host: str, port: int, has_keys: bool = False) -> socket.socket:
    """A bound socket. Without API keys only loopback addresses are accepted."""
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host!r}: there are no API keys, so anyone who reaches the port could read every "
            "upload. Make one with `mpic keys create NAME --role admin`, or listen on 127.0.0.1.",
            param="host",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}", param="port") from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build(config: Config) -> FastAPI:
    """The application with a loaded engine. Slow; the imports are here so that the CLI starts at once."""
    import transformers

    from mpic.engine import load_engine
    from mpic.library import Library
    from mpic.model.load import choose_device
    from mpic.prompt import ChatTemplate
    from mpic.server.app import create_app

    transformers.utils.logging.disable_progress_bar()
    limits = limits_of(config.library)
    host, host_bytes = "none", 0
    if config.engine.engine == "native":
        device = choose_device(config.engine.device).type
        host = {"cpu": "none", "cuda": "pinned"}.get(device, "plain")
    else:  # vLLM's scheduler holds what it has read, on whatever device
        host_bytes = config.library.host_bytes
    library = Library.open(Path(config.library.data_dir), limits, host=host)
    try:
        engine, processor = load_engine(config.engine, library.store, host_bytes)
        return create_app(engine, library, ChatTemplate(processor), config)
    except BaseException:
        library.close()
        raise


def limits_of(config: LibraryConfig) -> Limits:
    """The library's limits, of which the configuration has some."""
    from mpic.library import Limits

    known = {f.name for f in dataclasses.fields(Limits)}
    return Limits(**{k: v for k, v in dataclasses.asdict(config).items() if k in known})


class _Server(uvicorn.Server):
    """Says where it listens, once it does."""

    def __init__(self, config: uvicorn.Config, url: str, as_json: bool) -> None:
        super().__init__(config)
        self.url = url
        self.as_json = as_json

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        print(json.dumps({"url": self.url}) if self.as_json else self._welcome(), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.leaving.set()  # open pages of the web interface would hold it up  # type: ignore[union-attr]
        await super().shutdown(sockets)

    def _welcome(self) -> str:
        state: State = self.config.app.state.mpic  # type: ignore[union-attr]
        info, config = state.engine.info, state.config
        return (
            f"MPIC listens on {self.url} ({_who(state)})\n"
            f"  model    {info.name}, {info.dtype} on {info.device}, attention {info.attention}\n"
            f"  policy   {config.engine.policy}\n"
            f"  library  {config.library.data_dir}\n"
            f"  docs     {self.url}/docs"
        )


def _who(state: State) -> str:
    """Who may call, in words."""
    if not state.keys.exist():
        return "for this machine only: there are no API keys"
    if is_loopback(state.config.server.host):
        return "for this machine only, with an API key"
    return f"with an API key, by address{' or as ' + state.config.server.hosts if state.config.server.hosts else ''}"
