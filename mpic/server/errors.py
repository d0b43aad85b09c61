"""Every failure leaves as an OpenAI-shaped body with one stable code; nothing of our inside leaks."""

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
from mpic.errors import (
    BadRequest,
    MethodNotAllowed,
    MPICError,
    NotFound,
    OutOfMemory,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedModality,
    UnsupportedParameter,
)
from mpic.server.schemas import UNSUPPORTED
from mpic.server.sse import ClientGone

log = logging.getLogger("mpic.server")
CHAT = "/v1/chat/completions"
CLIENT_CLOSED = 499  # nobody reads it; it shows in the access log
INSIDE = (("image_url", "detail"), ("file", "file_data"), ("stream_options", "include_obfuscation"))
"""Names of ``UNSUPPORTED`` that are not fields of the request itself, with what holds them."""


def install(app: FastAPI) -> None:
    """Register the handlers that turn exceptions into bodies."""
    app.add_exception_handler(MPICError, _mpic_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)


def as_mpic_error(exc: BaseException) -> MPICError:
    """The error to show for any exception: ours as it is, everything else as a plain internal error, logged."""
    if isinstance(exc, MPICError) and type(exc) is not MPICError:
        if isinstance(exc, Unavailable):  # the message says it all, and every request may end so
            log.error("%s: %s", exc.code, exc.message)
        elif exc.status >= 500:
            log.error("%s: %s", exc.code, exc.message, exc_info=exc)
        return exc
    log.error("unexpected %s", type(exc).__name__, exc_info=exc)
    if memory.is_exhaustion(exc):
        return OutOfMemory("the server has not enough memory for this request now")
    return MPICError("the server made a mistake; its log says more")


def response(error: MPICError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        error.body(), status_code=error.status, headers={**_headers(error), **(headers or {})}
    )


def _headers(error: MPICError) -> dict[str, str]:
    """What the status asks for."""
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RateLimited | Unavailable) and error.retry_after is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {}


async def _mpic_error(request: Request, exc: Exception) -> JSONResponse:
    return response(as_mpic_error(exc))


async def _unexpected(request: Request, exc: Exception) -> JSONResponse:
    return response(as_mpic_error(exc))


async def _client_gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _http_error(request: Request, exc: Exception) -> Response:
    """Starlette's own errors: unknown routes, wrong methods, bodies that do not parse."""
    assert isinstance(exc, HTTPException)
    cause = exc.__cause__  # raised while FastAPI was reading the body, it says
    if cause is not None and (isinstance(cause, MPICError) or memory.is_exhaustion(cause)):
        return response(as_mpic_error(cause))
    if isinstance(cause, ClientGone):
        return await _client_gone(request, cause)
    where = f"{request.method} {request.url.path}"
    error: MPICError
    match exc.status_code:
        case 404:
            error = NotFound(f"no such route: {where}; see /docs for what there is")
        case 405:
            error = MethodNotAllowed(f"{where} is not allowed; see /docs for what is")
            return response(error, {"Allow": _allowed(request)})
        case 413:
            error = TooLarge(str(exc.detail))
        case status if status < 500:
            error = BadRequest(str(exc.detail))
        case _:
            error = as_mpic_error(exc)
    return response(error, dict(exc.headers or {}))


def _allowed(request: Request) -> str:
    """All methods of a path (the one with the fewest parameters that matches); each route knows only its own."""
    found = [
        r for r in request.app.routes if isinstance(r, Route) and r.matches(request.scope)[0] != Match.NONE
    ]
    path = min(found, key=lambda r: len(r.param_convertors)).path
    return ", ".join(sorted({m for r in found if r.path == path for m in r.methods or ()}))


async def _validation_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    return response(from_validation(exc.errors(), exc.body, request.url.path == CHAT))


def from_validation(errors: Sequence[Any], body: Any, chat: bool) -> MPICError:
    """What is wrong with a request's shape, named: a parameter we lack before all others, the deepest place next.

    Args:
        chat: it is a chat completion, of whose fields ``UNSUPPORTED`` says why we lack them.
    """
    first = max(errors, key=lambda e: (_unsupported(e, chat) is not None, len(e["loc"])))
    name, kind, message = _unsupported(first, chat), first["type"], first["msg"].removeprefix("Value error, ")
    path = _path(first["loc"], body, name)
    if name is not None:
        why = UNSUPPORTED.get(name) if chat and name == _known(first["loc"]) else ""
        return UnsupportedParameter(
            f"{path} is not supported by this server" + (f": {why}" if why else ""), param=path
        )
    if kind == "json_invalid":
        return BadRequest(f"the body is not JSON: {first.get('ctx', {}).get('error', message)}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return UnsupportedModality(
            f"{path}: content parts are text, image_url, image, file, document or cache", param=path
        )
    if kind == "missing":
        return BadRequest(f"{path} is required", param=path)
    message = message[:1].lower() + message[1:]
    return BadRequest(f"{path}: {message}" if path else message, param=path)


def _unsupported(error: Any, chat: bool) -> str | None:
    """The name of the parameter we lack, if that is what the error is about."""
    if error["type"] == "extra_forbidden":
        return str(error["loc"][-1])
    return _known(error["loc"]) if chat else None


def _known(loc: Sequence[int | str]) -> str | None:
    """The parameter in ``UNSUPPORTED`` that a place in a chat completion belongs to. Other things (metadata of
    references in a filter, say) may be called so too."""
    if tuple(loc[-2:]) in INSIDE:
        return str(loc[-1])
    return str(loc[1]) if len(loc) > 1 and loc[1] in UNSUPPORTED else None


def _path(loc: Sequence[int | str], body: Any, stop: str | None) -> str | None:
    """``("body", "messages", 0, "content", "str")`` -> ``messages[0].content``: what pydantic adds about unions is
    left out by walking the body along; the way ends at ``stop``."""
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
