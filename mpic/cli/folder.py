"""What commands over a library's folder share: which folder is meant, how it is opened, how progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

from mpic.cli.common import err
from mpic.config import load_config

if TYPE_CHECKING:
    from mpic.library import Library, Limits

DataDir = Annotated[
    Path | None, typer.Option(help="the library's folder; default: where `mpic serve` keeps it")
]
ConfigFile = Annotated[Path | None, typer.Option(help="the server's TOML file, for its folder and limits")]


@contextmanager
def progress(what: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr: of bytes when the total is known, of items otherwise."""
    last = (DownloadColumn(), Remaining()) if total is not None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *last)
    with Progress(*columns, console=err, transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def opened(data_dir: Path | None, config: Path | None, mend: bool = True, create: bool = False) -> Library:
    """The library, for this process alone. Raises Unavailable when a server has it open, or when there is none."""
    from mpic.library import Library

    root, limits = where(data_dir, config)
    return Library.open(root, limits, mend=mend, create=create)


@contextmanager
def looking(data_dir: Path | None, config: Path | None) -> Iterator[Library]:
    from mpic.library import Library

    library = Library.look(*where(data_dir, config))
    try:
        yield library
    finally:
        library.close()


def where(data_dir: Path | None, config: Path | None) -> tuple[Path, Limits]:
    """The folder that is meant, and the limits that hold in it."""
    from mpic.library import Limits

    settings = load_config(config, {"data_dir": None if data_dir is None else str(data_dir)}).library
    names = [name for name in Limits.__dataclass_fields__ if hasattr(settings, name)]
    return Path(settings.data_dir), Limits(**{name: getattr(settings, name) for name in names})
