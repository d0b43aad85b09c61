"""The table of compressed packets: KV Packet's three configurations (arXiv 2604.13226, figure 4) in one run.

The run has the policies ``packet`` and ``single`` uncompressed and, for every press and share removed, Normal
(``packet+PRESS-R-0``), Keep Filler (``packet+PRESS-R-H-T`` with the lengths of the adapter's header and trailer) and
Single Cache (``single+PRESS-R-0``). All differences are between answers to the same questions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mpic.errors import BadRequest
from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.compare import Cells, Lost, cells_of, interval, points, policies_of
from mpic_lab.eval.single import SINGLE

PACKET = "packet"
HEADER = [
    "press", "removed, %", "packets, KB", "Normal", "lost to `packet`", "Keep Filler", "lost to Normal",
    "single, KB", "Single Cache", "lost to `single`",
]  # fmt: skip


def pressed_table(answers: Sequence[PolicyAnswer], filler: str, presses: Sequence[str]) -> list[list[str]]:
    """Return the table as text, the header first: a row for each press and share removed, one for all shares of a
    press together, and one for all presses. Scores are in points of 100, losses with their 95 % intervals; every task
    counts the same.

    Args:
        filler: lengths of header and trailer as the names of presses have them, such as ``8-8``.
        presses: names of presses without their numbers, such as ``cur``.

    Raises:
        BadRequest: the run lacks a policy; it is named.
    """
    cells = cells_of(answers)
    found = policies_of(cells)
    rows = [HEADER, _row(cells, "none", "0", [PACKET], [PACKET], [SINGLE])]
    every: list[tuple[str, str, str]] = []
    for press in presses:
        shares = [m[1] for name in found if (m := re.fullmatch(rf"{PACKET}\+{press}-(\d+)-0", name))]
        if not shares:
            raise BadRequest(f"the run has no {PACKET}+{press}-R-0")
        ways = [
            (f"{PACKET}+{press}-{r}-0", f"{PACKET}+{press}-{r}-{filler}", f"{SINGLE}+{press}-{r}-0")
            for r in shares
        ]
        for r, way in zip(shares, ways, strict=True):
            rows.append(_row(cells, f"`{press}`", r, *([name] for name in way)))
        rows.append(_row(cells, f"`{press}`", "all", *(list(names) for names in zip(*ways, strict=True))))
        every += ways
    return [*rows, _row(cells, "all", "all", *(list(names) for names in zip(*every, strict=True)))]


def lost_between(cells: Cells, pairs: Sequence[tuple[str, str]]) -> Lost:
    """Return the points that policies lose to others, as (policy, the other): the mean over the pairs, question by
    question, and its 95 % interval over the questions.

    Raises:
        BadRequest: a cell lacks a policy.
    """
    parts = [
        np.mean([_points(cell, other) - _points(cell, mine) for mine, other in pairs], 0)
        for cell in cells.values()
    ]
    return Lost(float(np.mean([part.mean() for part in parts])), *interval(parts))


def _answers(cell: dict[str, Sequence[PolicyAnswer]], policy: str) -> Sequence[PolicyAnswer]:
    if policy not in cell:
        raise BadRequest(f"the run has no answers of {policy} to every task")
    return cell[policy]


def _points(cell: dict[str, Sequence[PolicyAnswer]], policy: str) -> np.ndarray:
    return np.array([points(answer) for answer in _answers(cell, policy)])


def _row(
    cells: Cells, press: str, share: str, normal: list[str], keep: list[str], single: list[str]
) -> list[str]:
    def lost(mine: list[str], other: list[str]) -> str:
        if mine == other:
            return ""
        return str(lost_between(cells, list(zip(mine, other, strict=True))))

    n = len(normal)
    return [
        press, share, _size(cells, normal),
        _score(cells, normal), lost(normal, [PACKET] * n),
        "" if keep == normal else _score(cells, keep), lost(keep, normal),
        _size(cells, single), _score(cells, single), lost(single, [SINGLE] * n),
    ]  # fmt: skip


def _score(cells: Cells, policies: Sequence[str]) -> str:
    return f"{np.mean([_points(cell, name).mean() for cell in cells.values() for name in policies]):.1f}"


def _size(cells: Cells, policies: Sequence[str]) -> str:
    sizes = [
        np.mean([answer.kv_bytes or 0 for answer in _answers(cell, name)])
        for cell in cells.values()
        for name in policies
    ]
    return f"{np.mean(sizes) / 1000:,.0f}"
