"""The command line: ``mpic serve``, ``chat``, ``upload``, ``files``, and the rest of ``COMMANDS``.

There is one file per command, imported only when the command is used, so that ``mpic --help`` answers at once. To add
one: a module with a Typer app called ``app`` (``mpic.cli.common.command_app``), and a line in ``COMMANDS``. The
laboratory's commands are entry points (``mpic.cli.laboratory``).

Exit status: 0 done; 1 refused or failed (one line on stderr gives the reason and the stable code); 2 the command line
is wrong; 70 a server had to be stopped by force (docs/operators.md); 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mpic.cli.common import HELP_OPTIONS, LazyCommand, err, error_line, is_expected, out
from mpic.cli.laboratory import load
from mpic.table import printable
from mpic.version import VERSION

COMMANDS = {
    "serve": ("mpic.cli.serve", "Start the server."),
    "upload": ("mpic.cli.upload", "Upload images, clips and documents; each is compiled once."),
    "chat": ("mpic.cli.chat", "Ask the model, about uploads too."),
    "ui": ("mpic.cli.ui", "Serve the web interface of a server that runs elsewhere."),
    "files": ("mpic.cli.files", "Your uploads: list, show, content, rename, extend, delete."),
    "ls": ("mpic.cli.ls", "Your uploads, newest first; short for `mpic files list`."),
    "caches": ("mpic.cli.caches", "Cached texts, linked by id in any order."),
    "models": ("mpic.cli.models", "The served model, and the policies on offer."),
    "estimate": ("mpic.cli.estimate", "What reuse would save of the requests in a log."),
    "references": ("mpic.cli.references", "The reference library: add, search, import, reindex, evaluate."),
    "library": ("mpic.cli.library", "The folder behind a server: usage, check, backup, recover."),
    "keys": ("mpic.cli.keys", "API keys: create, list, revoke."),
}
"""Name of a command -> its module, and its line in ``mpic --help``."""

LABORATORY = {
    "demo": "Ask about sample images under several policies, compare the answers.",
    "bench": "Measure: first token, memory, decoding, loads, serving.",
    "eval": "Compare policies on your model and data.",
    "calibrate": "Measure what reuse costs the answers of your model, for the policy auto.",
    "analyze": "Look at attention and KV of one prompt.",
    "train": "Train the demo models, and adapters of any model.",
}
"""Name of a command of the laboratory -> its line in ``mpic --help``."""

UsageError: Any = typer.BadParameter.__base__
"""The base class of every error about the arguments of a command."""


class Root(TyperGroup):
    """The commands of ``COMMANDS`` and ``LABORATORY``. Errors repeat the user's words without control characters."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _printable_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _printable_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *LABORATORY]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            module, line = COMMANDS[cmd_name]
            return LazyCommand(cmd_name, lambda: importlib.import_module(module).app, line)
        if cmd_name in LABORATORY:
            return LazyCommand(cmd_name, lambda: load(cmd_name), LABORATORY[cmd_name])
        return None


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
    """Run the command line. Errors of ours, and those of files and disks, become one line on stderr and a non-zero
    exit status. Characters that a console cannot show are replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # otherwise Python flushes at exit, where a failure can only be printed
    except BrokenPipeError:  # the reader has closed the pipe
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
