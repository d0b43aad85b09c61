"""Helpers of all commands: consoles, options, the client, tables, errors. This module has no slow imports."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mpic.errors import MPICError
from mpic.table import COMMANDS, PlainConsole

DEFAULT_URL = "http://127.0.0.1:8000"

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
"""The console prints text without interpreting markup, because it may be an answer or a name chosen by a user."""
out = PlainConsole(**PLAIN)
err = PlainConsole(stderr=True, **PLAIN)

Url = Annotated[
    str, typer.Option(envvar="MPIC_URL", show_envvar=True, help="where the server listens: URL or host:port")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="MPIC_API_KEY", show_envvar=True, help="when the server has keys", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]
TTL = Annotated[int | None, typer.Option(min=1, help="seconds until it expires; left out: never")]
NewTTL = Annotated[int | None, typer.Option(min=1, help="seconds from now; left out: it never expires")]
KVTTL = Annotated[
    int | None,
    typer.Option(
        "--kv-ttl",
        min=1,
        help="seconds for which its compiled KV is kept unused; left out: as the server is configured",
    ),
]
Off = Annotated[bool, typer.Option("--off", help="end it")]
OldTTL = Annotated[int | None, typer.Option("--expires", min=1, hidden=True, help="the older name of --ttl")]


def command_app(help: str | None = None, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Return the Typer app of a command's module.

    One function becomes a command (``mpic serve``), several become a group (``mpic files list``).
    """
    return typer.Typer(
        cls=cls,
        context_settings=HELP_OPTIONS,
        no_args_is_help=help is not None,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        add_completion=False,
        help=help,
    )


class LazyCommand(TyperCommand):
    """A command whose app is loaded when it is used, so that ``mpic --help`` imports nothing.

    Args:
        name: as people type it.
        load: returns the app.
        help: its line in the list of commands.
    """

    def __init__(self, name: str, load: Callable[[], typer.Typer], help: str) -> None:
        super().__init__(name, help=help, short_help=help, rich_markup_mode="markdown")
        self.load = load

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        command = typer.main.get_command(self.load())
        command.name = self.name
        _refuse_empty_paths(command, args)
        return command.make_context(info_name, args, parent=parent, **extra)


def _refuse_empty_paths(command: Any, args: Sequence[str]) -> None:
    """Refuse an empty path among a command's arguments: an unset shell variable expands to one, and it would mean the
    working folder. Raise typer.BadParameter."""
    words = list(args)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    hints = get_type_hints(command.callback) if command.callback else {}
    paths = [p for p in command.params if Path in _parts(hints.get(p.name))]
    names = {name for parameter in paths for name in parameter.opts}
    for before, word in zip(["", *words], words):
        name, equals, value = word.partition("=")
        given = name if equals and not value else before if word == "" else None
        if given is not None and given in names and given.startswith("-"):
            raise typer.BadParameter("it is empty: give a path, or leave the option out", param_hint=given)
        if (
            given == before
            and not before.startswith("-")
            and any(p.param_type_name == "argument" for p in paths)
        ):
            raise typer.BadParameter("an empty path names no file")


def _parts(hint: Any) -> set[Any]:
    """Return the types inside a type hint: the members of a union or a list."""
    return {hint}.union(*map(_parts, get_args(hint)))


def client_command(
    app: typer.Typer, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command that talks to a server. It receives a ``client`` that is made from the options for address
    and key."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        def run(*, url: str, api_key: str | None, **arguments: Any) -> None:
            from mpic.client import MPIC

            with MPIC(url, api_key or "") as client:
                command(client, **arguments)

        hints = get_type_hints(command, localns={"MPIC": Any}, include_extras=True)
        parameters = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "client"
        ]
        take_parameters(
            run, command, [*parameters, option("url", Url, DEFAULT_URL), option("api_key", ApiKey)]
        )
        app.command(name)(run)
        return command

    return register


def option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Return a parameter that Typer treats as an option."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def take_parameters(
    run: Callable[..., None], command: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> None:
    """Give ``run`` the name and the help of ``command``, and the parameters for Typer."""
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(keyword)  # ty: ignore[missing-attribute] (every function takes it)
    run.__annotations__ = {p.name: p.annotation for p in keyword}
    run.__name__, run.__doc__ = command.__name__, command.__doc__  # ty: ignore[missing-attribute] (as above)


def print_json(value: Any) -> None:
    """Print JSON without colours and wrapping. Objects of the SDK become what the server sent. Control characters,
    and those that standard output cannot encode, are escaped."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    text = COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, AttributeError):  # AttributeError: there is no standard output
        text = json.dumps(plain(value), indent=2)
    print(text)


def print_result(value: Any, line: str, as_json: bool) -> None:
    """Print a result as JSON, or the line that describes it."""
    if as_json:
        print_json(value)
    else:
        out.print(line, soft_wrap=True)


def read_json(text: str, option: str) -> Any:
    """Return the value of an option in JSON. Raise typer.BadParameter if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(f"not JSON: {exc}", param_hint=option) from exc


def ttl_of(ttl: int | None, expires: int | None) -> int | None:
    """Return the lifetime from its option or the older name of that option. Raise typer.BadParameter if both are
    given."""
    if ttl is not None and expires is not None:
        raise typer.BadParameter("--expires is the older name of --ttl: give one of them")
    return expires if ttl is None else ttl


def plain(value: Any) -> Any:
    """Return objects of the SDK as JSON values."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


WRAPPED = ("name", "title", "in prompts", "description", "limits", "file", "what", "why", "then")
"""Columns that may be wrapped in a narrow terminal; ids and numbers stay whole."""


NUMBERS = ("bytes", "tokens", "chunks", "score", "files", "quota")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Print a table with right-aligned numbers, whole in any terminal, or the text ``empty`` if there are no rows."""
    from rich.table import Table

    from mpic.table import print_whole

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        side: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        table.add_column(name, justify=side, no_wrap=name not in WRAPPED, overflow="fold")
    for row in rows:
        table.add_row(*(number(cell) for cell in row))
    if table.rows:
        print_whole(table, out)
    else:
        out.print(empty)


def print_listing(
    value: Any, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str
) -> None:
    """Print a result as JSON, or as a table."""
    if as_json:
        print_json(value)
    else:
        print_table(columns, rows, empty)


def print_outcome(
    value: Any, as_json: bool, columns: Sequence[str], troubles: Sequence[Sequence[Any]], line: str
) -> None:
    """Print the outcome of work on many items as JSON, or as one line below a table of the items that failed, if any.

    Exit with status 1 if any item failed.
    """
    if troubles and not as_json:
        print_table(columns, troubles, "")
    print_result(value, line, as_json)
    if troubles:
        raise typer.Exit(1)


def number(value: Any) -> str:
    """Return a value as the text of a table cell; numbers get thousands separators."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_fields(fields: dict[str, Any]) -> None:
    """Print one line per field and leave out fields without a value."""
    width = max(map(len, fields))
    for name, value in fields.items():
        if value not in (None, (), ""):
            out.print(f"{name:>{width}}  {value}", soft_wrap=True)


@contextmanager
def progress(what: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr: of bytes when the total is known, of items otherwise."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    last = (DownloadColumn(), Remaining()) if total is not None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *last)
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def when(seconds: int | None) -> str | None:
    """Return a Unix time as local time: ``2026-11-20 14:00:00``."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def is_expected(exc: BaseException) -> bool:
    """Return whether an error is shown as one line, without a traceback."""
    return isinstance(exc, MPICError) or (isinstance(exc, OSError) and exc.errno is not None)


def error_line(exc: Any) -> str:
    """Return the line that shows an error."""
    if isinstance(exc, OSError):
        of = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, str | bytes) else ""
        return f"error: {of}{exc.strerror or 'it cannot be read or written'} [os_error]"
    hint = ""
    if exc.code == "unauthorized":
        hint = (
            " Give a key by --api-key or the environment variable MPIC_API_KEY; `mpic keys create` makes one."
        )
    return f"error: {' '.join(str(exc.message).splitlines())} [{exc.code}]{hint}"
