"""``mpic serve``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mpic.cli.common import noun
from mpic.config import SECTIONS, load_config

app = noun()


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag for every configuration key; its ``flags`` argument receives what was set."""
    fixed = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    generated = []
    for section, cls in SECTIONS.items():
        helps = dict(re.findall(r"^ {8}(\w+): (.+)$", cls.__doc__ or "", re.MULTILINE))
        for name, kind in get_type_hints(cls).items():
            option = typer.Option(
                help=helps[name], rich_help_panel=f"{section} (section of the configuration file)"
            )
            annotation = Annotated[kind | None, option]
            generated.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    names = {p.name for p in generated}

    def run(**values: Any) -> None:
        flags = {k: v for k, v in values.items() if k in names}
        command(**{k: v for k, v in values.items() if k not in names}, flags=flags)

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixed]
    run.__signature__ = inspect.Signature([*keyword, *generated])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*keyword, *generated]}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


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

    Examples: `mpic serve` (the bundled demo model), `mpic serve --model Qwen/Qwen2.5-VL-3B-Instruct --dtype bfloat16`,
    `mpic serve --config mpic.toml --port 9000`.
    """
    settings = load_config(config, flags)
    from mpic.server.run import serve as run

    run(settings, as_json)
