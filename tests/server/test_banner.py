"""The banner that a server prints when it listens."""

from types import SimpleNamespace

from mpic.config import Config
from mpic.server.run import _UvicornServer


def test_the_first_lines_name_the_page_and_the_documentation():
    info = SimpleNamespace(name="tiny", dtype="float32", device="cpu", attention="reference", details={})
    state = SimpleNamespace(
        engine=SimpleNamespace(info=info), config=Config(), keys=SimpleNamespace(exist=lambda: False)
    )
    server = object.__new__(_UvicornServer)
    server.config = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(mpic=state)))
    server.connections, server.url = SimpleNamespace(most=10), "http://127.0.0.1:8000"
    first, page, docs, *_ = server._welcome().splitlines()
    assert "http://127.0.0.1:8000" in first and "this machine only" in first
    assert page.split() == ["page", "http://127.0.0.1:8000/ui"]
    assert docs.split() == ["docs", "http://127.0.0.1:8000/docs"]
