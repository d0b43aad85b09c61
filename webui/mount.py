"""Mounts the page in the server's application."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI

from mpic.http.hosts import is_loopback
from mpic.webui.gate import ROOT, PageGate
from mpic.webui.page import Page
from mpic.webui.visitors import ServedLogins

if TYPE_CHECKING:
    from mpic.config import Config
    from mpic.keys import Key


def mount(app: FastAPI, config: Config) -> Page:
    """Serve the page at ``/ui`` and return it; close it when the application ends.

    Call it last: the gate must stand in front of every other middleware, which then know the visitor.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request, and a page makes many
    # it warns of every malformed form, and anybody may send one to the login
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    state = app.state.mpic

    async def admit(key: Key) -> str:
        state.rates.count(key)
        # it waits for the disk, on the user's own share of the threads
        return await state.pools.prompts.call(key.user, state.keys.log_in, key)

    logins = ServedLogins(app, state.keys, not is_loopback(config.server.host), admit)
    page = Page(logins, config.library.upload_bytes)
    app.mount(ROOT, page)
    app.add_middleware(PageGate, logins=logins)
    return page
