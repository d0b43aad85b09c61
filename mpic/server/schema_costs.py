"""Bounds of what a schema or a regular expression may cost.

llguidance bounds its own steps (``mpic.engine.grammar``), but before it counts them it makes a place for every item of
``minItems``, and it follows references by recursion: a list of a hundred million items takes gigabytes, a chain of
thousands of references the whole stack, and either ends the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from mpic.errors import GrammarTooComplex, InvalidGrammar

MOST_BYTES = 1 << 16
"""Maximum size of a request's schemas, choices and regular expressions together, in bytes of JSON."""
MOST_LEVELS = 1000
"""Levels of objects and lists: those of the schema and of everything that a ``$ref`` names. Some 3,000 take all of a
thread's stack (8 MB)."""
MOST_ITEMS = 10_000
"""The sum of all numbers of items and properties."""
MOST_REPEATED = 200_000
"""Characters of a regular expression times the repetitions that it asks for: what it forces is followed to its end."""
COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
REPEATS = re.compile(r"\{(\d{1,10})(?:,\d*)?\}")


class FormCosts:
    """Adds up what the forms of one request may cost."""

    def __init__(self) -> None:
        self._bytes = self._items = 0

    def text(self, form: Any, param: str) -> str:
        """Return a form as JSON. Raise GrammarTooComplex when the request's forms are too long."""
        written = json.dumps(form, ensure_ascii=False)
        self._bytes += len(written.encode())
        if self._bytes > MOST_BYTES:
            raise GrammarTooComplex(
                f"the schemas and choices of a request have at most {MOST_BYTES:,} bytes together",
                param=param,
            )
        return written

    def regex(self, regex: str, param: str) -> None:
        """Raise GrammarTooComplex for a regular expression that repeats too much."""
        times = math.prod(max(1, int(count)) for count in REPEATS.findall(regex))
        if len(regex) * times > MOST_REPEATED:
            raise GrammarTooComplex(f"{param}: a regular expression repeats too much", param=param)

    def schema(self, schema: dict[str, Any], param: str) -> None:
        """Check a schema.

        Raises:
            GrammarTooComplex: it is too large.
            InvalidGrammar: it refers to something outside of itself.
        """
        heights = _heights(schema)
        named: dict[int, int] = {id(schema): heights[id(schema)]}
        for node in _objects(schema):
            for name in COUNTS:
                count = node.get(name)
                self._items += count if isinstance(count, int | float) and count > 0 else 0
            for regex in (node.get("pattern"), *_names(node.get("patternProperties"))):
                if isinstance(regex, str):
                    self.regex(regex, param)
            if isinstance(reference := node.get("$ref"), str):
                target = _target(schema, reference, param)
                named[id(target)] = heights.get(id(target), 0)
        if self._items > MOST_ITEMS:
            raise GrammarTooComplex(
                f"{param}: {', '.join(COUNTS)} are at most {MOST_ITEMS:,} together", param=param
            )
        if sum(named.values()) > MOST_LEVELS:
            raise GrammarTooComplex(
                f"{param}: its levels, and those of all that it refers to, are at most {MOST_LEVELS:,} together",
                param=param,
            )


def _inner(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node
    return [value for value in values if isinstance(value, dict | list)]


def _containers(schema: Any) -> Iterator[Any]:
    """Yield every object and list of a schema, each before those within it."""
    left = [schema]
    while left:
        node = left.pop()
        yield node
        left += _inner(node)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    return (node for node in _containers(schema) if isinstance(node, dict))


def _names(node: Any) -> list[str]:
    return list(node) if isinstance(node, dict) else []


def _heights(schema: Any) -> dict[int, int]:
    """Return how many levels each object and list has, by identity."""
    heights: dict[int, int] = {}
    for node in reversed(list(_containers(schema))):
        heights[id(node)] = 1 + max((heights[id(inner)] for inner in _inner(node)), default=0)
    return heights


def _target(schema: Any, reference: str, param: str) -> Any:
    """Return what a reference names; None for nothing, which llguidance refuses."""
    if not (reference == "#" or reference.startswith("#/")):
        raise InvalidGrammar(
            f"{param}: a $ref names a place in the schema, as #/$defs/NAME does, not {reference!r}",
            param=param,
        )
    node = schema
    for part in reference[2:].split("/") if reference != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return None
    return node
