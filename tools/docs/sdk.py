"""The SDK reference, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from tables import code, docstring, table

from mpic import client
from mpic.client import endpoints, resources, types


def sdk() -> Iterator[str]:
    yield "# SDK reference\n"
    yield "The classes of `from mpic import MPIC, AsyncMPIC`, from their docstrings. `AsyncMPIC` has"
    yield "the same methods, to be awaited. [The Python SDK](../sdk.md) is the page to begin with."
    listed = ("Files", "UploadsInParts", "Caches", "References", "Models", "Completions")
    yield from _class(client.MPIC, "MPIC")
    owners = {"Completions": "chat.completions", "UploadsInParts": "uploads"}
    for name in listed:
        owner = owners.get(name, name.lower())
        yield from _class(getattr(resources, name), f"client.{owner}")
    yield from _class(endpoints.ChatOptions, "ChatOptions", fields=True)
    for one in (client.Stream, client.Listing, client.Retry):
        yield from _class(one, one.__name__)
    yield "\n## Objects\n\nWhat the methods return (`mpic.client.types`)."
    for name in types.__all__:
        one = getattr(types, name)
        yield f"\n### {name}\n\n{docstring(one)}"
        yield from table(
            "field|type|meaning",
            [
                (code(key), code(_annotation(f.annotation)), f.description or "")
                for key, f in one.model_fields.items()
            ],
        )


def _class(cls: type, title: str, fields: bool = False) -> Iterator[str]:
    yield f"\n## {title}\n\n{docstring(cls)}"
    if fields:
        yield from table(
            "field|type", [(code(k), code(_annotation(v))) for k, v in inspect.get_annotations(cls).items()]
        )
        return
    if "__init__" in vars(cls) and cls is client.MPIC:
        yield f"\n```python\n{signature(cls.__init__, title)}\n```"
    for name in dict.fromkeys(name for base in cls.__mro__[:2] for name in vars(base)):
        method = getattr(cls, name, None)
        if name.startswith("_") or not callable(method) or name in ("send", "stream"):
            continue
        yield f"\n### {title}.{name}\n\n```python\n{signature(method, name)}\n```\n\n{docstring(method)}"


def signature(function: Any, name: str) -> str:
    """Return ``name(...) -> result``, with annotations as they are written in the source."""
    parts, starred = [], False
    parameters = inspect.signature(function).parameters.values()
    for one in (p for p in parameters if p.name not in ("self", "cls")):
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        prefix = {one.VAR_KEYWORD: "**", one.VAR_POSITIONAL: "*"}.get(one.kind, "")
        kind = f": {_annotation(one.annotation)}" if one.annotation is not one.empty else ""
        default = f" = {one.default!r}" if one.default is not one.empty else ""
        parts.append(f"{prefix}{one.name}{kind}{default}")
    result = inspect.signature(function).return_annotation
    line = f"{name}({', '.join(parts)})"
    if len(line) > 90:
        line = f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"
    return line + (f" -> {_annotation(result)}" if result not in (inspect.Signature.empty, None) else "")


def _annotation(kind: Any) -> str:
    text = (
        kind
        if isinstance(kind, str)
        else getattr(kind, "__name__", "")
        if isinstance(kind, type)
        else str(kind)
    )
    if isinstance(kind, type) and typing.get_args(kind):
        text = str(kind)
    return re.sub(
        r"ForwardRef\('([^']+)'[^)]*\)", r"\1", re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", text)
    ).strip("'")
