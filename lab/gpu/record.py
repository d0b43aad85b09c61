"""The report's file, with one JSON object per line, each written when it is measured, and the tables made from it.

A line is either a *row* (``section``, ``measured``, ``shape``, ``with``, ``value``, ``unit``, and beside a time or rate
``predicted``, ``ratio`` and ``bound``) or an *event* (``event`` is ``run``, ``begin`` or ``end``; a run has the GPU's
name, the checkout's ``commit`` and the version of ``torch``). ``ratio`` says how
many times longer the work took than the roofline allows. A check has ``ok``; a number to be compared over time has
``headline``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]

COLUMNS = ("section", "measured", "shape", "with", "value", "unit", "predicted", "ratio", "bound")
"""Every row has these."""


def append(path: Path, line: Line) -> None:
    """Add a line in one write, so that processes may share the file and a killed one leaves no half of a line."""
    data = (json.dumps(line, default=str) + "\n").encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def read(path: Path) -> list[Line]:
    """Return all lines, except a last one that is incomplete because the machine stopped."""
    return lines_of(path.read_bytes()) if path.exists() else []


def lines_of(data: bytes) -> list[Line]:
    lines = []
    for piece in data.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(piece))
    return [line for line in lines if isinstance(line, dict)]


def latest(lines: Iterable[Line]) -> list[Line]:
    """Return the rows of each section's last attempt, so that rows of earlier attempts are not counted twice."""
    kept: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("event") == "begin":
            kept[line["section"]] = []
        elif "event" not in line and "section" in line:
            kept.setdefault(line["section"], []).append(line)
    return [row for rows in kept.values() for row in rows]


def ends(lines: Iterable[Line]) -> dict[str, Line]:
    """Return the outcome of each section's last run."""
    return {line["section"]: line for line in lines if line.get("event") == "end"}


def software(lines: Iterable[Line]) -> dict[tuple[Any, Any], list[str]]:
    """Return the sections by the commit and the version of torch with which they last began."""
    now: tuple[Any, Any] = (None, None)
    last: dict[str, tuple[Any, Any]] = {}
    for line in lines:
        if line.get("event") == "run":
            now = (line.get("commit"), line.get("torch"))
        elif line.get("event") == "begin":
            last[line["section"]] = now
    found: dict[tuple[Any, Any], list[str]] = {}
    for section, used in last.items():
        found.setdefault(used, []).append(section)
    return found


def shown(row: Line) -> str:
    """Return a row as one readable line."""
    value = row["why"] if row["value"] is None and "why" in row else f"{_number(row['value'])} {row['unit']}"
    text = f"{row['measured']} | {row['shape']} | {row['with']}: {value}".rstrip()
    if row.get("ratio") is not None:
        text += (
            f" (roofline {_number(row['predicted'])}, {row['ratio']:.2f} x longer, bound by {row['bound']})"
        )
    if "ok" in row:
        text += " ok" if row["ok"] else f" WRONG: {row.get('error', 'above the limit')}"
    return text


def summary(lines: list[Line]) -> str:
    """Return tables of sections, wrong checks and headline numbers."""
    ended, rows = ends(lines), latest(lines)
    table = [("section", "ended", "seconds", "rows", "")]
    for name, end in ended.items():
        count = sum(row["section"] == name for row in rows)
        reason = str(end.get("error", "")).strip().splitlines()
        table.append(
            (name, end["status"], f"{end['seconds']:.0f}", str(count), reason[-1][:90] if reason else "")
        )
    text = _aligned(table)
    wrong = [row for row in rows if row.get("ok") is False]
    checks = sum("ok" in row for row in rows)
    text += f"\n\nchecks: {checks}, wrong: {len(wrong)}\n" + "".join(f"  {shown(row)}\n" for row in wrong)
    heads = [("headline", "value", "goal")]
    heads += [(r["headline"], _number(r["value"]), r.get("goal", "")) for r in rows if "headline" in r]
    text += "\n" + _aligned(heads) if len(heads) > 1 else ""
    if len(used := software(lines)) > 1:
        text += "\n\nmeasured with different software:\n"
        text += "".join(
            f"  {commit or 'unknown commit'}, torch {torch or 'unknown'}: {', '.join(names)}\n"
            for (commit, torch), names in used.items()
        )
    return text


def markdown(lines: list[Line]) -> str:
    """Return all rows as a table for a page."""
    head = "| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS)
    body = ["| " + " | ".join(_cell(row.get(column)) for column in COLUMNS) + " |" for row in latest(lines)]
    return "\n".join([head, *body])


def _cell(value: object) -> str:
    return "" if value is None else _number(value).replace("|", "/")


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _aligned(table: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in table)
