"""What both clients share: where the server is, who asks, and how a call becomes a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from mpic import __version__
from mpic.client.calls import Call
from mpic.client.errors import TimedOut
from mpic.client.retry import Retry
from mpic.errors import CompileFailed

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(10, read=600, write=600)
KEY_VARIABLE = "MPIC_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


def settings(base_url: str, api_key: str | None, timeout: float | httpx.Timeout | None) -> dict[str, Any]:
    """Arguments of an httpx client.

    Args:
        base_url: with or without a final ``/v1``.
        api_key: None reads the environment variable MPIC_API_KEY; "" sends none.
    """
    url = base_url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
    headers = {"User-Agent": f"mpic-python/{__version__}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {
        "base_url": url,
        "headers": headers,
        "timeout": TIMEOUT if timeout is None else timeout,
        "trust_env": httpx.URL(url).host not in LOCAL,  # proxies do not reach this machine
    }


def may_repeat(call: Call[Any], retry: Retry) -> Retry:
    """No second attempt of an upload that cannot be read twice."""
    return retry if call.upload is None or call.upload.replayable else Retry(most=0)


@contextmanager
def request_options(call: Call[Any]) -> Iterator[dict[str, Any]]:
    """Arguments of an httpx request; an upload's file is open meanwhile."""
    options: dict[str, Any] = {"params": call.params or None}
    if call.json is not None:
        options["json"] = call.json
    if call.upload is None:
        yield options
    else:
        with call.upload.opened() as file:
            yield {**options, "data": call.form, "files": {"file": file}}


def settled(thing: Any, what: str) -> bool:
    """Whether an upload is compiled. Raises CompileFailed: it cannot be."""
    if thing.state == "failed":
        own = getattr(thing, "status_details", None) or getattr(thing, "error", None)
        chunks = [c.error for c in getattr(thing, "chunks", ()) if c.error]
        raise CompileFailed(f"{what}: {own or '; '.join(chunks) or 'not compiled'}", id=thing.id)
    return bool(thing.state == "ready")


def too_slow(what: str, timeout: float) -> TimedOut:
    return TimedOut(f"{what} is not compiled after {timeout:g} s")


def pauses() -> Iterator[float]:
    """Seconds between two looks at something that is being compiled."""
    pause = 0.05
    while True:
        yield pause
        pause = min(1.0, pause * 1.5)


def name_of(thing: Any) -> str:
    return getattr(thing, "filename", None) or getattr(thing, "name", None) or thing.id
