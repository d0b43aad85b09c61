"""The command line: ``mpic serve``, ``chat``, ``upload``, ``files``, and the rest of ``COMMANDS``.

There is one file per command, imported only when the command is used, so that ``mpic --help`` answers at once. To add
one: a module with a Typer app called ``app`` (``mpic.cli.common.command_app``), and a line in ``COMMANDS``.

Exit status: 0 done; 1 refused or failed (one line on stderr gives the reason and the stable code); 2 the command line
is wrong; 70 a server had to end by force (docs/operators.md); 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mpic.cli.common import HELP_OPTIONS, err, error_line, is_expected, out
from mpic.version import VERSION

COMMANDS = {
    "serve": ("mpic.cli.serve", "Start the server."),
    "upload": ("mpic.cli.upload", "Upload images, clips and documents; each is compiled once."),
    "chat": ("mpic.cli.chat", "Talk to the model, about uploads too."),
    "ui": ("mpic.cli.ui", "Serve the web interface of a server that runs elsewhere."),
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


class LazyCommand(TyperCommand):
    """A command in ``mpic --help`` whose module is not imported yet."""

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help, short_help=help, rich_markup_mode="markdown")
        self.module = module

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        command = typer.main.get_command(importlib.import_module(self.module).app)
        command.name = self.name
        return command.make_context(info_name, args, parent=parent, **extra)


class Root(TyperGroup):
    """The commands of ``COMMANDS``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return LazyCommand(cmd_name, *COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


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
    """Runs the command line. Errors of ours become one line on stderr and a non-zero exit status."""
    try:
        app()
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
