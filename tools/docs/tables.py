"""Markdown for the reference pages: tables, and docstrings in Google style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any


def table(columns: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, or nothing where there are no rows.

    Args:
        columns: the names of the columns, separated by ``|``.
    """
    rows = list(rows)
    if rows:
        names = columns.split("|")
        yield from ("", f"| {' | '.join(names)} |", "|" + "---|" * len(names))
        for row in rows:
            yield f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in row)} |"


def code(text: object) -> str:
    """Return a text as inline code; an empty text stays empty."""
    return f"`{text}`" if str(text) else ""


def docstring(thing: Any) -> str:
    """Return a docstring in Google style as Markdown: ``Args:`` and its like become lists."""
    # a class without a docstring must not show that of its base
    own = thing.__dict__.get("__doc__", "") if isinstance(thing, type) else thing.__doc__
    lines = inspect.cleandoc(own or "").replace("``", "`").splitlines()
    out: list[str] = []
    section = False
    for line in lines:
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            section = True
            out.append(f"{'Arguments' if line == 'Args:' else line[:-1]}:\n")
        elif section and (item := re.match(r" {4}([*\w][*\w, .]*): (.*)", line)):
            names = ", ".join(code(name.strip()) for name in item[1].split(",") if name.strip() != "...")
            out.append(f"- {names}: {item[2]}")
        elif section and line.strip():
            out.append(f"  {line.strip()}")
        else:
            section = section and not line.strip()
            out.append(line)
    return "\n".join(out)
