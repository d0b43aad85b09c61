"""``mpic eval report``: tables and plots of a run, as Markdown and as one HTML page."""

from __future__ import annotations

import base64
import html
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpic.errors import BadRequest
from mpic.evals.judge import read_grades
from mpic.evals.run import Answer, read_answers
from mpic.evals.tasks import find

NEAR, WORST = 2.0, 5.0
"""Points a policy may lose against ``full``: on average, and on its worst task."""


@dataclass(frozen=True)
class Line:
    """A policy over some answers. Scores in points of 100, times in milliseconds; ratios are against ``full``."""

    policy: str
    questions: int
    score: float
    lost: float
    worst: float
    worst_task: str
    ttft_ms: float
    ttft_ratio: float
    flops_ratio: float
    recomputed: float
    kl: float | None
    top1: float | None
    judged: float | None = None

    @property
    def near(self) -> bool:
        return self.lost <= NEAR and self.worst <= WORST


Grades = Mapping[tuple[str, int, str, str], Mapping[str, float]]


def lines(answers: Iterable[Answer], grades: Grades | None = None) -> list[Line]:
    """One line a policy over all cells, each cell counting the same; only samples that every policy answered."""
    cells = _cells(answers)
    policies = list(dict.fromkeys(policy for cell in cells.values() for policy in cell))
    found = []
    for policy in policies:
        parts = {key: (cell[policy], cell["full"]) for key, cell in cells.items() if policy in cell}
        lost = {key: _score(full) - _score(mine) for key, (mine, full) in parts.items()}
        by_task: dict[str, list[float]] = defaultdict(list)
        for (task, _), value in lost.items():
            by_task[task].append(value)
        per_task = {task: statistics.mean(values) for task, values in by_task.items()}
        worst = max(per_task, key=per_task.__getitem__)
        mine = [answer for one, _ in parts.values() for answer in one]
        full = [answer for _, one in parts.values() for answer in one]
        found.append(
            Line(
                policy,
                len(mine),
                statistics.mean(_score(one) for one, _ in parts.values()),
                statistics.mean(lost.values()),
                per_task[worst],
                worst,
                statistics.median(a.ttft_ms for a in mine),
                statistics.median(b.ttft_ms / a.ttft_ms for a, b in zip(mine, full, strict=True)),
                sum(b.flops for b in full) / max(1.0, sum(a.flops for a in mine)),
                100
                * sum(a.chunk_tokens - a.reused for a in mine)
                / max(1, sum(a.chunk_tokens for a in full)),
                _mean(a.kl for a in mine),
                _mean(None if a.top1 is None else 100.0 * a.top1 for a in mine),
                _mean(_mean((grades or {}).get(a.key, {}).values()) for a in mine),
            )
        )
    return found


def _cells(answers: Iterable[Answer]) -> dict[tuple[str, int], dict[str, list[Answer]]]:
    """(task, chunks) -> policy -> answers to the same samples in the same order."""
    grouped: dict[tuple[str, int], dict[str, dict[str, Answer]]] = defaultdict(lambda: defaultdict(dict))
    for answer in answers:
        if answer.skipped is None:
            grouped[answer.task, answer.chunks][answer.policy][answer.sample] = answer
    cells = {}
    for key, cell in sorted(grouped.items()):
        if "full" not in cell:
            continue
        common = set.intersection(*(set(found) for found in cell.values()))
        order = [sample for sample in cell["full"] if sample in common]
        if order:
            cells[key] = {policy: [found[s] for s in order] for policy, found in cell.items()}
    return cells


def _score(answers: Sequence[Answer]) -> float:
    metric = find(answers[0].task).metric
    return 100 * statistics.mean(answer.scores[metric] for answer in answers)


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.mean(there) if there else None


# ---- what people read


def summary_table(found: list[Line]) -> list[list[str]]:
    """A row a policy; the first row is the header."""
    rows = [
        ["policy", "score", "lost", "worst task", "TTFT, median", "TTFT, full over it", "FLOPs, full over it",
         "chunk tokens recomputed", "first token KL", "first token agrees", "judge, of 10"],
    ]  # fmt: skip
    for line in sorted(found, key=lambda one: -one.score):
        rows.append(
            [
                line.policy,
                f"{line.score:.1f}",
                f"{line.lost:+.1f}",
                f"{line.worst_task} {line.worst:+.1f}",
                f"{line.ttft_ms:.1f} ms",
                f"{line.ttft_ratio:.2f} x",
                f"{line.flops_ratio:.2f} x",
                f"{line.recomputed:.0f} %",
                "" if line.kl is None else f"{line.kl:.3f}",
                "" if line.top1 is None else f"{line.top1:.0f} %",
                "" if line.judged is None else f"{line.judged:.2f}",
            ]
        )
    empty = [i for i in range(len(rows[0])) if i and not any(row[i] for row in rows[1:])]
    return [[cell for i, cell in enumerate(row) if i not in empty] for row in rows]


def cell_table(answers: Iterable[Answer]) -> list[list[str]]:
    """A row a task and number of chunks, a column a policy: score (TTFT in ms)."""
    cells = _cells(answers)
    policies = list(dict.fromkeys(policy for cell in cells.values() for policy in cell))
    rows = [["task", "chunks", "n", "metric", *policies]]
    for (task, chunks), cell in cells.items():
        row = [task, str(chunks or ""), str(len(cell["full"])), find(task).metric]
        for policy in policies:
            mine = cell.get(policy)
            ms = statistics.median(a.ttft_ms for a in mine) if mine else 0
            row.append(f"{_score(mine):.0f} ({ms:.0f})" if mine else "")
        rows.append(row)
    return rows


def advice(found: list[Line]) -> str:
    """Which policy when, from these figures alone."""
    near = [line for line in found if line.near and line.policy not in ("full", "prefix")]
    if not near:
        return (
            f"No policy that reuses stays within {NEAR:.0f} points of `full` on average and {WORST:.0f} on every task "
            "here: use `prefix`, or look at the tasks that lose."
        )
    best = min(near, key=lambda line: line.ttft_ms)
    return (
        f"Fastest policy within {NEAR:.0f} points of `full` on average and {WORST:.0f} on every task: "
        f"**{best.policy}** ({best.lost:+.1f} points lost, first token {best.ttft_ratio:.2f} x sooner)."
    )


def write_report(out: Path, title: str | None = None) -> list[Path]:
    """``report.md``, ``report.html`` and their plots beside the answers.

    Raises:
        BadRequest: there are no answers.
    """
    answers = read_answers(out)
    found = lines(answers, read_grades(out))
    if not found:
        raise BadRequest(f"{out} holds no answers of `full` to compare with")
    skipped = [answer for answer in answers if answer.skipped]
    title = title or f"Policies on {_model(out)}"
    plots = {
        "score-ttft.png": lambda f: _plot_tradeoff(f, found),
        "chunks.png": lambda f: _plot_chunks(f, answers),
    }
    for name, draw in plots.items():
        _save(out / name, draw)
    blocks: list[tuple[str, Any]] = [
        ("text", advice(found)),
        ("plot", "score-ttft.png"),
        ("table", summary_table(found)),
        (
            "text",
            "Score and, in brackets, median milliseconds to the first token, by task and number of chunks:",
        ),
        ("table", cell_table(answers)),
        ("plot", "chunks.png"),
        ("text", _notes(skipped)),
    ]
    (out / "report.md").write_text(_markdown(title, blocks), encoding="utf-8")
    (out / "report.html").write_text(_html(title, blocks, out), encoding="utf-8")
    return [out / "report.md", out / "report.html", *(out / name for name in plots)]


def _model(out: Path) -> str:
    return str(json.loads((out / "run.json").read_text())["model"])


def _notes(skipped: list[Answer]) -> str:
    text = (
        "Scores are means over cells (a task with a number of chunks), each counting the same. Chunks were resident; "
        "one request at a time. FLOPs are of the prefill, without compiling chunks and encoding images. First token KL "
        "is that of the policy's distribution from that of `full`, in nats."
    )
    if skipped:
        reasons = sorted({str(answer.skipped) for answer in skipped})
        text += f" {len(skipped)} answers were skipped: {'; '.join(reasons[:5])}."
    return text


def _markdown(title: str, blocks: list[tuple[str, Any]]) -> str:
    out = [f"# {title}"]
    for kind, body in blocks:
        if kind == "plot":
            out.append(f"![{Path(body).stem}]({body})")
        elif kind == "table":
            head, *rest = body
            rows = [head, ["---"] * len(head), *rest]
            out.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
        else:
            out.append(body)
    return "\n\n".join(out) + "\n"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
td,th{padding:.3rem .7rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left} img{max-width:100%;background:#fff;border-radius:6px}
"""


def _html(title: str, blocks: list[tuple[str, Any]], out: Path) -> str:
    body = [f"<h1>{html.escape(title)}</h1>"]
    for kind, content in blocks:
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


# ---- plots


def _save(path: Path, draw: Callable[[Any], None]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(path, dpi=120)


def _plot_tradeoff(figure: Any, found: list[Line]) -> None:
    axes = figure.subplots()
    markers = "osD^vPX*<>hdp"
    for number, line in enumerate(found):
        marker = markers[number % len(markers)]
        axes.scatter(line.ttft_ms, line.score, s=48, marker=marker, alpha=0.8, label=line.policy)
    full = next((line for line in found if line.policy == "full"), None)
    if full is not None:
        axes.axhspan(full.score - NEAR, full.score, alpha=0.12, label=f"within {NEAR:.0f} points of full")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    axes.set(xlabel="time to first token, median (ms)", ylabel="score", ylim=(0, 102))
    axes.grid(alpha=0.3)


def _plot_chunks(figure: Any, answers: list[Answer]) -> None:
    """Means over the tasks that have every number of chunks, so that lines compare like with like."""
    cells = _cells(answers)
    counts = sorted({chunks for _, chunks in cells})
    tasks = [t for t in dict.fromkeys(task for task, _ in cells) if all((t, n) in cells for n in counts)]
    score, time = figure.subplots(1, 2)
    policies = list(dict.fromkeys(policy for cell in cells.values() for policy in cell))
    for policy in policies if tasks else ():
        found = [[cells[task, n][policy] for task in tasks if policy in cells[task, n]] for n in counts]
        if not all(found):
            continue
        score.plot(
            counts, [statistics.mean(_score(one) for one in part) for part in found], marker="o", label=policy
        )
        ms = [statistics.median(a.ttft_ms for one in part for a in one) for part in found]
        time.plot(counts, ms, marker="o", label=policy)
    score.set(xlabel="chunks", ylabel="score", ylim=(0, 102))
    time.set(xlabel="chunks", ylabel="time to first token, median (ms)")
    for axes in (score, time):
        axes.grid(alpha=0.3)
    if tasks:
        time.legend(fontsize=7)
