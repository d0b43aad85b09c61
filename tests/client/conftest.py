"""One client for each way to reach a server: by socket or in this process, synchronous or not. Tests are written
once."""

import asyncio

import pytest
from server_helpers import SMALL_POOL

from mpic import MPIC, AsyncMPIC


class Blocking:
    """Wraps an AsyncMPIC so that it can be used like an MPIC: results are awaited here."""

    def __init__(self, thing, loop):
        self._thing, self._loop = thing, loop

    def __getattr__(self, name):
        value = getattr(self._thing, name)
        if not callable(value) and not type(value).__module__.startswith("mpic.client.resources"):
            return value
        return Blocking(value, self._loop)

    def __call__(self, *args, **options):
        value = self._thing(*args, **options)
        if asyncio.iscoroutine(value):
            value = self._loop.run_until_complete(value)
        return Blocking(value, self._loop) if hasattr(value, "__aiter__") else value

    def __iter__(self):
        items = aiter(self._thing)
        while (item := self._loop.run_until_complete(anext(items, None))) is not None:
            yield item

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._loop.run_until_complete(self._thing.close())


@pytest.fixture(scope="session", params=["socket", "in-process", "async socket", "async in-process"])
def client(request, url, tiny_model):
    local = request.param.endswith("in-process")
    if request.param.startswith("async"):
        loop = asyncio.new_event_loop()
        made = AsyncMPIC.local(tiny_model, **SMALL_POOL) if local else AsyncMPIC(url)
        with Blocking(made, loop) as client:
            yield client
        loop.close()
    else:
        with MPIC.local(tiny_model, **SMALL_POOL) if local else MPIC(url) as client:
            yield client
