"""``mpic library give``."""

from __future__ import annotations

from typing import Annotated

import typer

from mpic.cli.common import Json, print_outcome, progress
from mpic.cli.folder import ConfigFile, DataDir, open_library


def give(
    source: Annotated[str, typer.Argument(help="who has the files; `local`: those of the time without keys")],
    target: Annotated[str, typer.Argument(help="the user of an API key, who gets them")],
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Give every upload and cache of a user to another: `mpic library give local alice` after making alice's key.

    Stop the server for it. Handles, names, pins and lifetimes stay; ids are new, and everything is compiled again when
    the server starts. A file that the other user has already, under the same handle, expires with the later of both.
    Files that cannot be given (because the other user has another file of that handle) stay, and the exit status is 1.
    It may be repeated.
    """
    from mpic.library.copies.give import give as run

    with open_library(data_dir, config) as library, progress("giving", None, as_json) as advance:
        given = run(library, source, target, advance)
    left = [one for one in given if one.why]
    line = f"{len(given) - len(left)} given to {target}, {len(left)} left with {source}"
    print_outcome([one._asdict() for one in given], as_json, ("name", "why"), left, line)
