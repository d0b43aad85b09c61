"""The table of methods, with one row for every policy and press of a run, for people and programs.

A row has ``policy`` (with its press), ``score`` in points of 100 and its 95 % interval ``low`` to ``high``, the median
``ttft_ms``, and the means of ``gflop`` (operations of a prefill, counted) and ``bytes`` (compiled KV that a prompt
maps). Means are over all cells that every policy answered, each cell counting the same; times are of questions that
were asked one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpic.errors import BadRequest
from mpic_lab.eval.answers import PolicyAnswer, read_answers
from mpic_lab.eval.compare import cells_of, interval, points, policies_of, ttft

COLUMNS = ("policy", "score", "low", "high", "ttft_ms", "gflop", "bytes")


def rows_of(answers: Sequence[PolicyAnswer]) -> list[dict[str, Any]]:
    """Return one row per policy, in the order of the configuration."""
    cells = cells_of(answers)
    policies = policies_of(cells)
    complete = [cell for cell in cells.values() if set(policies) <= set(cell)]
    if not complete:
        raise BadRequest("no task was answered under every policy, so there is nothing to compare")
    return [_row(policy, [cell[policy] for cell in complete]) for policy in policies]


def _row(policy: str, parts: Sequence[Sequence[PolicyAnswer]]) -> dict[str, Any]:
    scores = [np.array([points(answer) for answer in part]) for part in parts]
    low, high = interval(scores)
    mine = [answer for part in parts for answer in part]
    ms = ttft(mine)

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    return {
        "policy": policy,
        "score": round(mean([one.mean() for one in scores]), 1),
        "low": round(low, 1),
        "high": round(high, 1),
        "ttft_ms": None if ms is None else round(ms, 2),
        "gflop": round(mean([mean([a.flops for a in part]) for part in parts]) / 1e9, 4),
        "bytes": round(mean([mean([a.kv_bytes or 0 for a in part]) for part in parts])),
    }


def write_table(run: Path, to: Path) -> None:
    """Write the table of a run's answers as JSON: the run's facts and ``rows``."""
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    answers = read_answers(run)
    body = {
        "model": facts["model"],
        "fingerprint": facts["fingerprint"],
        "questions": len({(a.task, a.chunks, a.sample) for a in answers}),
        "rows": rows_of(answers),
    }
    to.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_table(path: Path) -> list[list[str]]:
    """Read a table of ``write_table`` and return its cells as text, the header first."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    table = [["policy", "score", "95 % interval", "TTFT, median", "GFLOP", "KV, KB"]]
    for row in rows:
        ms = "" if row["ttft_ms"] is None else f"{row['ttft_ms']:.1f} ms"
        interval = f"{row['low']:.1f} to {row['high']:.1f}"
        figures = [f"{row['score']:.1f}", interval, ms, f"{row['gflop']:.2f}", f"{row['bytes'] / 1000:,.0f}"]
        table.append([f"`{row['policy']}`", *figures])
    return table
