"""Mounts the interface in the application."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI

from mpic.http.hosts import is_loopback
from mpic.webui import about, login, pages, pictures
from mpic.webui.proxy import Proxy

if TYPE_CHECKING:
    from mpic.config import Config


def mount(app: FastAPI, config: Config) -> None:
    """Serves the interface at ``/ui``.

    Call it last: the proxy must stand in front of every other middleware, because it turns requests of the page into
    requests to the API, which those then check.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request, and a page makes many
    # it warns of every malformed form, and anybody may send one to the login
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    state = app.state.mpic
    for router in (login.router(app), pictures.router(app), about.router(app), pages.router()):
        app.router.routes.extend(router.routes)  # as they are: including them would make each a second time
    always = not is_loopback(config.server.host)
    app.add_middleware(Proxy, keys=state.keys, always=always)
