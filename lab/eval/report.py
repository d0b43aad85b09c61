"""``mpic eval report``: tables and plots of a run, as Markdown and as one HTML page."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpic.errors import BadRequest
from mpic_lab.eval import lengths, plots
from mpic_lab.eval.answers import PolicyAnswer, read_answers
from mpic_lab.eval.compare import (
    MEAN_LIMIT,
    WORST_LIMIT,
    Grades,
    PolicyResult,
    cells_of,
    compare_policies,
)
from mpic_lab.eval.judge import read_grades
from mpic_lab.eval.tables import (
    cell_table,
    grade_table,
    grid_names,
    loss_table,
    markdown_table,
    needle_scores,
    needle_tables,
    summary_table,
)
from mpic_lab.figure import save_png

ENOUGH = 100
"""Fewer questions than this show little, whatever the interval is."""


def by_task(answers: Sequence[PolicyAnswer], grades: Grades) -> dict[str, list[PolicyResult]]:
    """Return the results of each task that ``full`` answered."""
    names = dict.fromkeys(task for task, _ in cells_of(answers))
    return {name: compare_policies((a for a in answers if a.task == name), grades) for name in names}


def advice(found: list[PolicyResult]) -> str:
    """Return advice on which policy to use, from these figures alone: of the policies that answered every cell."""
    within = [
        result
        for result in found
        if result.complete and result.within_two_points and result.policy not in ("full", "prefix")
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
    """Write ``report.md``, ``report.html`` and their plots beside the answers.

    Raises:
        BadRequest: there are no answers.
    """
    answers = read_answers(out)
    grades = read_grades(out)
    found = compare_policies(answers, grades)
    if not found:
        raise BadRequest(f"{out} holds no answers of `full` to compare with")
    skipped = [answer for answer in answers if answer.skipped]
    run = json.loads((out / "run.json").read_text())
    title = run.get("title") or f"Policies on {run['model']}"
    drawn: dict[str, Callable[[Any], None]] = {
        "score-ttft.png": lambda figure: plots.tradeoff(figure, found),
        "chunks.png": lambda figure: plots.by_chunks(figure, answers),
        "lengths.png": lambda figure: lengths.draw(figure, answers),
    }
    if len(tasks := by_task(answers, grades)) > 1:
        drawn["tasks.png"] = lambda figure: plots.by_task(figure, tasks)
    if grids := needle_scores(answers):
        named = {grid_names(grids)[key]: grid for key, grid in grids.items()}
        drawn["needles.png"] = lambda figure: plots.needles(figure, named)
    if grades:
        drawn["judge-tasks.png"] = lambda figure: plots.by_task(figure, tasks, judged=True)
        drawn["judge-chunks.png"] = lambda figure: plots.by_chunks(figure, answers, grades)
    for name, draw in drawn.items():
        panels = {"tasks.png": tasks, "judge-tasks.png": tasks, "needles.png": grids}.get(name, ())
        rows = max(1, -(-len(panels) // plots.COLUMNS))
        save_png(out / name, draw, (10, 1.5 + 3 * rows), dpi=110)
    sections: list[tuple[str, Any]] = [
        *(("text", note) for note in run.get("stand_in", ())),
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
        ("text", "Lengths of prompts and answers, and scores and points lost by length of the prompt:"),
        ("plot", "lengths.png"),
        ("table", lengths.length_table(answers)),
        ("text", _notes(skipped, [result.policy for result in found if not result.complete])),
    ]
    if len(graded := grade_table(answers, grades)) > 1:
        summary = sections.index(("plot", "score-ttft.png")) + 2
        sections[summary:summary] = [
            ("text", "Grades of the judge, of 10, by dimension:"),
            ("table", graded),
            ("plot", "judge-tasks.png"),
            ("plot", "judge-chunks.png"),
        ]
    if grids:
        sections.append(("plot", "needles.png"))
    names = grid_names(grids)
    for key, table in needle_tables(answers).items():
        title_of = f"Needles under `{names[key]}`, by depth and length in tokens:"
        sections += [("text", title_of), ("table", table)]
    (out / "report.md").write_text(_markdown(title, sections), encoding="utf-8")
    (out / "report.html").write_text(_html(title, sections, out), encoding="utf-8")
    return [out / "report.md", out / "report.html", *(out / name for name in drawn)]


def _notes(skipped: list[PolicyAnswer], incomplete: list[str]) -> str:
    text = (
        "Scores are means over cells (a task with a number of chunks), each counting the same. Points lost are paired "
        "by question; in brackets a 95 % interval (bootstrap over questions): where it holds 0, the difference may be "
        "chance. Chunks were resident; times are of requests asked one at a time. FLOPs are of the prefill, without "
        "compiling chunks and encoding images. First token KL is that of the policy's distribution from that of "
        "`full`, in nats."
    )
    if incomplete:
        text += (
            f" {', '.join(incomplete)} did not answer every cell: their figures are over other questions, so they are "
            "listed last, and are left out of the plots and of the advice."
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
