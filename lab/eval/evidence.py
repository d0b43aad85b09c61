"""``mpic eval fill``: writes the tables of a report from the answers of runs.

A Markdown file marks where a table belongs::

    <!-- made: losses demo mpic-16 legolink-16 -->
    <!-- end -->

and the text between the two lines is replaced. A run is a folder, by its path from the file; ``RUN:TASK,TASK`` are
some tasks of it, ``RUN:TASK@4,8`` its questions about so many chunks.

===================================================  ====================================================
``summary RUN [POLICIES]``                           a row a policy
``losses RUN [POLICIES]``                            a row a task: points lost, with 95 % intervals
``cells RUN [POLICIES]``                             a row a task and number of chunks: scores and times
``counts WHAT RUN [POLICIES]``                       a row a number of chunks (``tables.count_table``)
``runs POLICIES: RUN ...``                           a row a run: score of ``full``, points lost (empty: a policy
                                                     lacks a cell)
``needles RUN POLICIES``                             scores by length (column) and depth (row), a table a policy and
                                                     task
``pressed RUN FILLER PRESSES``                       a row a press and share: three ways to compress packets
``methods FILE``                                     what ``mpic eval table`` wrote: a row a policy and press
===================================================  ====================================================
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import NamedTuple

from mpic.errors import BadRequest
from mpic_lab.eval.answers import PolicyAnswer, read_answers
from mpic_lab.eval.compare import cells_of, compare_policies, score
from mpic_lab.eval.methods import read_table
from mpic_lab.eval.pressed import pressed_table
from mpic_lab.eval.tables import (
    cell_table,
    count_table,
    grid_names,
    loss_table,
    markdown_table,
    needle_tables,
    summary_table,
)

_MARK = re.compile(r"(<!-- made: (?P<what>[^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def fill(path: Path) -> int:
    """Replace the tables of a report; return their number.

    Raises:
        BadRequest: a mark asks for something that does not exist.
    """
    found = 0

    def made(match: re.Match[str]) -> str:
        nonlocal found
        found += 1
        words = shlex.split(match["what"])
        maker = _MAKERS.get(words[0]) if words else None
        if maker is None:
            raise BadRequest(f"{path.name}: cannot make {match['what']!r}; there are {', '.join(_MAKERS)}")
        try:
            given = signature(maker).bind(path.parent, *words[1:])
        except TypeError as error:
            raise BadRequest(f"{path.name}: {match['what']!r}: {error}") from None
        return f"{match[1]}\n{maker(*given.args)}\n\n{match[4]}"

    text = _MARK.sub(made, path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    return found


class _Run(NamedTuple):
    """A run as a mark names it: ``NAME``, ``NAME:TASK,TASK``, ``NAME@4,8`` or ``NAME:TASK@4,8``; empty: all of them."""

    name: str
    tasks: list[str]
    counts: list[str]

    @classmethod
    def of(cls, text: str) -> _Run:
        rest, _, counts = text.partition("@")
        name, _, tasks = rest.partition(":")
        return cls(name, tasks.split(",") if tasks else [], counts.split(",") if counts else [])

    def __str__(self) -> str:
        counts = f"{', '.join(self.counts)} chunks" if self.counts else ""
        return ", ".join(part for part in (Path(self.name).name, counts) if part)

    def answers(self, folder: Path) -> list[PolicyAnswer]:
        answers = [
            answer
            for answer in read_answers(folder / self.name)
            if (not self.tasks or answer.task in self.tasks)
            and (not self.counts or str(answer.chunks) in self.counts)
        ]
        if not answers:
            wanted = (
                f" to {', '.join(self.tasks) or 'any task'} over {self} " if self.tasks or self.counts else ""
            )
            raise BadRequest(f"{folder / self.name} holds no answers{wanted.rstrip()}")
        return answers


def _answers(folder: Path, run: str) -> list[PolicyAnswer]:
    return _Run.of(run).answers(folder)


def _summary(folder: Path, run: str, *policies: str) -> str:
    found = [
        result
        for result in compare_policies(_answers(folder, run))
        if not policies or result.policy in policies
    ]
    return markdown_table(summary_table(found))


def _table_of(table: Callable[[list[PolicyAnswer], Sequence[str]], list[list[str]]]) -> Callable[..., str]:
    """Return the function that writes such a table of a run, of all policies or of those that are named."""

    def write(folder: Path, run: str, *policies: str) -> str:
        return markdown_table(table(_answers(folder, run), policies))

    return write


def _counts(folder: Path, what: str, run: str, *policies: str) -> str:
    return markdown_table(count_table(_answers(folder, run), what, policies))


def _runs(folder: Path, *words: str) -> str:
    """Make the table of runs. ``words`` are policies, the last one with a colon, then runs."""
    last = next((n for n, word in enumerate(words) if word.endswith(":")), -1)
    policies, runs = [word.rstrip(":") for word in words[: last + 1]], words[last + 1 :]
    rows = [["", "questions", "chunks a question", "full", *policies]]
    for run in runs:
        answers = _answers(folder, run)
        cells = cells_of(answers)
        found = {result.policy: result for result in compare_policies(answers)}
        full = [answer for cell in cells.values() for answer in cell["full"]]
        pieces = sum(answer.pieces for answer in full) / len(full)
        points = [str(found[policy].lost) if found[policy].complete else "" for policy in policies]
        rows.append([str(_Run.of(run)), str(len(full)), f"{pieces:.1f}", f"{score(full):.1f}", *points])
    return markdown_table(rows)


def _needles(folder: Path, run: str, *policies: str) -> str:
    tables = needle_tables(_answers(folder, run))
    there = list(dict.fromkeys(policy for _, policy in tables))
    missing = [policy for policy in policies or ["full"] if policy not in there]
    if missing:
        raise BadRequest(f"{folder / run} has no grid of needles of {', '.join(missing)}")
    names = grid_names(tables)
    chosen = [key for policy in policies or there for key in tables if key[1] == policy]
    return "\n\n".join(f"`{names[key]}`:\n\n{markdown_table(tables[key])}" for key in chosen)


def _pressed(folder: Path, run: str, filler: str, *presses: str) -> str:
    return markdown_table(pressed_table(_answers(folder, run), filler, presses))


def _methods(folder: Path, file: str) -> str:
    if not (folder / file).is_file():
        run = f"mpic eval run {Path(file).with_suffix('.toml')} --table {file}"
        return f"Not measured yet: `{run}` writes it."
    return markdown_table(read_table(folder / file))


_MAKERS: dict[str, Callable[..., str]] = {
    "summary": _summary,
    "losses": _table_of(loss_table),
    "cells": _table_of(cell_table),
    "counts": _counts,
    "runs": _runs,
    "needles": _needles,
    "pressed": _pressed,
    "methods": _methods,
}
