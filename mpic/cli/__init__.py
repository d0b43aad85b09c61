"""The command line: ``mpic serve``, ``chat``, ``upload``, ``files``, and the rest of ``COMMANDS``.

There is one file per command, imported only when the command is used, so that ``mpic --help`` answers at once. To add
one: a module with a Typer app called ``app`` (``mpic.cli.common.command_app``), and a line in ``COMMANDS``.

Exit status: 0 done; 1 refused or failed (one line on stderr gives the reason and the stable code); 2 the command line
is wrong; 70 a server had to end by force (docs/operators.md); 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mpic.cli.common import HELP_OPTIONS, err, error_line, is_expected, out
from mpic.table import printable
from mpic.version import VERSION

COMMANDS = {
    "serve": ("mpic.cli.serve", "Start the server."),
    "upload": ("mpic.cli.upload", "Upload images, clips and documents; each is compiled once."),
    "chat": ("mpic.cli.chat", "Talk to the model, about uploads too."),
    "files": ("mpic.cli.files", "Your uploads: list, show, content, rename, extend, delete."),
    "ls": ("mpic.cli.ls", "Your uploads, newest first; short for `mpic files list`."),
    "caches": ("mpic.cli.caches", "Cached texts, linked by id in any order."),
    "models": ("mpic.cli.models", "The served model, and the policies on offer."),
    "references": ("mpic.cli.references", "The reference library: add, search, import, reindex, evaluate."),
    "library": ("mpic.cli.library", "The folder behind a server: usage, check, backup, recover, gc."),
    "keys": ("mpic.cli.keys", "API keys: create, list, revoke."),
    "demo": ("mpic.cli.demo", "Ask about sample images under several policies, compare the answers."),
    "bench": ("mpic.evals.bench.cli", "Measure: first token, memory, decoding, loads, serving."),
    "eval": ("mpic.evals.cli", "Compare policies on your model and data."),
    "analyze": ("mpic.evals.analyze.cli", "Look at attention and KV of one prompt."),
    "train": ("mpic.train.cli", "Train the demo models, and adapters of any model."),
}
"""Name of a command -> its module, and its line in ``mpic --help``."""

UsageError: Any = typer.BadParameter.__base__
"""What every mistake on the command line raises."""


class LazyCommand(TyperCommand):
    """A command in ``mpic --help`` whose module is not imported yet."""

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help, short_help=help, rich_markup_mode="markdown")
        self.module = module

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        command = typer.main.get_command(importlib.import_module(self.module).app)
        command.name = self.name
        _refuse_empty_paths(command, args)
        return command.make_context(info_name, args, parent=parent, **extra)


def _refuse_empty_paths(command: Any, args: Sequence[str]) -> None:
    """Refuses an empty path among the words behind a command: an unset variable of a shell gives one, and it would be
    the working folder. Raises typer.BadParameter."""
    words = list(args)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    hints = get_type_hints(command.callback) if command.callback else {}
    paths = [p for p in command.params if Path in _parts(hints.get(p.name))]
    names = {name for parameter in paths for name in parameter.opts}
    for before, word in zip(["", *words], words):
        name, equals, value = word.partition("=")
        given = name if equals and not value else before if word == "" else None
        if given in names and given.startswith("-"):
            raise typer.BadParameter("it is empty: give a path, or leave the option out", param_hint=given)
        if (
            given == before
            and not before.startswith("-")
            and any(p.param_type_name == "argument" for p in paths)
        ):
            raise typer.BadParameter("an empty path names no file")


def _parts(hint: Any) -> set[Any]:
    """Returns the types that a hint is made of: those in a union or a list."""
    return {hint}.union(*map(_parts, get_args(hint)))


class Root(TyperGroup):
    """The commands of ``COMMANDS``. Whatever was typed that is wrong is named without commands to the terminal."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _printable_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _printable_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return LazyCommand(cmd_name, *COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


@contextmanager
def _printable_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        error.message = printable(error.message)
        raise


app = typer.Typer(
    cls=Root,
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Serve multimodal LLMs with position-independent KV caching.\n\n"
    "Start with `mpic serve`, then in another terminal `mpic upload photo.jpg --handle PHOTO` and "
    "`mpic chat -m 'What is in IMAGE#PHOTO?'`.",
)


def main() -> None:
    """Runs the command line. Errors of ours, and those of files and disks, become one line on stderr and a non-zero
    exit status. What a console cannot show is replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # otherwise Python would do it later, and could only complain
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as exc:
        if not is_expected(exc):
            raise
        err.print(error_line(exc), style="red", soft_wrap=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"mpic {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass
