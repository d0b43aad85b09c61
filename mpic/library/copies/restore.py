"""Turns a backup (``backup.py``) into a library in a new folder."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from mpic.durable import FileSystem, storage_error
from mpic.errors import IntegrityError
from mpic.file_status import is_own_file
from mpic.keys import NEEDED
from mpic.library.copies.backup import KEYS, SAVINGS, Copied, Manifest, Progress, copy_file
from mpic.library.folder.layout import CATALOG
from mpic.library.folder.lock import FolderLock, inspect_catalog


def restore(source: Path, root: Path, progress: Progress = lambda done: None) -> Copied:
    """Copy a backup into a new or empty folder, which is a library once the function returns. Every original is
    verified.

    Args:
        progress: called with the bytes of each original that was copied.

    Raises:
        BadRequest: the source is not a complete backup.
        ForeignFolder: the folder is not empty.
        IntegrityError: the backup's catalogue is damaged.
        StorageFull: the disk is full; the folder stays marked, so that no server starts from it.
    """
    source, root, filesystem = Path(source).absolute(), Path(root).absolute(), FileSystem()
    manifest = Manifest.read(source)
    if not is_own_file(source / CATALOG) or inspect_catalog(source / CATALOG).state != "ours":
        raise IntegrityError(f"the catalogue of the backup in {source} is damaged or missing")
    folder = FolderLock(root, filesystem).acquire_new(manifest.library)
    try:
        done = _restore(source, root, filesystem, manifest, progress)
        folder.mark_restored()
    except OSError as error:
        raise storage_error(error, root / CATALOG) from error
    finally:
        folder.release()
    return done


def _restore(
    source: Path, root: Path, filesystem: FileSystem, manifest: Manifest, progress: Progress
) -> Copied:
    done = Copied(Counter(manifest.counts))
    done.counts["linked"] = done.counts["copied"] = 0
    with closing(sqlite3.connect(f"{(source / CATALOG).as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        known = dict(db.execute("SELECT path, sha256 FROM files UNION ALL SELECT path, sha256 FROM refs"))
    folders = {root}
    for path in _walk(source):
        target = root / path
        filesystem.make_folder(target.parent)
        folders.add(target.parent)
        digest = copy_file(source / path, target)
        done.counts["copied"] += 1
        expected = known.pop(path, None)
        if expected is not None:
            progress(target.stat().st_size)
            if digest != expected:
                done.damaged.append(path)
    done.lost = sorted(known)
    for name in (NEEDED, KEYS, SAVINGS, CATALOG):
        if is_own_file(source / name):
            copy_file(source / name, root / name)
    for folder in sorted(folders):
        filesystem.sync_folder(folder)
    return done


def _walk(source: Path) -> Iterator[str]:
    """Yield the files of a backup below ``files`` and ``kv``, relative to it. A backup has no symbolic links and no
    pipes; what they lead to is not copied."""
    for top in ("files", "kv"):
        for parent, _, names in os.walk(source / top):
            for path in (Path(parent, name) for name in names):
                if is_own_file(path):
                    yield str(path.relative_to(source))
