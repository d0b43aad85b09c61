"""Turns every failure into an OpenAI-shaped body with a stable code, which reveals nothing internal."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from mpic import memory
from mpic.api.openai_fields import BY_NAME, OPENAI_FIELDS
from mpic.durable import FULL
from mpic.errors import (
    BadRequest,
    MethodNotAllowed,
    MPICError,
    NotFound,
    OutOfMemory,
    RateLimited,
    StorageFull,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedModality,
    UnsupportedParameter,
)
from mpic.http.sse import ClientDisconnected

log = logging.getLogger("mpic.server")
CHAT = "/v1/chat/completions"
INTERNAL = "an internal error of the server; its log has the details"
CLIENT_CLOSED = 499  # the status is for the access log, as no client reads the response
NESTED = tuple((field.inside, field.name) for field in OPENAI_FIELDS if field.inside)
"""Fields of OpenAI's that do not stand in the request itself, behind the field that holds them."""


def install(app: FastAPI) -> None:
    """Registers the handlers that turn exceptions into bodies."""
    app.add_exception_handler(MPICError, _any_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _client_gone)
    app.add_exception_handler(Exception, _any_error)


def as_mpic_error(exc: BaseException) -> MPICError:
    """Returns the error to show for any exception (``shown_for``), and logs what an operator must know."""
    error = shown_for(exc)
    if error is not exc:
        log.error("A request failed with an unexpected %s.", type(exc).__name__, exc_info=exc)
    elif isinstance(error, Unavailable):
        # logged without a traceback: the message is enough, and many requests may fail this way
        log.error("%s: %s", error.code, error.message)
    elif error.status >= 500:
        log.error("%s: %s", error.code, error.message, exc_info=exc)
    return error


def shown_for(exc: BaseException) -> MPICError:
    """Returns the error to show for any exception: an MPICError as it is, everything else as an internal error."""
    if isinstance(exc, MPICError) and type(exc) is not MPICError:
        return exc
    if memory.is_exhaustion(exc):
        return OutOfMemory("the server has not enough memory for this request now")
    return MPICError(INTERNAL)


def response(error: MPICError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        error.body(), status_code=error.status, headers={**_headers(error), **(headers or {})}
    )


def _headers(error: MPICError) -> dict[str, str]:
    """Returns the headers that belong to the status."""
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RateLimited | Unavailable) and error.retry_after is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {}


async def _any_error(request: Request, exc: Exception) -> JSONResponse:
    return response(as_mpic_error(exc))


async def _client_gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _http_error(request: Request, exc: Exception) -> Response:
    """Handles Starlette's own errors: unknown routes, wrong methods, bodies that cannot be parsed."""
    assert isinstance(exc, HTTPException)
    cause = exc.__cause__  # one of our errors, if it was raised while FastAPI read the body
    if isinstance(cause, OSError):
        return response(as_mpic_error(_spool_error(cause)))
    if cause is not None and (isinstance(cause, MPICError) or memory.is_exhaustion(cause)):
        return response(as_mpic_error(cause))
    if isinstance(cause, ClientDisconnected):
        return await _client_gone(request, cause)
    where = f"{request.method} {request.url.path}"
    error: MPICError
    match exc.status_code:
        case 404:
            error = NotFound(f"no such route: {where}; see /docs for the routes")
        case 405:
            error = MethodNotAllowed(f"{where} is not allowed; see /docs for the methods")
            return response(error, {"Allow": _allowed(request)})
        case 413:
            error = TooLarge(str(exc.detail))
        case status if status < 500:
            error = BadRequest(str(exc.detail))
        case _:
            error = as_mpic_error(exc)
    return response(error, dict(exc.headers or {}))


def _spool_error(error: OSError) -> Exception:
    """Returns the error of a form whose files the folder for temporary files, where they are spooled, does not take:
    StorageFull if it is full, any other as it is."""
    if error.errno not in FULL:
        return error
    full = StorageFull("the server's folder for temporary files (TMPDIR) is full; nothing was stored")
    full.__cause__ = error  # for the log
    return full


def _allowed(request: Request) -> str:
    """Returns all methods of the matching path with the fewest parameters, since each route knows only its own
    methods."""
    found = [
        r for r in request.app.routes if isinstance(r, Route) and r.matches(request.scope)[0] != Match.NONE
    ]
    path = min(found, key=lambda r: len(r.param_convertors)).path
    return ", ".join(sorted({m for r in found if r.path == path for m in r.methods or ()}))


async def _validation_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    return response(from_validation(exc.errors(), exc.body, request.url.path == CHAT))


def from_validation(errors: Sequence[Any], body: Any, chat: bool) -> MPICError:
    """Returns the error to report for a malformed request: unsupported parameters first, then the deepest field.

    Args:
        chat: the request is a chat completion, for whose fields ``OPENAI_FIELDS`` gives reasons.
    """
    first = max(errors, key=lambda e: (_unsupported(e, chat) is not None, len(e["loc"])))
    name, kind, message = _unsupported(first, chat), first["type"], first["msg"].removeprefix("Value error, ")
    path = _path(first["loc"], body, name)
    if name is not None:
        field = BY_NAME.get(name) if chat and name == _known(first["loc"]) else None
        why = field.why if field else ""
        return UnsupportedParameter(
            f"{path} is not supported by this server" + (f": {why}" if why else ""), param=path
        )
    if kind == "json_invalid":
        return BadRequest(f"the body is not JSON: {first.get('ctx', {}).get('error', message)}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return UnsupportedModality(
            f"{path}: content parts are text, image_url, video_url, image, file, document or cache",
            param=path,
        )
    if kind == "missing":
        return BadRequest(f"{path} is required", param=path)
    message = message[:1].lower() + message[1:]
    return BadRequest(f"{path}: {message}" if path else message, param=path)


def _unsupported(error: Any, chat: bool) -> str | None:
    """Returns the name of the unsupported parameter that the error is about; None if it is about something else."""
    if error["type"] == "extra_forbidden":
        return str(error["loc"][-1])
    return _known(error["loc"]) if chat else None


def _known(loc: Sequence[int | str]) -> str | None:
    """Returns the field of ``OPENAI_FIELDS`` that a place in a chat completion belongs to, if any.

    Other fields may have the same names, such as metadata of references in a filter.
    """
    if tuple(loc[-2:]) in NESTED:
        return str(loc[-1])
    return str(loc[1]) if len(loc) > 1 and loc[1] in BY_NAME else None


def _path(loc: Sequence[int | str], body: Any, stop: str | None) -> str | None:
    """Returns the path of a field: ``("body", "messages", 0, "content", "str")`` -> ``messages[0].content``.

    The body tells which parts pydantic has added for unions. The path ends at ``stop``.
    """
    source, *rest = loc
    if source != "body" or not isinstance(body, dict):  # query, path and form fields are flat
        return str(rest[-1]) if rest else None
    out, at = "", body
    for i, part in enumerate(rest):
        inside = part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int)
        if inside:
            at = at[part]
        elif i < len(rest) - 1 or not isinstance(at, dict):
            continue
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
        if part == stop:
            break
    return out or None
