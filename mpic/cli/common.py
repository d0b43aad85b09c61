"""What commands share: consoles, options, the client, tables, errors. Light imports only."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from mpic.errors import MPICError

if TYPE_CHECKING:
    from mpic.client import MPIC

DEFAULT_URL = "http://127.0.0.1:8000"

out = Console()
err = Console(stderr=True)

Url = Annotated[str, typer.Option(help="where the server listens")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar="MPIC_API_KEY", show_envvar=True, help="when the server has keys", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


def noun(help: str | None = None) -> typer.Typer:
    """The Typer app of a command's module. Of one function it makes a command (``mpic serve``), of several a group
    (``mpic files list``)."""
    return typer.Typer(
        no_args_is_help=help is not None,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        add_completion=False,
        help=help,
    )


def connect(url: str, key: str | None) -> MPIC:
    """A client of the server; refusals that pass (429, 503) are tried again a few times."""
    from mpic.client import MPIC

    return MPIC(url, key or "")


def print_json(value: Any) -> None:
    """To stdout, for scripts: no colours, no wrapping. Answers of the SDK become what the server sent."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def read_json(text: str, option: str) -> Any:
    """What an option says in JSON. Raises typer.BadParameter."""
    try:
        return json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(f"not JSON: {exc}", param_hint=option) from exc


def plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


WORDS = ("name", "title", "in prompts", "description")
"""Columns that may be wrapped where the terminal is narrow; ids and numbers are worth nothing in pieces."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """A table for a person, or ``empty``: what to do when there is nothing. Numbers are right-aligned."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        side: Literal["left", "right"] = "right" if name in ("bytes", "tokens", "score") else "left"
        table.add_column(name, justify=side, no_wrap=name not in WORDS, overflow="fold")
    for row in rows:
        table.add_row(*(number(cell) for cell in row))
    out.print(table if table.rows else empty, markup=False, highlight=False)


def number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_fields(fields: dict[str, Any]) -> None:
    """One thing, a line a field; what is not known is left out."""
    width = max(map(len, fields))
    for name, value in fields.items():
        if value not in (None, (), ""):
            out.print(f"{name:>{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


def when(seconds: int | None) -> str | None:
    """A time of the server for a person: ``2026-11-20 14:00:00``."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def is_expected(exc: BaseException) -> bool:
    """Whether an error is one line for the person rather than a traceback for us."""
    return isinstance(exc, MPICError)


def error_line(exc: Any) -> str:
    return f"error: {exc.message} [{exc.code}]"
