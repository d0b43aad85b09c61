"""Turn every failure into an OpenAI-shaped body with a stable code that reveals nothing internal."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from mpic import memory
from mpic.api.openai_fields import BY_NAME
from mpic.api.requests import WrongField
from mpic.errors import (
    FACT,
    BadRequest,
    MethodNotAllowed,
    MPICError,
    NotFound,
    OutOfMemory,
    RangeNotSatisfiable,
    RateLimited,
    StorageFull,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedModality,
    UnsupportedParameter,
    cut,
)
from mpic.http.sse import ClientDisconnected

log = logging.getLogger("mpic.server")
CHAT = "/v1/chat/completions"
INTERNAL = "an internal error of the server; its log has the details"
CLIENT_CLOSED = 499  # the status is for the access log, as no client reads the response
Place = tuple[int | str, ...]
"""The names and positions that lead to a value of a request."""


def install(app: FastAPI) -> None:
    """Register the handlers that turn exceptions into bodies."""
    app.add_exception_handler(MPICError, _any_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _any_error)


class _FailureCounts:
    """Counts failures by kind. Thousands of one kind take few lines of the log, but every kind is logged.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[int, int, float]] = {}  # count, count and time when the log was written

    def count(self, kind: str) -> tuple[int, int]:
        """Count a failure; return how many of its kind there were, and for how many of them a line is due: for the
        first, then whenever their number has doubled, and for those of each further minute."""
        now = self._clock()
        with self._lock:
            count, logged, at = self._kinds.get(kind, (0, 0, now))
            count += 1
            due = count - logged if count >= 2 * logged or now - at >= LOG_SECONDS else 0
            self._kinds[kind] = (count, count, now) if due else (count, logged, at)
            return count, due


LOG_SECONDS = 60.0
_failures = _FailureCounts()


def as_mpic_error(exc: BaseException) -> MPICError:
    """Return the error to show for any exception (``shown_for``), and log what an operator must know."""
    error = shown_for(exc)
    if error is exc and error.status < 500:
        return error
    place = traceback.extract_tb(exc.__traceback__)[-1:]
    count, due = _failures.count(
        f"{type(exc).__name__} {[(frame.filename, frame.lineno) for frame in place]}"
    )
    if not due:
        return error
    what = f"{error.code}: {error.message}" + (f" ({error.__cause__})" if error.__cause__ else "")
    if error is not exc:
        what = f"A request failed with an unexpected {type(exc).__name__}."
    times = f" ({due:,} times since the last such line, {count:,} in all)" if count > 1 else ""
    # the message of an expected refusal is enough, and one traceback of each kind of the others
    expected = error is exc and isinstance(error, Unavailable | StorageFull)
    log.error("%s%s", what, times, exc_info=None if expected or count > 1 else exc)
    return error


def shown_for(exc: BaseException) -> MPICError:
    """Return the error to show for any exception: an MPICError as it is, everything else as an internal error."""
    if isinstance(exc, MPICError) and type(exc) is not MPICError:
        return exc
    if memory.is_exhaustion(exc):
        return OutOfMemory("the server does not have enough memory for this request now")
    return MPICError(INTERNAL)


def response(error: MPICError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        error.body(), status_code=error.status, headers={**_headers(error), **(headers or {})}
    )


def _headers(error: MPICError) -> dict[str, str]:
    """Return the headers that belong to the status."""
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RangeNotSatisfiable):
        return {"Content-Range": f"bytes */{error.details['bytes']}"}
    if isinstance(error, RateLimited | Unavailable) and error.retry_after is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {}


async def _any_error(request: Request, exc: Exception) -> JSONResponse:
    error = as_mpic_error(exc)
    if isinstance(error, NotFound):  # it is in the path or the query, whatever the library calls it
        for name, value in {**request.query_params, **request.path_params}.items():
            if cut(value, FACT) == error.details.get("id"):
                error.param = name
    return response(error)


async def _client_gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _http_error(request: Request, exc: Exception) -> Response:
    """Handle Starlette's own errors: unknown routes, wrong methods, bodies that cannot be parsed."""
    assert isinstance(exc, HTTPException)
    cause = exc.__cause__  # one of our errors, if it was raised while FastAPI read the body
    if cause is not None and (isinstance(cause, MPICError | OSError) or memory.is_exhaustion(cause)):
        return response(as_mpic_error(cause))
    if isinstance(cause, ClientDisconnected | ClientDisconnect):
        return await _client_gone(request, cause)
    where = f"{request.method} {cut(request.url.path)}"
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


def _allowed(request: Request) -> str:
    """Return all methods of the matching path with the fewest parameters, since each route knows only its own
    methods."""
    found = [
        r for r in request.app.routes if isinstance(r, Route) and r.matches(request.scope)[0] != Match.NONE
    ]
    path = min(found, key=lambda r: len(r.param_convertors)).path
    return ", ".join(sorted({m for r in found if r.path == path for m in r.methods or ()}))


async def _validation_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    return response(from_validation(exc.errors(), exc.body, request.url.path == CHAT))


def invalid(error: ValidationError, body: Any, chat: bool) -> MPICError:
    """Return the error to report for a body that does not fit its model; see ``from_validation``."""
    found = [{**e, "loc": ("body", *e["loc"])} for e in error.errors(include_url=False)]
    return from_validation(found, body, chat)


def from_validation(errors: Sequence[Any], body: Any, chat: bool) -> MPICError:
    """Return the error to report for a malformed request: unsupported parameters first, then the deepest field.

    Args:
        chat: the request is a chat completion, for whose fields ``OPENAI_FIELDS`` gives reasons.
    """
    found = _of_the_right_type([(error, _place(error, body)) for error in errors])
    first, place = max(
        found, key=lambda e: (_unsupported(*e, chat) is not None, len(e[1]), not _expected(e[0]))
    )
    if unsupported := _unsupported(first, place, chat):
        parts, why = unsupported
        return UnsupportedParameter(
            f"{_path(parts)} is not supported by this server{why and f': {why}'}", param=_path(parts)
        )
    kind, context = first["type"], first.get("ctx", {})
    if kind == "json_invalid":
        return BadRequest(f"the body is not JSON: {context.get('error', first['msg'])}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = _path((*place, "type"))
        if chat:
            known = "content parts are text, image_url, video_url, image, file, document, cache or refusal"
            return UnsupportedModality(f"{_path(place)}: {known}", param=path)
        if kind == "union_tag_not_found":
            return BadRequest(f"{path} is required", param=path)
        known = context["expected_tags"].replace("'", "")
        return UnsupportedModality(f"{path}: must be one of {known}", param=path)
    if not place and kind == "missing":
        return BadRequest("a body is required, a JSON object")
    if not place and isinstance(first["input"], (bytes, bytearray)):  # FastAPI reads other types as bytes
        return BadRequest("the body is JSON: send it as application/json", param="Content-Type")
    path = _path(place)
    if kind == "missing":
        return BadRequest(f"{path} is required", param=path)
    if kind == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        if isinstance(wrong := context.get("error"), WrongField):
            path = f"{path}.{wrong.field}" if path else wrong.field
        if "UploadFile" in message:  # FastAPI's own
            message = "must be a file"
        return BadRequest(f"{path}: {message}" if path else message, param=path)
    # what each of a union's types expects
    kinds = [kind for kind in (_expected(error) for error, other in found if other == place) if kind]
    if _expected(first):
        *others, last = dict.fromkeys(kinds)
        message = f"must be {', '.join(others)} or {last}" if others else f"must be {last}"
    else:
        message = _rule(kind, context)
    return BadRequest(f"{path}: {message}" if path else f"the body {message}", param=path)


def _of_the_right_type(found: list[tuple[Any, Place]]) -> list[tuple[Any, Place]]:
    """Leave out what is wrong only for another type: members of a list that has too many for the type that it is of,
    and fields of an object whose ``type`` is wrong."""
    lists = [place for error, place in found if error["type"] in ("too_long", "too_short")]
    objects = [place[:-1] for error, place in found if place[-1:] == ("type",) and error["type"] != "missing"]
    return [
        (error, place)
        for error, place in found
        if not (_expected(error) and _inside(place, lists))
        and (place[-1:] == ("type",) or not _inside(place, objects))
    ]


def _inside(place: Place, outer: list[Place]) -> bool:
    return any(len(at) < len(place) and place[: len(at)] == at for at in outer)


EXPECTED = {
    "string": "a string",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "none": "null",
}


def _expected(error: Any) -> str | None:
    """Return what stands in place of a value of a wrong type; None if something else is wrong."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return "false" if context["expected"] == "False" else context["expected"]
    what, _, rest = kind.partition("_")
    return (
        EXPECTED.get(what)
        if rest in ("type", "attributes_type", "parsing", "from_float", "required")
        else None
    )


def _rule(kind: str, context: dict[str, Any]) -> str:
    """Return the rule that a value of the right type breaks."""
    match kind:
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case "greater_than":
            return f"must be more than {context['gt']}"
        case "less_than":
            return f"must be less than {context['lt']}"
        case "finite_number":
            return "must be a finite number"
        case "too_short" | "string_too_short":
            return f"must have at least {context['min_length']} {_units(kind)}"
        case "too_long" | "string_too_long":
            return f"may have at most {context['max_length']} {_units(kind)}"
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}"
        case _:
            return "is not valid here"


def _units(kind: str) -> str:
    return "characters" if kind.startswith("string") else "items"


def _unsupported(error: Any, place: Place, chat: bool) -> tuple[Place, str] | None:
    """Return the unsupported parameter that an error is about, and the reason if one is known; None if the error is
    about something else. Fields elsewhere may have the names of ``OPENAI_FIELDS``, such as metadata of references in a
    filter."""
    field = None
    for end in range(1, len(place) + 1) if chat else ():
        inside = place[end - 2] if end > 1 else None
        field = BY_NAME.get(str(place[end - 1]))
        if field is not None and field.inside == inside and (inside is None or place[0] != "mpic"):
            return place[:end], field.why
    if error["type"] == "unsupported":
        return place, error["ctx"]["why"]
    return (place, "") if error["type"] == "extra_forbidden" else None


def _place(error: Any, body: Any) -> Place:
    """Return the place in the request of the value that an error is about: ``("messages", 0, "content")``."""
    source, *rest = error["loc"]
    if source != "body" or not isinstance(body, dict):  # query, path and form fields are flat
        return tuple(rest[:1])
    found = _find(tuple(rest), body, error)
    return found if found is not None else tuple(part for part in rest if part in body)[:1]


def _find(loc: Place, at: Any, error: Any) -> Place | None:
    """Return the path from ``at`` to the value of an error; None if there is none. The location has further parts,
    pydantic's names of the types of unions, which may also be names of fields: what the path leads to decides."""
    if not loc:
        return () if at is error["input"] and error["type"] != "missing" else None
    part, rest = loc[0], loc[1:]
    is_list = isinstance(at, list) and isinstance(part, int) and part < len(at)
    ways = [False, True] if isinstance(at, dict) and at.get("type") == part else [True, False]
    for enters in ways:
        if not enters:
            found = _find(rest, at, error)
        elif is_list or (isinstance(at, dict) and part in at):
            found = _find(rest, at[part], error)
        elif error["type"] == "missing" and not rest and at is error["input"]:
            found = ()
        else:
            continue
        if found is not None:
            return (part, *found) if enters else found
    return None


def _path(place: Place) -> str | None:
    """Return a place as it is written: ``messages[0].content``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{cut(part)}" for part in place)
    return "".join(parts).removeprefix(".") or None
