"""The live panel: what the server is doing, from ``/health`` and ``/metrics``."""

from __future__ import annotations

from html import escape
from typing import Any


def panel(health: dict[str, Any], metrics: str | None) -> str:
    engine = health.get("engine", {})
    model = health.get("model", {})
    rows = [
        ("model", escape(f"{model.get('name', '?')} · {model.get('dtype', '')} on {model.get('device', '')}"))
    ]
    if not health.get("ready"):
        rows.append(("state", '<b class="m-bad">not ready</b>'))
    if "running" in engine:
        rows.append(("requests", f"{engine['running']} running"))
    body = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)
    return f'<dl class="m-live">{body}</dl>'
