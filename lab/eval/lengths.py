"""Lengths of prompts and answers, and scores by length of the prompt (EPIC, figure 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.compare import cells_of, complete_policies, lost, score
from mpic_lab.eval.plots import style_of

BINS = 4
"""Ranges of lengths with about as many questions each."""


def by_length(answers: Iterable[PolicyAnswer]) -> list[tuple[int, int, dict[str, list[PolicyAnswer]]]]:
    """Return (least, most, answers by policy) of each range of prompt lengths; a question has the length of its prompt
    under ``full``, whose chunks are all there. A policy that lacks a cell is left out, because its mean would be over
    other questions."""
    cells = cells_of(answers)
    policies = complete_policies(cells)
    rows = [
        {policy: cell[policy][number] for policy in policies}
        for cell in cells.values()
        for number in range(len(cell["full"]))
    ]
    rows.sort(key=lambda row: row["full"].prompt_tokens)
    found = []
    for part in np.array_split(np.arange(len(rows)), min(BINS, len(rows))):
        mine = [rows[i] for i in part]
        lengths = [row["full"].prompt_tokens for row in mine]
        found.append(
            (lengths[0], lengths[-1], {policy: [row[policy] for row in mine] for policy in policies})
        )
    return found


def length_table(answers: Iterable[PolicyAnswer], only: Sequence[str] = ()) -> list[list[str]]:
    """Return one row per range of prompt lengths (tokens): the score of ``full``, and one column per policy with the
    points it lost against that and their 95 % interval."""
    found = by_length(answers)
    policies = [p for p in found[0][2] if p != "full" and (not only or p in only)] if found else []
    rows = [["prompt tokens", "questions", "full", *policies]]
    for low, high, mine in found:
        full = mine["full"]
        points = [str(lost([(mine[policy], full)])) for policy in policies]
        rows.append([f"{low} to {high}", str(len(full)), f"{score(full):.1f}", *points])
    return rows


def draw(figure: Any, answers: Sequence[PolicyAnswer]) -> None:
    """Draw the lengths of prompts and of the answers of ``full`` by task, and scores by length of the prompt."""
    full = [answer for cell in cells_of(answers).values() for answer in cell["full"]]
    tasks = list(dict.fromkeys(answer.task for answer in full))
    prompts, lengths, scores = figure.subplots(1, 3, width_ratios=(2, 2, 3))
    for axes, name, label in (
        (prompts, "prompt_tokens", "tokens of a prompt"),
        (lengths, "answer_tokens", "tokens of an answer under full"),
    ):
        values = [[getattr(a, name) for a in full if a.task == task] for task in tasks]
        there = [[value for value in one if value is not None] for one in values]
        axes.boxplot(there, orientation="horizontal", tick_labels=tasks, widths=0.6)
        axes.set_xlabel(label)
        axes.invert_yaxis()
        axes.grid(alpha=0.3)
    lengths.set_yticklabels([])
    found = by_length(answers)
    for number, policy in enumerate(found[0][2]):
        line = [((low + high) / 2, score(mine[policy])) for low, high, mine in found]
        scores.plot(*zip(*line, strict=True), markersize=4, label=policy, **style_of(number))
    scores.set(xlabel="tokens of a prompt", ylabel="score", ylim=(0, 102))
    scores.grid(alpha=0.3)
    scores.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
