"""Errors of the SDK: the server's errors (``mpic.errors``), which the client raises again, and those that only a client
raises.

MPICError
├── ... every error of mpic.errors, found by the ``code`` in the server's answer
└── ClientError
    ├── Unreachable     unreachable    no connection, or it broke
    ├── ClientClosed    client_closed  the client was closed already
    ├── TimedOut        timeout        no answer, or not compiled, in time
    └── BadResponse     bad_response   an answer that is not from this API

An answer with a code that this version does not know becomes the class of its status, with that code.
"""

from __future__ import annotations

from typing import Any

import httpx

from mpic import errors
from mpic.client.retry import retry_after
from mpic.errors import MPICError


class ClientError(MPICError):
    """An error of the client, which no server reported. ``status`` is 0 when there was no response."""

    status, code = 0, "client_error"


class Unreachable(ClientError):
    code = "unreachable"


class ClientClosed(ClientError):
    code = "client_closed"


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
    """Return the error in a response that has been read, with the wait that its Retry-After asks for."""
    try:
        error = from_body(response.json()["error"], response.status_code)
    except (ValueError, KeyError, TypeError):
        error = BadResponse(f"HTTP {response.status_code} without an error body of this API")
        error.status = response.status_code
    asked = retry_after(response)
    if isinstance(error, errors.RateLimited | errors.Unavailable) and asked is not None:
        error.retry_after = asked
    return error


def from_body(body: dict[str, Any], status: int | None) -> MPICError:
    """Return the error in the ``error`` object of a body.

    Args:
        status: the status of the response; None inside a stream, whose own status was 200: the error then has the
            status of its class.
    """
    code = body["code"]
    cls = BY_CODE.get(code) or BY_STATUS.get(status or 0, MPICError)
    error = cls(body["message"], param=body.get("param"))
    error.details = body.get("details") or {}
    error.code, error.status = code, status or cls.status
    return error


def from_transport(exc: httpx.RequestError, url: httpx.URL) -> ClientError:
    """Return the error for an exception of httpx."""
    what = str(exc) or type(exc).__name__
    if isinstance(exc, httpx.PoolTimeout):
        return TimedOut(
            f"no connection to {url} was free in time: too many requests or open streams of this client"
        )
    if isinstance(exc, httpx.TimeoutException) and not isinstance(exc, httpx.ConnectTimeout):
        return TimedOut(f"no answer from {url} in time: {what}")
    if isinstance(exc, httpx.DecodingError):
        return BadResponse(f"an answer from {url} cannot be decoded: {what}")
    if isinstance(exc, httpx.LocalProtocolError):
        return ClientError(f"the request to {url} cannot be sent: {what}")
    return Unreachable(f"no answer from {url}: {what}. Is `mpic serve` running?")
