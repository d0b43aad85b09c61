"""Puts cases that were measured again (``--only``) into an earlier result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpic.errors import BadRequest
from mpic_lab.bench.harness import Bench, BenchDevice

FREE = ("only", "repeats")
"""Settings that may differ between the cases of a result."""


def earlier(path: Path, entry: Bench, settings: Any, placement: BenchDevice) -> dict[str, Any] | None:
    """Return the result that a file holds, or None if there is no file. Call this before hours are spent on a
    measurement.

    Raises:
        BadRequest: the file holds no result of this bench with these settings, device and dtype.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        theirs, machine, bench = found["settings"], found["machine"], found["bench"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{path} holds no result of a bench: {error}", param="json") from error
    ours = json.loads(json.dumps(asdict(settings)))
    different = [name for name in ours if name not in FREE and theirs.get(name) != ours[name]]
    where = f"{str(placement.dtype).removeprefix('torch.')} on {placement.device.type}"
    if bench != entry.name:
        different.append("bench")
    if where not in machine:
        different.append("device or dtype")
    if different:
        raise BadRequest(
            f"{path} was measured with another {', '.join(different)}: write the cases into a file of their own",
            param="json",
        )
    return found


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old result with the new result's tables in place of its own. ``settings.remade`` says of each
    of these tables on what machine and with which settings it was measured; the rest of the old result stays as it was.

    A table in both results whose columns are headlines, such as one of ratios, is merged row by row.
    """
    shared = {row["table"] for row in new["rows"] if row.get("column") in new["headline"]}
    measured = {row["table"] for row in new["rows"]} - shared
    made = {(row["table"], row.get("column")) for row in new["rows"]}
    kept = [
        row
        for row in old["rows"]
        if row["table"] not in measured and (row["table"], row.get("column")) not in made
    ]
    tables = list(dict.fromkeys(row["table"] for row in (*old["rows"], *new["rows"])))
    rows = sorted([*kept, *new["rows"]], key=lambda row: tables.index(row["table"]))
    cases = dict.fromkeys((*old["settings"].get("only", ()), *new["settings"].get("only", ())))
    origin = {"machine": new["machine"], **new["settings"]}
    remade = {**old["settings"].get("remade", {}), **{table: origin for table in sorted(measured)}}
    return {
        **old,
        "settings": {**old["settings"], "only": list(cases), "remade": remade},
        "rows": rows,
        "headline": {**old["headline"], **new["headline"]},
    }
