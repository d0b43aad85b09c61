"""Tables of a run's answers, for its report and for pages of the documentation; the first row of each is its header."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from mpic.errors import BadRequest
from mpic.evals.answers import PolicyAnswer
from mpic.evals.compare import (
    Cells,
    Grades,
    PolicyResult,
    at_count,
    at_every_count,
    cells_of,
    losses,
    lost,
    mean_of,
    metric_of,
    policies_of,
    score,
    ttft,
)
from mpic.evals.tasks import GRIDS


def summary_table(found: list[PolicyResult]) -> list[list[str]]:
    """Returns one row per policy; the first row is the header."""
    rows = [
        ["policy", "score", "lost", "worst task", "TTFT, median", "TTFT, full over it", "FLOPs, full over it",
         "chunk tokens recomputed", "first token KL", "first token agrees", "judge, of 10", "answer tokens",
         "questions"],
    ]  # fmt: skip
    for result in sorted(found, key=lambda one: -one.score):
        rows.append(
            [
                result.policy,
                f"{result.score:.1f}",
                str(result.lost),
                f"{result.worst_task} {result.worst.points:+.1f}" if result.worst.points else "",
                "" if result.ttft_ms is None else f"{result.ttft_ms:.1f} ms",
                "" if result.ttft_ratio is None else f"{result.ttft_ratio:.2f} x",
                f"{result.flops_ratio:.2f} x",
                f"{result.recomputed:.{0 < result.recomputed < 1:d}f} %",
                "" if result.kl is None else f"{result.kl:.3f}",
                "" if result.top1 is None else f"{result.top1:.0f} %",
                "" if result.judged is None else f"{result.judged:.2f}",
                "" if result.answer_tokens is None else f"{result.answer_tokens:.1f}",
                str(result.questions),
            ]
        )
    empty = [i for i in range(len(rows[0])) if i and not any(row[i] for row in rows[1:])]
    return [[cell for i, cell in enumerate(row) if i not in empty] for row in rows]


def grade_table(answers: Iterable[PolicyAnswer], grades: Grades) -> list[list[str]]:
    """Returns one row per policy and one column per dimension of the judge's rubric: mean grades over the questions
    that every policy answered. There is only the header when nothing is graded."""
    cells = cells_of(answers)
    found = {
        policy: [grades[a.key] for cell in cells.values() for a in cell.get(policy, ()) if a.key in grades]
        for policy in policies_of(cells)
    }
    names = list(dict.fromkeys(name for given in found.values() for one in given for name in one))
    rows = [["policy", *names]]
    for policy, given in found.items():
        means = [mean_of(one.get(name) for one in given) for name in names]
        rows += [[policy, *("" if mean is None else f"{mean:.2f}" for mean in means)]] if given else []
    return rows


def needle_scores(answers: Iterable[PolicyAnswer]) -> dict[str, dict[tuple[int, int], float]]:
    """Returns for each policy the scores of a grid of needles, by depth (percent) and length (tokens)."""
    found: dict[str, dict[tuple[int, int], list[PolicyAnswer]]] = {}
    for (task, _), cell in cells_of(answers).items():
        for policy, given in cell.items() if task in GRIDS else ():
            for answer in given:
                length, depth = answer.sample.partition("#")[0].split("@")
                found.setdefault(policy, {}).setdefault((int(depth), int(length)), []).append(answer)
    return {policy: {place: score(given) for place, given in grid.items()} for policy, grid in found.items()}


def needle_tables(answers: Iterable[PolicyAnswer]) -> dict[str, list[list[str]]]:
    """Returns for each policy a table of ``needle_scores``: one row per depth, one column per length."""
    tables = {}
    for policy, grid in needle_scores(answers).items():
        lengths = sorted({length for _, length in grid})
        rows = [["depth", *(str(length) for length in lengths)]]
        for depth in sorted({depth for depth, _ in grid}):
            scores = (grid.get((depth, length)) for length in lengths)
            rows.append([f"{depth} %", *("" if one is None else f"{one:.0f}" for one in scores)])
        tables[policy] = rows
    return tables


def cell_table(answers: Iterable[PolicyAnswer], only: Sequence[str] = ()) -> list[list[str]]:
    """Returns one row per task and number of chunks, and one column per policy: score (TTFT in ms)."""
    cells = cells_of(answers)
    policies = only or policies_of(cells)
    rows = [["task", "chunks", "n", "metric", *policies]]
    for (task, chunks), cell in cells.items():
        row = [task, str(chunks or ""), str(len(cell["full"])), metric_of(cell["full"][0])]
        for policy in policies:
            mine = cell.get(policy)
            ms = ttft(mine) if mine else None
            row.append((f"{score(mine):.0f}" if mine else "") + (f" ({ms:.0f})" if ms is not None else ""))
        rows.append(row)
    return rows


def loss_table(answers: Iterable[PolicyAnswer], only: Sequence[str] = ()) -> list[list[str]]:
    """Returns one row per task and one column per policy: points lost against ``full`` and the 95 % interval. The last
    row is over all cells, each counting the same."""
    cells = cells_of(answers)
    policies = [policy for policy in only or policies_of(cells) if policy != "full"]
    found = {policy: losses(cells, policy) for policy in policies}
    rows = [["task", "questions", "full", *policies]]
    for task in dict.fromkeys(task for task, _ in cells):
        full = [cell["full"] for (name, _), cell in cells.items() if name == task]
        points = [str(found[policy].get(task, "")) for policy in policies]
        rows.append([task, str(sum(map(len, full))), f"{statistics.mean(map(score, full)):.1f}", *points])
    full = [cell["full"] for cell in cells.values()]
    row = ["all cells", str(sum(map(len, full))), f"{statistics.mean(map(score, full)):.1f}"]
    for policy in policies:
        parts = [(cell[policy], cell["full"]) for cell in cells.values() if policy in cell]
        row.append(str(lost(parts)) if len(parts) == len(cells) else "")
    return [*rows, row]


def count_table(answers: Iterable[PolicyAnswer], what: str, only: Sequence[str] = ()) -> list[list[str]]:
    """Returns one row per number of chunks and one column per policy: means over the tasks that have every number of
    chunks, empty where a policy lacks one of them.

    Args:
        what: the figure: ``score``, ``lost`` (against ``full``, with 95 % intervals), ``ttft`` (median, ms), ``gflop``
            (of the prefill) or ``computed`` (tokens).
    """
    cells = cells_of(answers)
    counts, tasks = at_every_count(cells)
    if not tasks:
        raise BadRequest(f"no task was asked about each of {', '.join(map(str, counts))} chunks")
    if what == "lost":
        return _count_losses(cells, counts, tasks, only)
    if what not in _VALUES:
        raise BadRequest(f"{what!r} is not one of lost, {', '.join(_VALUES)}")
    value, form = _VALUES[what]
    policies = only or policies_of(cells)
    rows = [["chunks", *policies]]
    for count in counts:
        row = [str(count)]
        for policy in policies:
            found = at_count(cells, tasks, count, policy, value)
            row.append("" if found is None else form.format(found))
        rows.append(row)
    return rows


def _count_losses(
    cells: Cells, counts: Sequence[int], tasks: Sequence[str], only: Sequence[str]
) -> list[list[str]]:
    """Makes ``count_table`` of what was lost, with the questions and the score of ``full``."""
    policies = [policy for policy in only or policies_of(cells) if policy != "full"]
    rows = [["chunks", "questions", "full", *policies]]
    for count in counts:
        mine = [cells[task, count] for task in tasks]
        full = [cell["full"] for cell in mine]
        row = [str(count), str(sum(map(len, full))), f"{statistics.mean(map(score, full)):.1f}"]
        for policy in policies:
            parts = [(cell[policy], cell["full"]) for cell in mine if policy in cell]
            row.append(str(lost(parts)) if len(parts) == len(mine) else "")
        rows.append(row)
    return rows


_VALUES: dict[str, tuple[Callable[[Sequence[PolicyAnswer]], float | None], str]] = {
    "score": (score, "{:.1f}"),
    "ttft": (ttft, "{:.1f}"),
    "gflop": (lambda one: mean_of(a.flops / 1e9 for a in one), "{:.2f}"),
    "computed": (lambda one: mean_of(a.computed for a in one), "{:.0f}"),
}


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. The first row is the header; columns of figures are right-aligned."""
    head, *rest = rows
    lines = [head, ["---", *("---:" for _ in head[1:])], *rest]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
