"""Parses JSON request bodies."""

from __future__ import annotations

import json
from typing import Any

from mpic import bounded_json
from mpic.bounded_json import Bounds, TooMuch
from mpic.errors import BadRequest


def parse(body: bytes | bytearray, bounds: Bounds | None = None) -> Any:
    """Returns the value of a JSON text.

    Raises:
        BadRequest: it is not UTF-8, is nested too deeply, or holds half of a surrogate pair or a number with too many
            digits.
        TooMuch: it exceeds the bounds.
        json.JSONDecodeError: it is not JSON.
    """
    try:
        return bounded_json.read(body, bounds or Bounds())
    except (TooMuch, json.JSONDecodeError):
        raise
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
