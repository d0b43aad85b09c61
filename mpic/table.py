"""Tables in a terminal, of which nothing is cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FOLDED = 20
"""Characters of a word that stay together in a column that may break words."""


def print_whole(table: Table, console: Console) -> None:
    """Prints a table without cutting off anything: one that has no room in the console becomes wider than it, so that
    an id can be copied and a number read. Columns with ``no_wrap`` stay on one line; others are broken between words,
    and those with ``overflow="fold"`` within long ones, too."""
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        pieces = cells if column.no_wrap else [word for cell in cells for word in cell.split()]
        widest = max(map(len, pieces), default=1)
        folds = column.overflow == "fold" and not column.no_wrap
        column.min_width = min(widest, FOLDED) if folds else widest
    before = console.width
    least = console.measure(table, options=console.options.update(max_width=10_000)).minimum
    console.width = max(before, least)
    console.print(table, markup=False, crop=False)
    console.width = before
