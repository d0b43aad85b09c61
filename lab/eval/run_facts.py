"""Writes and compares ``run.json``, which says what the answers of a run depend on. Runs of earlier versions lack some
of it, which is then added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpic.errors import BadRequest
from mpic_lab.eval.config import EvalConfig
from mpic_lab.eval.contents import contents_of_cells

NAME = "run.json"
_LATER = ("packet", "computed", "stand_in")
"""Facts that are recorded after the run has begun (``record_fact``)."""


def begin_run(config: EvalConfig, out: Path, *, answered: bool) -> None:
    """Write down what the answers will depend on.

    Args:
        answered: whether the folder has answers already.

    Raises:
        BadRequest: they are of another model or seed, or of a task over another file or split.
    """
    path = out / NAME
    mine: dict[str, Any] = {
        "fingerprint": config.fingerprint(),
        "model": Path(config.model).name,
        "data": config.data(),
        "contents": contents_of_cells(config.cells()),
    }
    if config.title is not None:
        mine["title"] = config.title
    if path.exists() and answered:
        found = json.loads(path.read_text())
        if found["fingerprint"] != mine["fingerprint"]:
            raise BadRequest(f"{out} holds a run of another model, seed or dtype; give another --out")
        mine["data"] = _same_data(out, found.get("data", {}), mine["data"])
        mine["contents"] = _same_contents(out, found.get("contents", {}), mine["contents"])
        if config.title is None and "title" in found:
            mine["title"] = found["title"]
        mine |= {name: found[name] for name in _LATER if name in found}
    path.write_text(json.dumps(mine, indent=2) + "\n")


def record_fact(out: Path, name: str, value: Any, words: str) -> None:
    """Record a fact of a run that has begun.

    Raises:
        BadRequest: the run has answers of another one; ``words`` say of what.
    """
    path = out / NAME
    facts = json.loads(path.read_text())
    if facts.get(name, value) != value:
        raise BadRequest(f"{out} holds answers {words}; give another --out")
    path.write_text(json.dumps(facts | {name: value}, indent=2) + "\n")


def _same_data(out: Path, before: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    for cell, data in mine.items():
        if before.get(cell, data) != data:
            raise BadRequest(f"{out} holds answers of {cell} over another file or split; give another --out")
    return before | mine


def _same_contents(
    out: Path, before: dict[str, dict[str, str]], mine: dict[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    merged = dict(before)
    for cell, digests in mine.items():
        earlier = before.get(cell, {})
        if any(earlier.get(key, digest) != digest for key, digest in digests.items()):
            raise BadRequest(
                f"{out} holds answers of {cell} over a file that has changed; give another --out"
            )
        merged[cell] = earlier | digests
    return merged
