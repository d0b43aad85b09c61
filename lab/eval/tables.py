"""Tables of a run's answers, for its report and for pages of the documentation; the first row of each is its header."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpic.errors import BadRequest
from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.compare import (
    Cells,
    Grades,
    PolicyResult,
    at_count,
    at_every_count,
    cells_of,
    complete_policies,
    lost,
    mean_of,
    metric_of,
    policies_of,
    score,
    ttft,
)
from mpic_lab.eval.tasks import GRIDS


def summary_table(found: list[PolicyResult]) -> list[list[str]]:
    """Return one row per policy, the best score first; the first row is the header. Policies that lack a cell come
    last and say so, because their figures are over other questions."""
    rows = [
        ["policy", "score", "lost", "worst task", "TTFT, median", "TTFT, full over it", "FLOPs, full over it",
         "chunk tokens recomputed", "first token KL", "first token agrees", "judge, of 10", "answer tokens",
         "questions"],
    ]  # fmt: skip
    for result in sorted(found, key=lambda one: (not one.complete, -one.score)):
        asked = "" if result.complete else f" ({result.cells} of {result.of_cells} cells)"
        rows.append(
            [
                f"{result.policy}{asked}",
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
    """Return one row per policy and one column per dimension of the judge's rubric: mean grades over the questions
    that every policy answered, without policies that lack a cell. There is only the header when nothing is graded."""
    cells = cells_of(answers)
    found = {
        policy: [grades[a.key] for cell in cells.values() for a in cell[policy] if a.key in grades]
        for policy in complete_policies(cells)
    }
    names = list(dict.fromkeys(name for given in found.values() for one in given for name in one))
    rows = [["policy", *names]]
    for policy, given in found.items():
        means = [mean_of(one.get(name) for one in given) for name in names]
        rows += [[policy, *("" if mean is None else f"{mean:.2f}" for mean in means)]] if given else []
    return rows


def needle_scores(answers: Iterable[PolicyAnswer]) -> dict[tuple[str, str], dict[tuple[int, int], float]]:
    """Return for each task and policy the scores of a grid of needles, by depth (percent) and length (tokens)."""
    found: dict[tuple[str, str], dict[tuple[int, int], list[PolicyAnswer]]] = {}
    for (task, _), cell in cells_of(answers).items():
        for policy, given in cell.items() if task in GRIDS else ():
            for answer in given:
                length, depth = answer.sample.partition("#")[0].split("@")
                grid = found.setdefault((task, policy), {})
                grid.setdefault((int(depth), int(length)), []).append(answer)
    return {key: {place: score(given) for place, given in grid.items()} for key, grid in found.items()}


def needle_tables(answers: Iterable[PolicyAnswer]) -> dict[tuple[str, str], list[list[str]]]:
    """Return for each task and policy a table of ``needle_scores``: one row per depth, one column per length."""
    tables = {}
    for key, grid in needle_scores(answers).items():
        lengths = sorted({length for _, length in grid})
        rows = [["depth", *(str(length) for length in lengths)]]
        for depth in sorted({depth for depth, _ in grid}):
            scores = (grid.get((depth, length)) for length in lengths)
            rows.append([f"{depth} %", *("" if one is None else f"{one:.0f}" for one in scores)])
        tables[key] = rows
    return tables


def grid_names(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the name of each task's and policy's grid: the policy, and the task beside it if there are several."""
    keys = list(keys)
    several = len({task for task, _ in keys}) > 1
    return {(task, policy): f"{policy}, {task}" if several else policy for task, policy in keys}


def cell_table(answers: Iterable[PolicyAnswer], only: Sequence[str] = ()) -> list[list[str]]:
    """Return one row per task and number of chunks, and one column per policy: score (TTFT in ms)."""
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
    """Return one row per task and one column per policy: points lost against ``full`` and the 95 % interval, empty
    where a policy lacks a cell. The last row is over all cells, each counting the same."""
    cells = cells_of(answers)
    policies = [policy for policy in only or policies_of(cells) if policy != "full"]
    rows = [["task", "questions", "full", *policies]]
    for task in dict.fromkeys(task for task, _ in cells):
        mine = [cell for (name, _), cell in cells.items() if name == task]
        rows.append([task, *_losses(mine, policies)])
    return [*rows, ["all cells", *_losses(list(cells.values()), policies)]]


def _losses(cells: Sequence[Mapping[str, Sequence[PolicyAnswer]]], policies: Sequence[str]) -> list[str]:
    """Return the questions of some cells, the score of ``full``, and the points that each policy lost."""
    full = [cell["full"] for cell in cells]
    row = [str(sum(map(len, full))), f"{statistics.mean(map(score, full)):.1f}"]
    for policy in policies:
        parts = [(cell[policy], cell["full"]) for cell in cells if policy in cell]
        row.append(str(lost(parts)) if len(parts) == len(cells) else "")
    return row


def count_table(answers: Iterable[PolicyAnswer], what: str, only: Sequence[str] = ()) -> list[list[str]]:
    """Return one row per number of chunks and one column per policy: means over the tasks that have every number of
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
    """Make ``count_table`` of what was lost, with the questions and the score of ``full``."""
    policies = [policy for policy in only or policies_of(cells) if policy != "full"]
    rows = [["chunks", "questions", "full", *policies]]
    for count in counts:
        rows.append([str(count), *_losses([cells[task, count] for task in tasks], policies)])
    return rows


_VALUES: dict[str, tuple[Callable[[Sequence[PolicyAnswer]], float | None], str]] = {
    "score": (score, "{:.1f}"),
    "ttft": (ttft, "{:.1f}"),
    "gflop": (lambda one: mean_of(a.flops / 1e9 for a in one), "{:.2f}"),
    "computed": (lambda one: mean_of(a.computed for a in one), "{:.0f}"),
}


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is the header; columns of figures are right-aligned."""
    head, *rest = rows
    lines = [head, ["---", *("---:" for _ in head[1:])], *rest]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
