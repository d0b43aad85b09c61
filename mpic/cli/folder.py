"""Finds and opens a library's folder, for the commands that work on it directly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpic.cli.common import err
from mpic.config import load_config

if TYPE_CHECKING:
    from mpic.config import LibraryConfig
    from mpic.library import Library, Limits

DataDir = Annotated[
    Path | None, typer.Option(help="the library's folder; default: where `mpic serve` keeps it")
]
ConfigFile = Annotated[Path | None, typer.Option(help="the server's TOML file, for its folder and limits")]


def open_library(data_dir: Path | None, config: Path | None, create: bool = False) -> Library:
    """Open the library for this process alone. Raise Unavailable if a server has it open, or there is none."""
    from mpic.library import Library

    settings = library_settings(data_dir, config)
    root, remote = Path(settings.data_dir), settings.remote_tiers()
    return Library.open(root, settings.limits(), remote=remote, create=create)


def inspect_library(data_dir: Path | None, config: Path | None) -> Library:
    """Open the library to read its catalogue, even while a server has it open."""
    from mpic.library import Library

    return Library.open_read_only(*library_location(data_dir, config))


def open_or_inspect(data_dir: Path | None, config: Path | None, quiet: bool) -> Library:
    """Open the library for this process alone. If a server has it open, open it read-only and print a note."""
    from mpic.errors import LibraryInUse

    try:
        library = open_library(data_dir, config)
    except LibraryInUse:
        if not quiet:
            err.print("a server has the library open: nothing is changed", style="dim")
        library = inspect_library(data_dir, config)
    return library


def library_settings(data_dir: Path | None, config: Path | None) -> LibraryConfig:
    """Return the [library] section of the configuration that applies to the folder."""
    return load_config(config, {"data_dir": None if data_dir is None else str(data_dir)}).library


def library_location(data_dir: Path | None, config: Path | None) -> tuple[Path, Limits]:
    """Return the folder and the limits that apply to it."""
    settings = library_settings(data_dir, config)
    return Path(settings.data_dir), settings.limits()
