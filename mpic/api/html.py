"""Renders answers and files for notebooks: small HTML without scripts, with all texts escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLOURS = {
    "prefix": "#7c8db5",
    "reused": "#2f9e6e",
    "device": "#2f9e6e",
    "host": "#2f9e6e",
    "disk": "#2f9e6e",
    "remote": "#2f9e6e",
    "compiled": "#8fcf9f",
    "recomputed": "#e0a030",
    "new": "#c8ccd4",
}
"""The colour of a strip's part by the source of its tokens."""


def strip(parts: Iterable[tuple[str, int, str]]) -> str:
    """Return a bar whose parts are as wide as they have tokens.

    Args:
        parts: (source of the tokens, their number, their description) in order.
    """
    shown = [part for part in parts if part[1] > 0]
    whole = sum(tokens for _, tokens, _ in shown) or 1
    bars = ""
    for state, tokens, what in shown:
        title = escape(f"{what}: {tokens} tokens, {state}", quote=True)
        look = f"width:{100 * tokens / whole:.2f}%;background:{COLOURS.get(state, '#999')};height:10px"
        bars += f'<span title="{title}" style="{look};display:inline-block"></span>'
    return f'<div style="display:flex;max-width:40em;border-radius:3px;overflow:hidden;margin:.4em 0">{bars}</div>'


def paragraph(text: str) -> str:
    """Return a text with its line breaks."""
    return f'<div style="white-space:pre-wrap">{escape(text)}</div>'


def fields(rows: Iterable[tuple[str, object]]) -> str:
    """Return a small table of names and values; those without a value are left out."""
    cells = "".join(
        f'<tr><td style="text-align:right;opacity:.7">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows
        if value not in (None, "", ())
    )
    return f"<table>{cells}</table>"


def link(url: str, text: str) -> str:
    """Return a link, if the address is one of the web."""
    if not url.startswith(("http://", "https://")):
        return escape(text)
    return f'<a href="{escape(url, quote=True)}" target="_blank" rel="noopener">{escape(text)}</a>'
