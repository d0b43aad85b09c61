"""Errors of the SDK: the server's own tree (``mpic.errors``), raised again here, and what only a client can meet.

MPICError
├── ... every error of mpic.errors, found by the ``code`` in the server's answer
└── ClientError
    ├── Unreachable     unreachable    no connection, or it broke
    ├── TimedOut        timeout        no answer, or not compiled, in time
    └── BadResponse     bad_response   an answer that is not this API's

An answer with a code this version does not know becomes the class its status stands for, with that code.
"""

from __future__ import annotations

from typing import Any

import httpx

from mpic import errors
from mpic.errors import MPICError


class ClientError(MPICError):
    """Nothing the server said. ``status`` is 0 when there was no answer."""

    status, code = 0, "client_error"


class Unreachable(ClientError):
    code = "unreachable"


class TimedOut(ClientError):
    code = "timeout"


class BadResponse(ClientError):
    code = "bad_response"


BY_CODE = {c.code: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MPICError)}
BY_STATUS = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.TooLarge,
    429: errors.RateLimited,
    503: errors.Unavailable,
    507: errors.StorageFull,
}


def from_response(response: httpx.Response) -> MPICError:
    """The error an answer (already read) stands for."""
    try:
        return from_body(response.json()["error"], response.status_code)
    except (ValueError, KeyError, TypeError):
        error = BadResponse(f"HTTP {response.status_code} without an error body of this API")
        error.status = response.status_code
        return error


def from_body(body: dict[str, Any], status: int | None) -> MPICError:
    """The error of an OpenAI-shaped body's ``error`` object.

    Args:
        status: of the answer; None inside a stream, whose answer began well: the error keeps its class's own.
    """
    code = body["code"]
    cls = BY_CODE.get(code) or BY_STATUS.get(status or 0, MPICError)
    error = cls(body["message"], param=body.get("param"))
    error.details = body.get("details") or {}
    error.code, error.status = code, status or cls.status
    return error


def from_transport(exc: httpx.TransportError, url: httpx.URL) -> ClientError:
    """The error a failed exchange stands for."""
    what = str(exc) or type(exc).__name__
    if isinstance(exc, httpx.TimeoutException) and not isinstance(exc, httpx.ConnectTimeout):
        return TimedOut(f"no answer from {url} in time: {what}")
    return Unreachable(f"no answer from {url}: {what}. Is `mpic serve` running?")
