"""``/docs``: the OpenAPI description as one plain page.

Nothing is loaded from elsewhere and nothing runs in the browser, so it works without the internet and no third party
learns who reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color-scheme: light dark }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886 } summary { cursor: pointer; padding: .3rem 0 }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { overflow: auto; padding: .8rem; background: #8881 }
table { border-collapse: collapse; width: 100% } td { padding: .2rem .8rem .2rem 0; vertical-align: top }
.method { display: inline-block; min-width: 4.5rem; font-weight: 700 }
"""
CSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"


def page(spec: dict[str, Any]) -> str:
    """Return the page of an OpenAPI description."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(spec['info']['title'])} API</title>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style><h1>{escape(spec['info']['title'])} API</h1>"
        f"<p>{escape(spec['info'].get('description', ''))} For programs: <a href=openapi.json>openapi.json</a>; "
        "in a browser: <a href=ui>the web page</a>."
        f"{''.join(_sections(spec))}"
    )


def _sections(spec: dict[str, Any]) -> Iterator[str]:
    tags: dict[str, list[str]] = {}
    for path, methods in spec["paths"].items():
        for method, route in methods.items():
            tags.setdefault((route.get("tags") or ["other"])[0], []).append(_route(spec, path, method, route))
    for tag, routes in tags.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(routes)}"


def _route(spec: dict[str, Any], path: str, method: str, route: dict[str, Any]) -> str:
    text = escape(route.get("description", "")).replace("\n", " ")
    rows = [
        _row(
            p["name"],
            p["schema"],
            p.get("description") or p["schema"].get("description", ""),
            p.get("required"),
        )
        for p in route.get("parameters", ())
    ]
    example = ""
    for kind, content in route.get("requestBody", {}).get("content", {}).items():
        schema = _resolve(spec, content["schema"])
        rows += _fields(schema)
        if schema.get("examples"):
            body = json.dumps(schema["examples"][0], indent=2, ensure_ascii=False)
            example += f"<p><code>{escape(kind)}</code>, for example:<pre>{escape(body)}</pre>"
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return (
        f"<details><summary><span class=method>{method.upper()}</span> <code>{escape(path)}</code> "
        f"{escape(route.get('summary', ''))}</summary><p>{text}</p>{table}{example}</details>"
    )


def _fields(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required", ())
    return [
        _row(name, field, field.get("description", ""), name in required)
        for name, field in schema.get("properties", {}).items()
    ]


def _row(name: str, schema: dict[str, Any], description: str, required: bool | None) -> str:
    default = f" = {schema['default']!r}" if schema.get("default") is not None else ""
    mark = " (required)" if required else ""
    return (
        f"<tr><td><code>{escape(name)}</code>{mark}<td><code>{escape(_type(schema) + default)}</code>"
        f"<td>{escape(description)}"
    )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[-1]
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " | ".join(dict.fromkeys(map(_type, schema[word])))
    if schema.get("type") == "array":
        return f"[{_type(schema.get('items', {}))}]"
    return str(schema.get("type", "any"))


def _resolve(spec: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = spec["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return schema
