"""The REST reference, from the server's OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from tables import code, table

from mpic.api.resources import ErrorBody
from mpic.server.app import ROUTERS
from mpic.version import VERSION


def openapi() -> dict[str, Any]:
    """Return the description that a running server serves at ``/openapi.json``."""
    errors = {"4XX": {"model": ErrorBody, "description": "an error the caller can correct"}}
    described = FastAPI(title="MPIC", version=VERSION, responses=errors)
    for router in ROUTERS:
        described.include_router(router)
    return described.openapi()


def rest() -> Iterator[str]:
    spec = openapi()
    yield "# REST reference\n"
    yield f"Every route and object of version {VERSION}, from the server's own description, which it gives at"
    yield "`/openapi.json`. [The REST API by example](../api.md) is the page to begin with."
    tags: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in spec["paths"].items():
        for method, route in methods.items():
            tags.setdefault(route.get("tags", ["other"])[0], []).append((method.upper(), path, route))
    for tag, routes in tags.items():
        yield f"\n## {tag.capitalize()}"
        for method, path, route in routes:
            yield f"\n### {method} {path}\n\n{route.get('description', '')}"
            yield from table("parameter|type|meaning", map(_parameter, route.get("parameters", ())))
            for kind, content in route.get("requestBody", {}).get("content", {}).items():
                yield f"\nBody, `{kind}`: {_type(content['schema'])}"
            answer = (
                route["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
            )
            yield f"\nAnswer: {_type(answer)}" if answer else ""
    yield "\n## Objects"
    for name, schema in sorted(spec["components"]["schemas"].items()):
        yield f"\n### {name}\n\n{schema.get('description', '')}"
        needed = schema.get("required", ())
        rows = [
            (code(key) + ("" if key in needed else " (optional)"), _type(one), one.get("description", ""))
            for key, one in schema.get("properties", {}).items()
        ]
        yield from table("field|type|meaning", rows)


def _parameter(one: dict[str, Any]) -> tuple[str, str, str]:
    meaning = one.get("description") or one["schema"].get("description", "")
    return code(one["name"]) + ("" if one.get("required") else " (optional)"), _type(one["schema"]), meaning


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field, with links to objects."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema or "const" in schema:
        return ", ".join(code(one) for one in schema.get("enum", [schema.get("const")]))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[word]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    default = f", default `{schema['default']}`" if schema.get("default") not in (None, "") else ""
    return f"{schema.get('type', 'any')}{default}"
