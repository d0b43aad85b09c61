"""What commands share: consoles, options, JSON, errors. Light imports only."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from mpic.errors import MPICError

DEFAULT_URL = "http://127.0.0.1:8000"

out = Console()
err = Console(stderr=True)

Url = Annotated[str, typer.Option(help="where the server listens")]
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


def print_json(value: Any) -> None:
    """To stdout, for scripts: no colours, no wrapping."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def is_expected(exc: BaseException) -> bool:
    """Whether an error is one line for the person rather than a traceback for us."""
    from mpic.client import APIError

    return isinstance(exc, (MPICError, APIError))


def error_line(exc: Any) -> str:
    return f"error: {exc.message} [{exc.code}]"
