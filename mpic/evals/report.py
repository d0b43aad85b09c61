"""``mpic eval report``: tables and plots of a run, as Markdown and as one HTML page."""

from __future__ import annotations

import base64
import html
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpic.errors import BadRequest
from mpic.evals import lengths, plots
from mpic.evals.answers import PolicyAnswer, read_answers
from mpic.evals.compare import (
    MEAN_LIMIT,
    WORST_LIMIT,
    Grades,
    PolicyResult,
    at_count,
    at_every_count,
    cells_of,
    compare_policies,
    losses,
    lost,
    mean_of,
    metric_of,
    policies_of,
    score,
    ttft,
)
from mpic.evals.judge import read_grades
from mpic.evals.tasks import GRIDS
from mpic.figure import save_png

ENOUGH = 100
"""Fewer questions than this show little, whatever the interval is."""

# ---- tables for readers


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
                f"{result.worst_task} {result.worst.points:+.1f}",
                "" if result.ttft_ms is None else f"{result.ttft_ms:.1f} ms",
                "" if result.ttft_ratio is None else f"{result.ttft_ratio:.2f} x",
                f"{result.flops_ratio:.2f} x",
                f"{result.recomputed:.0f} %",
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


def needle_tables(answers: Iterable[PolicyAnswer]) -> dict[str, list[list[str]]]:
    """Returns for each policy the scores of a grid of needles: one row per depth (percent), one column per length
    (tokens)."""
    found: dict[str, dict[tuple[int, int], list[PolicyAnswer]]] = {}
    for (task, _), cell in cells_of(answers).items():
        for policy, given in cell.items() if task in GRIDS else ():
            for answer in given:
                length, depth = answer.sample.partition("#")[0].split("@")
                found.setdefault(policy, {}).setdefault((int(depth), int(length)), []).append(answer)
    tables = {}
    for policy, grid in found.items():
        lengths = sorted({length for _, length in grid})
        rows = [["depth", *(str(length) for length in lengths)]]
        for depth in sorted({depth for depth, _ in grid}):
            scores = [score(grid[depth, n]) if (depth, n) in grid else None for n in lengths]
            rows.append([f"{depth} %", *("" if one is None else f"{one:.0f}" for one in scores)])
        tables[policy] = rows
    return tables


def by_task(answers: Sequence[PolicyAnswer], grades: Grades) -> dict[str, list[PolicyResult]]:
    """Returns the results of each task that ``full`` answered."""
    names = dict.fromkeys(task for task, _ in cells_of(answers))
    return {name: compare_policies((a for a in answers if a.task == name), grades) for name in names}


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
        what: the figure: ``score``, ``ttft`` (median, ms), ``gflop`` (of the prefill) or ``computed`` (tokens).
    """
    cells = cells_of(answers)
    counts, tasks = at_every_count(cells)
    if not tasks:
        raise BadRequest(f"no task was asked about each of {', '.join(map(str, counts))} chunks")
    if what not in _VALUES:
        raise BadRequest(f"{what!r} is not one of {', '.join(_VALUES)}")
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


_VALUES: dict[str, tuple[Callable[[Sequence[PolicyAnswer]], float | None], str]] = {
    "score": (score, "{:.1f}"),
    "ttft": (ttft, "{:.1f}"),
    "gflop": (lambda one: mean_of(a.flops / 1e9 for a in one), "{:.2f}"),
    "computed": (lambda one: mean_of(a.computed for a in one), "{:.0f}"),
}


def advice(found: list[PolicyResult]) -> str:
    """Returns advice on which policy to use, from these figures alone."""
    within = [
        result for result in found if result.within_two_points and result.policy not in ("full", "prefix")
    ]
    if not within:
        return (
            f"No policy that reuses stays within {MEAN_LIMIT:.0f} points of `full` on average and {WORST_LIMIT:.0f} on "
            "every task here: use `prefix`, or look at the tasks that lose."
        )
    timed = all(result.ttft_ratio is not None for result in within)
    best = max(within, key=lambda result: (result.ttft_ratio if timed else None) or result.flops_ratio)
    sooner = (
        f"first token {best.ttft_ratio:.2f} x sooner"
        if timed
        else f"{best.flops_ratio:.2f} x fewer operations"
    )
    text = (
        f"Fastest policy within {MEAN_LIMIT:.0f} points of `full` on average and {WORST_LIMIT:.0f} on every task: "
        f"**{best.policy}** ({best.lost} points lost, {sooner})."
    )
    if best.questions < ENOUGH or best.lost.high > MEAN_LIMIT:
        text += f" {best.questions} questions are too few to be sure: ask more."
    return text


def write_report(out: Path) -> list[Path]:
    """Writes ``report.md``, ``report.html`` and their plots beside the answers.

    Raises:
        BadRequest: there are no answers.
    """
    answers = read_answers(out)
    grades = read_grades(out)
    found = compare_policies(answers, grades)
    if not found:
        raise BadRequest(f"{out} holds no answers of `full` to compare with")
    skipped = [answer for answer in answers if answer.skipped]
    title = _title(out)
    drawn: dict[str, Callable[[Any], None]] = {
        "score-ttft.png": lambda figure: plots.tradeoff(figure, found),
        "chunks.png": lambda figure: plots.by_chunks(figure, answers),
        "lengths.png": lambda figure: lengths.draw(figure, answers),
    }
    if len(tasks := by_task(answers, grades)) > 1:
        drawn["tasks.png"] = lambda figure: plots.by_task(figure, tasks)
    if grades:
        drawn["judge-tasks.png"] = lambda figure: plots.by_task(figure, tasks, judged=True)
        drawn["judge-chunks.png"] = lambda figure: plots.by_chunks(figure, answers, grades)
    for name, draw in drawn.items():
        rows = -(-len(tasks) // plots.COLUMNS) if name.endswith("tasks.png") else 1
        save_png(out / name, draw, (10, 1.5 + 3 * rows), dpi=110)
    sections: list[tuple[str, Any]] = [
        ("text", advice(found)),
        ("plot", "score-ttft.png"),
        ("table", summary_table(found)),
        ("text", "Points lost against `full` by task, with 95 % intervals:"),
        ("table", loss_table(answers)),
        (
            "text",
            "Score and, in brackets, median milliseconds to the first token, by task and number of chunks:",
        ),
        ("table", cell_table(answers)),
        *([("plot", "tasks.png")] if "tasks.png" in drawn else []),
        ("plot", "chunks.png"),
        ("text", "Lengths of prompts and answers, and scores by length of the prompt:"),
        ("plot", "lengths.png"),
        ("table", lengths.length_table(answers)),
        ("text", _notes(skipped)),
    ]
    if len(graded := grade_table(answers, grades)) > 1:
        sections.insert(3, ("text", "Grades of the judge, of 10, by dimension:"))
        sections.insert(4, ("table", graded))
        sections[5:5] = [("plot", "judge-tasks.png"), ("plot", "judge-chunks.png")]
    for policy, table in needle_tables(answers).items():
        sections += [("text", f"Needles under `{policy}`, by depth and length in tokens:"), ("table", table)]
    (out / "report.md").write_text(_markdown(title, sections), encoding="utf-8")
    (out / "report.html").write_text(_html(title, sections, out), encoding="utf-8")
    return [out / "report.md", out / "report.html", *(out / name for name in drawn)]


def _title(out: Path) -> str:
    run = json.loads((out / "run.json").read_text())
    return run.get("title") or f"Policies on {run['model']}"


def _notes(skipped: list[PolicyAnswer]) -> str:
    text = (
        "Scores are means over cells (a task with a number of chunks), each counting the same. Points lost are paired "
        "by question; in brackets a 95 % interval (bootstrap over questions): where it holds 0, the difference may be "
        "chance. Chunks were resident; times are of requests asked one at a time. FLOPs are of the prefill, without "
        "compiling chunks and encoding images. First token KL is that of the policy's distribution from that of "
        "`full`, in nats."
    )
    if skipped:
        reasons = sorted({str(answer.skipped) for answer in skipped})
        text += f" {len(skipped)} answers were skipped: {'; '.join(reasons[:5])}."
    return text


def _markdown(title: str, sections: list[tuple[str, Any]]) -> str:
    out = [f"# {title}"]
    for kind, body in sections:
        if kind == "plot":
            out.append(f"![{Path(body).stem}]({body})")
        elif kind == "table":
            out.append(markdown_table(body))
        else:
            out.append(body)
    return "\n\n".join(out) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. The first row is the header; columns of figures are right-aligned."""
    head, *rest = rows
    lines = [head, ["---", *("---:" for _ in head[1:])], *rest]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
td,th{padding:.3rem .7rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left} img{max-width:100%;background:#fff;border-radius:6px}
"""


def _html(title: str, sections: list[tuple[str, Any]], out: Path) -> str:
    body = [f"<h1>{html.escape(title)}</h1>"]
    for kind, content in sections:
        if kind == "plot":
            data = base64.b64encode((out / content).read_bytes()).decode()
            body.append(f'<p><img alt="{Path(content).stem}" src="data:image/png;base64,{data}"></p>')
        elif kind == "table":
            head, *rest = content
            cells = "".join(f"<th>{html.escape(c)}</th>" for c in head)
            rows = "".join(
                "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rest
            )
            body.append(f"<table><tr>{cells}</tr>{rows}</table>")
        else:
            text = html.escape(content).replace("`", "")
            body.append(f"<p>{text.replace('**', '')}</p>")
    return (
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>" + "".join(body)
    )
