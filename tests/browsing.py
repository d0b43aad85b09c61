"""A real browser for the tests and the screenshots of the web interface."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from threads_kit import started

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGS = [
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 180_000  # milliseconds: many suites may share a machine
LOOPBACK = ("127.0.0.1", "localhost", "::1", None)


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def open_browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=ARGS, timeout=PATIENCE)
        yield browser
        browser.close()


class Watched:
    """Records the requests and errors of a page."""

    def __init__(self, page) -> None:
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda r: self.urls.append(r.url))
        page.on("websocket", lambda w: self.urls.append(w.url))
        page.on("pageerror", lambda e: self.complaints.append(str(e)))
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)

    def left_loopback(self) -> list[str]:
        return [
            u
            for u in self.urls
            if not u.startswith(("data:", "blob:")) and urlsplit(u).hostname not in LOOPBACK
        ]


@contextmanager
def serving(app, port: int = 0) -> Iterator[str]:
    """Serve an application in a thread, on a free port of this machine unless one is given."""
    import uvicorn

    sock = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = started(server.run, [sock])
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()
