"""Tool calls of earlier answers, as templates want them. The arguments of a call are JSON in a string of the body, so
the bounds of the body do not hold for them: they are bounded here, for all calls of a request together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpic import bounded_json
from mpic.cancel import checkpoint
from mpic.errors import BadRequest


class ToolCallReader:
    """Reads the tool calls of one request.

    Args:
        values: most values that the arguments of all its calls may hold together, counted as in
            ``bounded_json.Bounds``.
    """

    def __init__(self, values: int) -> None:
        self._values = self._left = values

    def read(self, calls: Any, param: str) -> list[dict[str, Any]]:
        """Returns the calls of one message; arguments that are JSON of an object are parsed.

        Raises:
            BadRequest: a call is invalid, or its arguments are too much with those of the calls before it.
        """
        if not isinstance(calls, list | tuple):
            raise BadRequest("tool_calls must be a list", param=param)
        parsed = []
        for i, call in enumerate(calls):
            checkpoint()
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise BadRequest(
                    "a tool call must have a function with a name", param=f"{param}[{i}].function"
                )
            arguments = function.get("arguments", {})
            if isinstance(arguments, str):
                arguments = self._object(arguments, f"{param}[{i}].function.arguments")
            parsed.append({**call, "function": {**function, "arguments": arguments}})
        return parsed

    def _object(self, arguments: str, param: str) -> Any:
        """Parses arguments that are JSON of an object; returns others as they are."""
        if not arguments.lstrip().startswith("{"):
            return arguments
        try:
            value = bounded_json.read(arguments.encode(), bounded_json.Bounds(values=self._left))
        except bounded_json.TooMuch as error:
            if error.what == "depth":
                return arguments
            if error.what == "values":
                what = f"the arguments of all tool calls together have more than {self._values:,} values"
            else:
                what = f"the arguments of a call have {error}"
            raise BadRequest(what, param=param) from error
        except (ValueError, RecursionError):  # half of a surrogate pair among them
            return arguments
        if not isinstance(value, dict):
            return arguments
        self._left -= bounded_json.count(value)
        return value
