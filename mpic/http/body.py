"""Parses JSON request bodies, and writes those of large responses."""

from __future__ import annotations

import json
from typing import Any

from mpic import bounded_json
from mpic.bounded_json import Bounds, TooMuch
from mpic.errors import BadRequest

COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def parse(body: bytes | bytearray, bounds: Bounds | None = None) -> Any:
    """Return the value of a JSON text.

    Raises:
        BadRequest: it is not JSON in UTF-8, or holds half of a surrogate pair or a number with too many digits.
        TooMuch: it exceeds the bounds.
    """
    try:
        return bounded_json.read(body, bounds or Bounds())
    except TooMuch:
        raise
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def write(value: Any, depth: int = 5) -> str:
    """Return a value as compact JSON, like ``JSONResponse``. Raise ValueError if a number is not finite.

    It is for threads. The encoder holds the interpreter's lock until it returns, which would take seconds for the
    log-probabilities of a long answer. So containers are written element by element down to ``depth``, and other
    threads run in between.
    """
    if depth and isinstance(value, dict):
        members = ",".join(f"{COMPACT.encode(name)}:{write(value[name], depth - 1)}" for name in value)
        return f"{{{members}}}"
    if depth and isinstance(value, (list, tuple)):
        return f"[{','.join(write(element, depth - 1) for element in value)}]"
    return COMPACT.encode(value)
