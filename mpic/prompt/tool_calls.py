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
        """Return the calls of one message, with their arguments as objects. Some clients and models write ``""`` or
        ``null`` for none.

        Raises:
            BadRequest: a call is invalid, its arguments are no object, or they exceed the bound together with those of
            earlier calls.
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
            arguments = self._object(function.get("arguments"), f"{param}[{i}].function.arguments")
            parsed.append({**call, "function": {**function, "arguments": arguments}})
        return parsed

    def _object(self, arguments: Any, param: str) -> Mapping[str, Any]:
        if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
            return {}
        if isinstance(arguments, str):
            arguments = self._parsed(arguments, param)
        if not isinstance(arguments, Mapping):
            raise BadRequest("the arguments of a tool call must be a JSON object", param=param)
        return arguments

    def _parsed(self, arguments: str, param: str) -> Any:
        try:
            value = bounded_json.read(arguments.encode(), bounded_json.Bounds(values=self._left))
        except bounded_json.TooMuch as error:
            if error.what == "values":
                what = f"the arguments of all tool calls together have more than {self._values:,} values"
            else:
                what = f"the arguments of a call have {error}"
            raise BadRequest(what, param=param) from error
        except bounded_json.HalfPair as error:
            raise BadRequest(f"the arguments of a tool call are not text: {error}", param=param) from error
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the arguments of a tool call are not JSON: {error}", param=param) from error
        if not bounded_json.is_finite(value):
            raise BadRequest(
                "the arguments of a tool call hold a number that JSON does not have", param=param
            )
        self._left -= bounded_json.count(value)
        return value
