"""``mpic library backup``, ``restore`` and ``recover``: copies of the folder, and a new catalogue for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpic.cli.common import Json, err, print_outcome, progress
from mpic.cli.folder import ConfigFile, DataDir, library_location
from mpic.errors import BadRequest

if TYPE_CHECKING:
    from mpic.library.copies.backup import Copied


def backup(
    target: Annotated[Path, typer.Argument(help="the folder to make; a new or an empty one")],
    chunks: Annotated[
        bool, typer.Option("--chunks", help="compiled chunks too; without them they are compiled again")
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="copy and verify every byte, make no hard links")
    ] = False,
    user: Annotated[str | None, typer.Option(hidden=True)] = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Copy the whole library into a new folder, also while a server runs.

    The copy holds the catalogue at one moment, every original that it lists, the API keys and, unless its file cannot
    be read, the record of what reuse has saved. On the same disk originals are hard links, which take no space; on
    another disk they are copied and verified. `mpic library restore` makes a library of it. Exit status 1 if an
    original was damaged or lost before.

    Example: `mpic library backup /backups/monday`
    """
    from mpic.library.copies.backup import backup, size_of

    if user is not None:
        raise BadRequest(
            "--user is gone: a backup is of all users. With a key of the user (`mpic keys create USER`), `mpic files "
            "content NAME` copies an upload",
            param="user",
        )
    root, _ = library_location(data_dir, config)
    total = size_of(root) if (root / "catalog.sqlite").is_file() else None
    with progress("copying", total, as_json) as advance:
        done = backup(root, target, chunks, not copy, advance)
    _show_copied(done, f"the backup is in {target}", as_json)


def restore(
    source: Annotated[Path, typer.Argument(help="a folder that `mpic library backup` made", exists=True)],
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Make a library from a backup, in a new or an empty folder. Every original is verified.

    Ids, handles, quotas, caches and keys are as they were. A folder that holds a library already is refused: move it
    away, or name another one with --data-dir. Exit status 1 if an original in the backup is damaged or lost.

    Example: `mpic library restore /backups/monday --data-dir /srv/mpic`
    """
    from mpic.library.copies.backup import Manifest, size_of
    from mpic.library.copies.restore import restore

    root, _ = library_location(data_dir, config)
    Manifest.read(source)
    with progress("copying", size_of(source), as_json) as advance:
        done = restore(source, root, advance)
    _show_copied(done, f"the library is in {root}", as_json)


def recover(
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    force: Annotated[
        bool, typer.Option("--force", help="make a new catalogue although the old one is intact")
    ] = False,
    without_sidecars: Annotated[bool, typer.Option("--without-sidecars", hidden=True)] = False,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Make a new catalogue from the files when the old one is lost or damaged.

    A server refuses to start when its catalogue is missing, empty or damaged while there are files. This command reads
    and verifies every original, makes a new catalogue from the sidecars beside them (`ID.json`) and from the headers of
    compiled chunks, and puts the old one aside as `catalog.sqlite.damaged-DATE`. With `--force` it also adds files that
    an intact catalogue lacks, for example after a crash or with an older copy of the catalogue; a server's start only
    counts them. To put such a copy back, move `catalog.sqlite`, `catalog.sqlite-wal` and `catalog.sqlite-shm` away
    first, or SQLite writes the old log into the copy. Exit status 1 if something could not be added as it was; the
    table shows it.
    """
    from mpic.library.rebuild import recover, size_of

    if without_sidecars:
        raise BadRequest(
            "--without-sidecars is gone, because every released version writes sidecars: recover without it, and "
            "upload the originals that the table shows again",
            param="without_sidecars",
        )
    if dry_run:
        raise BadRequest(
            "--dry-run is gone: the old catalogue is put aside, and can be moved back", param="dry_run"
        )
    root, _ = library_location(data_dir, config)
    with progress("reading", size_of(root), as_json) as advance:
        done = recover(root, force, progress=advance)
    aside = None if done.aside is None else str(done.aside)
    troubles = [trouble._asdict() for trouble in done.troubles]
    value = {"counts": dict(done.counts), "troubles": troubles, "aside": aside}
    line = f"{_counted(done.counts)} are in the catalogue"
    line += f"\nthe old catalogue is {aside}" if aside else ""
    print_outcome(value, as_json, ("file", "what"), done.troubles, line)


def _show_copied(done: Copied, message: str, as_json: bool) -> None:
    value = {"counts": dict(done.counts), "lost": done.lost, "damaged": done.damaged, "notes": done.notes}
    for note in () if as_json else done.notes:
        err.print(note, style="yellow", soft_wrap=True)
    rows = [(path, "was lost before") for path in done.lost]
    rows += [(path, "is not what was uploaded") for path in done.damaged]
    print_outcome(value, as_json, ("file", "what"), rows, f"{message}: {_counted(done.counts)}")


def _counted(counts: Mapping[str, int]) -> str:
    names = {"refs": "references"}
    parts = [f"{count:,} {names.get(what, what)}" for what, count in sorted(counts.items()) if count]
    return ", ".join(parts) or "nothing"
