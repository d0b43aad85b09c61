"""``mpic serve``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mpic import preflight
from mpic.cli import completion
from mpic.cli.common import command_app, option, take_parameters
from mpic.config import SECTIONS, ConfigError, default_data_dir, load_config
from mpic.link import AUTO, policy_names
from mpic.memory import collector_paused

app = command_app()


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag for every configuration key; its ``flags`` argument receives those that were set."""
    fixed = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    keys = []
    for section, cls in SECTIONS.items():
        helps = described("".join(one.__doc__ or "" for one in cls.__mro__ if one is not object))
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        if "policy" in helps:
            helps["policy"] = f"{helps['policy'].rstrip('.')}: {', '.join([AUTO, *policy_names()])}."
        panel = f"{section} (section of the configuration file)"
        for name, kind in get_type_hints(cls).items():
            flag = typer.Option(
                help=f"{helps[name]} {shown(name, defaults[name])}".rstrip(),
                rich_help_panel=panel,
                show_default=False,  # Typer's default is that the flag is not given
                autocompletion=completion.policies if name == "policy" else None,
            )
            keys.append(option(name, Annotated[kind | None, flag]))
    names = {key.name for key in keys}

    def run(**values: Any) -> None:
        flags = {k: v for k, v in values.items() if k in names}
        command(**{k: v for k, v in values.items() if k not in names}, flags=flags)

    take_parameters(run, command, [*fixed, *keys])
    return run


def described(doc: str) -> dict[str, str]:
    """Return the description of each argument in a docstring, joined to one line."""
    found = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)$", doc, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def shown(name: str, default: object) -> str:
    """Return the sentence of the help text that names a default."""
    if default is dataclasses.MISSING:  # a computed default; only that of data_dir is shown
        with suppress(ConfigError):  # there is no home folder, and perhaps none is needed
            return f"Default: {default_data_dir()}." if name == "data_dir" else ""
        return ""
    return f"Default: {default}." if default not in ("", False) else ""


@app.command()
@with_config_flags
def serve(
    flags: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(help="a TOML file with [server], [engine], [library]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="announce the address as JSON, for scripts")
    ] = False,
) -> None:
    """Start the server.

    Every key of the configuration file is a flag too, and flags win. Without API keys the server listens on this
    machine only.

    Examples: `mpic serve` (the bundled demo model), `mpic serve --model Qwen/Qwen2.5-VL-3B-Instruct`,
    `mpic serve --config mpic.toml --port 9000`.
    """
    settings = load_config(config, flags)
    preflight.check(settings)  # checked before torch is imported, which takes seconds
    with collector_paused():
        from mpic.server.run import serve as run

    run(settings, as_json)
