"""``mpic library``: commands for operators on the folder of a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from mpic.cli import library_backup
from mpic.cli.common import Json, command_app, err, out, print_json, print_result, print_table, progress
from mpic.cli.folder import (
    ConfigFile,
    DataDir,
    inspect_library,
    library_settings,
    open_library,
    open_or_inspect,
)
from mpic.config import ConfigError
from mpic.errors import BadRequest, NotFound, Unavailable, UnknownHandle
from mpic.keys import Key, KeyStore, any_keys

if TYPE_CHECKING:
    from mpic.config import LibraryConfig
    from mpic.library import File, Library, Reference, StorageUsage
    from mpic.library.store import Objects
    from mpic.library.upkeep import Problem

app = command_app(
    "The folder with uploads, references and compiled chunks: look at it, verify it, copy it, move it.\n\n"
    "`ls`, `show`, `backup` and `check` work while a server runs; stop the server for the others. To "
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
    """List files and bytes by user and tier, and every quota that bounds them: the user's and those of its keys.

    Tier `original` holds uploads, tier `disk` compiled chunks, tier `remote` those in the store of `[library] remote`,
    which is asked (`--config`). It works while a server runs.
    """
    with inspect_library(data_dir, config) as library:
        found = [*library.usage(), *_remote_usage(library, library_settings(data_dir, config))]
        rows = [row for row in found if user in (None, row.owner)]
        disk, keys = library.limits.disk_bytes, _key_quotas(library.root)
    if as_json:
        print_json([row._asdict() | {"keys": _keys_of(row, keys)} for row in rows])
        return
    print_table(
        ("user", "tier", "files", "bytes", "quota"),
        [(row.owner, row.tier, row.count, decimal(row.bytes), _quotas(row, keys)) for row in rows],
        "nothing is stored yet",
    )
    compiled = sum(row.bytes for row in rows if row.tier == "disk")
    out.print(f"compiled chunks: {decimal(compiled)} of {decimal(disk)}")


@app.command("show")
def library_show(
    name: Annotated[str, typer.Argument(help="a file's id or handle, or a reference's id")],
    user: Annotated[str, typer.Option(help="the owner of the file; needed for handles")] = "local",
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show one file or reference: what it is, when it expires, and its compiled chunks by model and state.

    A chunk that is not `ready` shows the reason: it was evicted (for its owner's quota, its owner's newer uploads, or
    another user's share), expired, or damaged. It works while a server runs.
    """
    with inspect_library(data_dir, config) as library:
        found = _find(library, name, user)
        owner = getattr(found, "owner", "@shared")
        sql = "SELECT * FROM chunks WHERE owner = ? AND kind = ? AND digest = ? ORDER BY created_at"
        chunks = [dict(row) for row in library.catalog.read(sql, owner, found.key.kind, found.key.digest)]
    facts = {k: v for k, v in asdict(found).items() if k not in ("key", "path")}
    facts |= {"digest": found.key.digest, "path": str(found.path)}
    if as_json:
        print_json({**facts, "chunks": chunks})
        return
    for key, value in facts.items():
        if value not in (None, "", {}):
            out.print(f"{key:>12}  {_shown(key, value)}", soft_wrap=True)
    rows = []
    for chunk in chunks:
        why = f" ({chunk['why']})" if chunk["state"] == "evicted" and chunk["why"] else ""
        kept = (_recipe(chunk["recipe"]), chunk["state"] + why, chunk["tokens"], decimal(chunk["bytes"]))
        rows.append((chunk["model"][:12], *kept, _time(chunk["last_used"])))
    print_table(("model", "dtype", "state", "tokens", "bytes", "last used"), rows, "never compiled")


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


def _owners(library: Library) -> dict[str, str]:
    """Return the users that the catalogue knows, by the hash that stands for them in a remote store."""
    from mpic.library import SHARED
    from mpic.library.folder.layout import owner_folder

    users = [row["id"] for row in library.catalog.read("SELECT id FROM users")]
    return {owner_folder(user): user for user in (*users, SHARED)}


def _remote_usage(library: Library, settings: LibraryConfig) -> list[StorageUsage]:
    """Return the usage of the remote store, if there is one; of a store that does not answer, a note on stderr."""
    from mpic.library import StorageUsage
    from mpic.library.store.objects import StoreUnavailable
    from mpic.library.store.remote_check import usage

    if (objects := settings.objects()) is None:
        return []
    owners = _owners(library)
    try:
        found = usage(objects)
    except StoreUnavailable as error:
        err.print(f"{error}", soft_wrap=True)
        return []
    return [
        StorageUsage(owners.get(owner, f"(another server's: {owner[:12]})"), "remote", *totals, 0, 0)
        for owner, totals in sorted(found.items())
    ]


def _check_remote(library: Library, objects: Objects, contents: bool) -> list[Problem]:
    from mpic.library.store.objects import StoreUnavailable
    from mpic.library.store.remote_check import check
    from mpic.library.upkeep import Problem

    owners = _owners(library)
    try:
        return [
            Problem(f"remote: {fault.name}", fault.what, fault.then, owners.get(fault.owner, ""))
            for fault in check(objects, contents)
        ]
    except StoreUnavailable as error:
        raise Unavailable(str(error)) from None


def _find(library: Library, name: str, user: str) -> File | Reference:
    """Return a file or a reference by its id, or a file by its handle, which may begin like an id. Raise NotFound."""
    if not name.startswith(("ref_", "file-")):
        return library.files.by_handle(user, name)
    try:
        return _by_id(library, name)
    except NotFound as no_id:
        try:
            return library.files.by_handle(user, name)
        except UnknownHandle:
            raise no_id from None


def _by_id(library: Library, id: str) -> File | Reference:
    if id.startswith("ref_"):
        return library.references.get(id)
    row = library.catalog.one("SELECT owner FROM files WHERE id = ?", id)
    if row is None:
        raise NotFound(f"no file {id!r}")
    return library.files.get(row["owner"], id)


def _key_quotas(root: Path) -> list[Key]:
    """Return the valid keys that have a quota."""
    if not any_keys(root):
        return []
    with closing(KeyStore(root)) as store:
        keys = [key for key in store.listing() if key.revoked_at is None]
    return [key for key in keys if key.limits.files or key.limits.bytes]


def _keys_of(row: StorageUsage, keys: list[Key]) -> dict[str, dict[str, int | None]]:
    """Return the quotas of the user's keys by prefix; they bound originals only."""
    mine = [key for key in keys if key.user == row.owner and row.tier == "original"]
    return {f"mpic_{key.prefix}": {"files": key.limits.files, "bytes": key.limits.bytes} for key in mine}


def _quotas(row: StorageUsage, keys: list[Key]) -> str:
    own = _quota(row.files_quota, row.bytes_quota)
    parts = [own] if own else []
    parts += [f"{name}: {_quota(**quota)}" for name, quota in _keys_of(row, keys).items()]
    return "; ".join(parts) or "-"


def _quota(files: int | None, bytes: int | None) -> str:
    return ", ".join([*([f"{files:,} files"] if files else []), *([decimal(bytes)] if bytes else [])])


def _recipe(text: str) -> str:
    import json

    recipe = json.loads(text)
    plain = recipe["dtype"] + ("" if recipe["codec"] == "raw" else f" {recipe['codec']}")
    behind = f" behind {recipe['sink']} BOS" if recipe["sink"] else ""
    pressed = f" under {recipe['press']}" if recipe.get("press") else ""
    return plain + behind + (f" in packet {recipe['packet'][:12]}" if recipe.get("packet") else "") + pressed


def _shown(key: str, value: Any) -> str:
    if key.endswith("_at"):
        return _time(value)
    return decimal(value) if key == "bytes" else str(value)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).isoformat(" ", "seconds")
