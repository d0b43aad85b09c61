"""Printing in a terminal: control characters are removed from names and answers, and tables are never cut off."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tabs and ends of lines, and those that turn the direction of writing: a terminal obeys
them, and shows something else than is there."""

FOLDED = 20
"""Characters of a word that stay together in a column that may break words."""


def printable(text: str) -> str:
    """Return a text that somebody else wrote with a mark in place of every character that a terminal would obey."""
    return COMMANDS.sub("\ufffd", text)


class PlainConsole(Console):
    """A console that sends no terminal commands hidden in texts, those of cells included."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def print_whole(table: Table, console: Console) -> None:
    """Print a table without cutting off anything: one that has no room in the console becomes wider than it, so that
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
