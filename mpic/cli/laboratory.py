"""The commands that measure, evaluate and train, which belong to the laboratory (``mpic_lab``, the folder ``lab/``).

The laboratory registers them as entry points of the group ``mpic.commands``. A server's installation lacks its packages
(``pip install 'mpic[lab]'``); each command then says so.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from mpic.cli.common import LazyCommand
from mpic.errors import LaboratoryMissing

GROUP = "mpic.commands"
PACKAGES = ("matplotlib", "openai", "rouge_score", "tqdm")
"""Modules that the extra ``lab`` installs. Some are imported only when a result is written, hours after the start of a
command, so all are looked for before it starts."""


def load(name: str) -> typer.Typer:
    """Return the app of a command of the laboratory.

    Args:
        name: ``bench``, or with a space for a subcommand of another command: ``models check``.

    Raises:
        LaboratoryMissing: the laboratory, or a package that it needs, is not installed.
    """
    found = entry_points(group=GROUP, name=name)
    if not found or find_spec("mpic_lab") is None:
        raise LaboratoryMissing(f"`mpic {name}` belongs to the laboratory, which is not installed: {HOW}")
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise LaboratoryMissing(
            f"`mpic {name}` belongs to the laboratory, whose packages are not installed "
            f"({', '.join(missing)} is missing): {HOW}"
        )
    (entry,) = found
    return entry.load()


def group_with(group: str, commands: dict[str, str]) -> type[TyperGroup]:
    """Return the class of a group of commands, some of which belong to the laboratory.

    Args:
        group: the name of the group, such as ``models``.
        commands: their names, each with its line of help.
    """

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*super().list_commands(ctx), *commands]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in commands:
                return LazyCommand(cmd_name, lambda: load(f"{group} {cmd_name}"), commands[cmd_name])
            return super().get_command(ctx, cmd_name)

    return Group


HOW = "run `pip install 'mpic[lab]'`, or `make setup-dev` in a clone of the repository"
