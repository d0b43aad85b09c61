"""``mpic library``: commands for operators on the folder of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from mpic.cli import library_backup
from mpic.cli.common import Json, command_app, out, print_json, print_result, print_table, progress
from mpic.cli.folder import (
    ConfigFile,
    DataDir,
    inspect_library,
    library_settings,
    open_library,
    open_or_inspect,
)
from mpic.config import ConfigError
from mpic.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    from mpic.library import Library
    from mpic.library.store import Objects
    from mpic.library.upkeep import Problem

app = command_app(
    "The folder with uploads, references and compiled chunks: look at it, verify it, copy it, move it.\n\n"
    "`ls`, `backup` and `check` work while a server runs; stop the server for the others. To "
    "manage your own uploads on a server use `mpic files`.\n\n"
    "`backup` copies everything as it is (ids, quotas, keys, caches), to be restored into an empty folder."
)
app.command("backup")(library_backup.backup)
app.command("restore")(library_backup.restore)
app.command("recover")(library_backup.recover)

GONE = {
    "gc": "a start and `mpic library check` remove what a crash has left, a server what has expired; `quarantine/` of "
    "earlier versions is yours to delete",
    "export": "`mpic library backup FOLDER` copies all of it, and `mpic files content NAME` one upload",
    "import": "`mpic references import SOURCE` imports references through the server, `mpic library restore` makes a "
    "library of a backup, and `mpic upload` takes over files",
    "give": "`mpic keys create USER` makes a key of the user who has the files (`local`: those of times without keys); "
    "with it `mpic files content NAME` copies one, which `mpic upload` stores for the owner of another key",
    "pin": "`mpic files pin NAME` and `mpic references pin ID` do it while the server runs",
    "show": "`mpic files show NAME` and `mpic references show ID` do it while the server runs",
    "press": "`mpic serve --press PRESS` compresses chunks that are stored when they are next used",
}
"""Commands of earlier versions, and what does the same."""


def _gone(name: str) -> Callable[..., None]:
    def refuse(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        raise BadRequest(f"`mpic library {name}` is gone: {GONE[name]}")

    refuse.__doc__ = f"Refuse: {GONE[name]}."
    return refuse


for gone in GONE:
    app.command(gone, hidden=True, context_settings={"ignore_unknown_options": True})(_gone(gone))


@app.command("ls")
def library_ls(
    user: Annotated[
        str | None, typer.Option(help="only this user; `@shared` is the reference library")
    ] = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """List files and bytes by user and tier, and the user's quota; `mpic keys list` shows those of keys.

    Tier `original` holds uploads, tier `disk` compiled chunks. It works while a server runs.
    """
    with inspect_library(data_dir, config) as library:
        rows = [row for row in library.usage() if user in (None, row.owner)]
        disk = library.limits.disk_bytes
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    print_table(
        ("user", "tier", "files", "bytes", "quota"),
        [
            (row.owner, row.tier, row.count, decimal(row.bytes), _quota(row.files_quota, row.bytes_quota))
            for row in rows
        ],
        "nothing is stored yet",
    )
    compiled = sum(row.bytes for row in rows if row.tier == "disk")
    out.print(f"compiled chunks: {decimal(compiled)} of {decimal(disk)}")


@app.command("check")
def library_check(
    quick: Annotated[
        bool, typer.Option("--quick", help="catalogue and sizes only, do not read contents")
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="also the chunks in the store of [library] remote (--config)")
    ] = False,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Verify the catalogue and every byte of every original, sidecar and compiled chunk.

    The effects of a crash are repaired first. A damaged chunk is removed and compiled again on next use; a damaged
    original stays for you to replace. Files that the catalogue does not list are counted, and stay where they are:
    `mpic library recover --force` lists them. Exit status 1 if anything was damaged or lost; what a server leaves that
    was killed is noted, and is neither.

    Beside a running server it changes and repairs nothing, except with `--remote` in the store: a damaged chunk is
    moved aside there, and one that a deletion has left behind is deleted, whichever server has put it there.
    """
    from mpic.library.library import WARNINGS
    from mpic.library.upkeep import check, size_of

    objects = library_settings(data_dir, config).objects() if remote else None
    if remote and objects is None:
        raise ConfigError("there is no remote store: set [library] remote, and give --config", param="remote")
    with open_or_inspect(data_dir, config, as_json) as library:
        with progress("reading", size_of(library), as_json) as advance:
            problems = check(library, contents=not quick, progress=advance)
            if objects is not None:
                problems += _check_remote(library, objects, not quick)
        recovered = library.recovered
    if as_json:
        print_json({"problems": [p._asdict() for p in problems], "recovered": recovered})
    else:
        for what, count in recovered.items():
            if count and what == "unknown":
                out.print(f"{count} files do not belong to the library and were left alone")
            elif count and what == "unlisted_files":
                out.print(f"{count} {WARNINGS[what]}", soft_wrap=True)
            elif count:
                out.print(f"repaired after a crash: {count} {what.replace('_', ' ')}")
        for problem in problems:
            if not problem.damaged:
                out.print(f"left by a crash: {problem.path} {problem.what}; {problem.then}", soft_wrap=True)
        rows = [(p.name, p.path, p.what, p.then) for p in problems if p.damaged]
        print_table(("name", "file", "what", "then"), rows, "everything is as it was stored")
    if any(problem.damaged for problem in problems):
        raise typer.Exit(1)


@app.command("quota")
def library_quota(
    user: Annotated[str, typer.Argument(help="the user")],
    files: Annotated[int | None, typer.Option(min=0, help="most files; 0: no quota")] = None,
    bytes: Annotated[int | None, typer.Option(min=0, help="most bytes of originals; 0: no quota")] = None,
    disk: Annotated[
        int | None, typer.Option(min=0, help="most bytes of compiled chunks; 0: a fair share")
    ] = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Give a user its own quotas; a quota that is left out is the one of the server's configuration."""
    with open_library(data_dir, config) as library:
        library.set_quota(user, files=files, bytes=bytes, disk=disk)
    quotas = {"user": user, "files": files, "bytes": bytes, "disk": disk}
    words = [f"{k} {'as configured' if v is None else v}" for k, v in quotas.items() if k != "user"]
    print_result(quotas, f"{user}: {', '.join(words)}", as_json)


def _check_remote(library: Library, objects: Objects, contents: bool) -> list[Problem]:
    from mpic.library import SHARED
    from mpic.library.folder.layout import owner_folder
    from mpic.library.store.objects import StoreUnavailable
    from mpic.library.store.remote_check import check
    from mpic.library.upkeep import Problem

    users = [row["id"] for row in library.catalog.read("SELECT id FROM users")]
    owners = {owner_folder(user): user for user in (*users, SHARED)}
    try:
        return [
            Problem(f"remote: {fault.name}", fault.what, fault.then, owners.get(fault.owner, ""))
            for fault in check(objects, contents)
        ]
    except StoreUnavailable as error:
        raise Unavailable(str(error)) from None


def _quota(files: int, bytes: int) -> str:
    return ", ".join([*([f"{files:,} files"] if files else []), *([decimal(bytes)] if bytes else [])]) or "-"
