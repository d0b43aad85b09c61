"""The reference pages, as Markdown, made from the code: REST, SDK, command line, configuration, errors.

They are made whenever the site is built and are not kept in the repository, so they cannot be out of date.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import typer
from rest import rest
from sdk import sdk
from tables import code, docstring, table

from mpic.cli import COMMANDS
from mpic.config import SECTIONS
from mpic.errors import MPICError

SERVE = "mpic serve"
TYPES = {int: "integer", str: "string", bool: "boolean", float: "number"}


def pages() -> dict[str, str]:
    """Return the Markdown of every page that is made from the code, by its path."""
    made = {"rest": rest, "sdk": sdk, "cli": cli, "configuration": configuration, "errors": errors}
    return {f"docs/reference/{name}.md": "\n".join(make()) + "\n" for name, make in made.items()}


def cli() -> Iterator[str]:
    yield "# Command line reference\n"
    yield "Every command and option of `mpic`, from the commands themselves; `mpic COMMAND --help` says the same."
    for name, (module, line) in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        yield from _command(command, f"mpic {name}", line)


def _command(command: Any, path: str, line: str = "", level: int = 2) -> Iterator[str]:
    keys = (
        {f.name for section in SECTIONS.values() for f in dataclasses.fields(section)}
        if path == SERVE
        else ()
    )
    parameters = [
        one for one in command.params if one.name not in ("help", *keys) and not getattr(one, "hidden", 0)
    ]
    yield f"\n{'#' * level} {path}\n\n{_plain(command.help or line)}"
    nested = getattr(command, "commands", {})
    if not nested:
        names = [one.name.upper() for one in parameters if one.param_type_name == "argument"]
        options = ["[OPTIONS]"] if len(names) < len(parameters) else []
        yield f"\n```sh\n{' '.join([path, *options, *names])}\n```"
        yield from table("option|default|meaning", map(_option, parameters))
        yield "\nand a flag for [every key of the configuration](configuration.md)." if keys else ""
    for name, one in nested.items():
        yield from _command(one, f"{path} {name}", level=level + 1)


def _option(one: Any) -> tuple[str, str, str]:
    is_option = one.param_type_name == "option"
    names = [*one.opts, *one.secondary_opts] if is_option else [one.name.upper()]
    default = "" if one.default in (None, False, ()) or callable(one.default) else one.default
    return " ".join(map(code, names)), code(default), _plain(getattr(one, "help", None) or "")


def _plain(help: str) -> str:
    return inspect.cleandoc(help).replace("\x08", "").replace("<", "&lt;")


def configuration() -> Iterator[str]:
    yield "# Configuration reference\n"
    yield "Every key of `mpic serve --config FILE.toml`. Each is a flag of `mpic serve` too (`max_chunks` is"
    yield "`--max-chunks`), and flags win over the file. An unknown key is refused."
    for section, cls in SECTIONS.items():
        docs = "\n".join(one.__doc__ or "" for one in reversed(cls.__mro__))
        helps = dict(re.findall(r"^ {8}(\w+): ((?:.|\n {12})+)$", docs, re.MULTILINE))
        yield f"\n## [{section}]\n\n{(cls.__doc__ or '').strip().splitlines()[0]}"
        kinds = typing.get_type_hints(cls)
        yield from table(
            "key|type|default|meaning",
            [
                (code(f.name), TYPES[kinds[f.name]], _default(f), helps[f.name])
                for f in dataclasses.fields(cls)
            ],
        )


def _default(field: Any) -> str:
    return "" if field.default is dataclasses.MISSING or field.default == "" else code(field.default)


def errors() -> Iterator[str]:
    yield "# Errors\n"
    yield "Every error has a stable `code`, and one HTTP status. The SDK raises the class of the"
    yield "same code, and `except` of a class catches those below it, which are indented."
    yield from table("code|status|class|meaning", _errors(MPICError, 0))


def _errors(cls: type[MPICError], depth: int) -> Iterator[tuple[str, ...]]:
    meaning = docstring(cls).split("\n\n")[0]
    yield "&emsp;" * depth + code(cls.code), str(cls.status), code(cls.__name__), meaning
    for one in cls.__subclasses__():
        if one.__module__ in ("mpic.errors", "mpic.config_values", "mpic.keys"):
            yield from _errors(one, depth + 1)
