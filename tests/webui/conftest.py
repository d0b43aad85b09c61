"""One browser for the tests of a module, with pages that record their requests."""

from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from browsing import PATIENCE, Watched, find_browser, open_browser, serving
from fake_engine import FakeEngine
from server_helpers import chat_template

from mpic.config import Config, EngineConfig
from mpic.library import Library
from mpic.server import create_app

LEAVING = ("AbortError", "errored out")
"""Complaints of Gradio when a page is left while it waits for an event."""


@pytest.fixture(scope="module")
def browser():
    """A browser of a module's tests, and not of more: while it is open Playwright's own loop runs, and no async test
    can. `make test` installs one; a run without it says so."""
    if find_browser() is None:
        pytest.skip("no chromium on this machine: tools/get_chromium.sh says how to get it")
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Open pages; at the end none may have asked for anything beyond this machine, or complained unexpectedly.

    ``context`` takes another page of the same browser profile; ``before`` is a script that runs before the page's own.
    """
    contexts, watched = [], []

    def opened(url, expected=(), context=None, ready=True, before=None, **options):
        if context is None:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
            contexts.append(context)
            context.set_default_timeout(PATIENCE)
        page = context.new_page()
        if before:
            page.add_init_script(before)
        watched.append((Watched(page), expected))
        page.goto(url)
        if ready:
            page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    for seen, expected in watched:
        assert seen.left_loopback() == []
        assert [c for c in seen.complaints if not any(e in c for e in (*expected, *LEAVING))] == []


class Fake:
    """A server over an engine that computes nothing; it can be stopped and started again at the same address."""

    def __init__(self, root):
        self._root, self._stack, self._port = root, ExitStack(), 0
        self.start()

    def start(self):
        self.engine = FakeEngine(context=8192, pool=8192, pause=0.01)
        self.library = Library.open(self._root)
        config = Config(engine=EngineConfig(policy="mpic-16"))
        self.app = create_app(self.engine, self.library, chat_template(), config)
        self.keys = self.app.state.mpic.keys
        self.base = self._stack.enter_context(serving(self.app, self._port))
        self._port = urlsplit(self.base).port
        self.url = f"{self.base}/ui/"

    def stop(self):
        self._stack.close()


@pytest.fixture
def fake(tmp_path, browser):
    fake = Fake(tmp_path)
    yield fake
    fake.stop()
