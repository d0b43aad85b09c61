"""Reads copies of libraries: ``restore`` turns a backup (``backup.py``) into a library in a new folder, and ``add``
puts its uploads and references into a library that is there already.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpic.durable import FileSystem, storage_error
from mpic.errors import BadRequest, CorruptFile, IntegrityError, MPICError, TooLarge
from mpic.file_status import is_own_file
from mpic.keys import NAME, NEEDED
from mpic.library.copies.backup import KEYS, SAVINGS, Copied, Manifest, Progress, copy_file
from mpic.library.copies.bulk_import import ImportItem, ImportResult, LibraryTarget, import_one, run_import
from mpic.library.folder.layout import CATALOG, SIDECAR, scan
from mpic.library.folder.lock import FolderLock, inspect_catalog
from mpic.library.folder.sidecars import read_sidecars
from mpic.library.intake.decode import NO_CLIPS
from mpic.library.library import Library


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


class Entry(NamedTuple):
    """An upload or a reference in a copy.

    Args:
        record: what its sidecar says; that of an upload has an ``owner``.
        bytes: of its original.
        read: returns the original, which need not be what was uploaded. Raises OSError.
    """

    record: dict[str, Any]
    bytes: int
    read: Callable[[], bytes]


def add(
    library: Library,
    source: Path,
    user: str | None = None,
    progress: Callable[[ImportResult], None] = lambda result: None,
) -> list[ImportResult]:
    """Put the uploads and references of a copy into a library; files get new ids, and explicit caches are left out. It
    can be run again: a file is left out if its owner has one of the same content and handle, a reference if it is
    unchanged. A reference that differs is replaced.

    Args:
        source: a backup.
        user: who gets the uploads; None: whoever had them.

    Raises:
        BadRequest: it is none, or an incomplete one.
        LinkedFolder: there is a symbolic link in the place of a folder or an original of a backup.
        StorageFull: nothing more can be stored; run it again when there is space.
    """
    results = []
    for entry in _of_backup(source):
        results.append(entry if isinstance(entry, ImportResult) else _add(library, entry, user))
        progress(results[-1])
    return results


def _of_backup(source: Path) -> Iterator[Entry | ImportResult]:
    Manifest.read(source)
    found, why = scan(source), {}
    sidecars = read_sidecars(source, found.sidecars, lambda path, error: why.update({path: str(error)}))
    originals = {path for path in found.originals if "/cache-" not in path}
    for name, sidecar in sidecars:
        path = source / name.removesuffix(SIDECAR)
        if name.removesuffix(SIDECAR) in originals:
            yield Entry(sidecar.record, path.stat().st_size, path.read_bytes)
        else:
            yield ImportResult(
                name, "refused", sidecar.record["id"], "its original is lost", CorruptFile.code
            )
    for name in sorted(originals - {name.removesuffix(SIDECAR) for name, _ in sidecars}):
        reason = why.get(name + SIDECAR, "no sidecar describes it")
        yield ImportResult(name, "refused", name.rpartition("/")[2], reason, CorruptFile.code)


def _add(library: Library, entry: Entry, user: str | None) -> ImportResult:
    record, most = entry.record, library.limits.upload_bytes
    if user is not None and "owner" in record:
        record = record | {"owner": user}
    where = "/".join(record[name] for name in ("owner", "id") if name in record)
    refused = partial(ImportResult, where, "refused", record["id"])
    if not NAME.fullmatch(record.get("owner", "local")):
        return refused(f"no user is called {record['owner'][:100]!r}", BadRequest.code)
    if entry.bytes > most:
        return refused(f"it is larger than {most} bytes", TooLarge.code)
    try:
        data = entry.read()
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            return refused("its content is damaged", CorruptFile.code)
        return (_add_file if "owner" in record else _add_reference)(library, record, data, where)
    except OSError as error:
        return refused(f"it cannot be read ({error.strerror})", CorruptFile.code)
    except MPICError as error:
        if error.status >= 500:
            raise
        return refused(error.message, error.code)


def _add_file(library: Library, record: dict[str, Any], data: bytes, where: str) -> ImportResult:
    now = library.clock()
    life = None if record["expires_at"] is None else int(record["expires_at"] - now)
    if life is not None and life <= 0:
        return ImportResult(where, "refused", record["id"], "it has expired", "expired")
    same = library.catalog.one(
        "SELECT id FROM files WHERE owner = ? AND sha256 = ? AND handle IS ? "
        "AND (expires_at IS NULL OR expires_at > ?) AND id NOT IN (SELECT id FROM cache_chunks)",
        *(record[name] for name in ("owner", "sha256", "handle")),
        now,
    )
    if same is not None:
        return ImportResult(where, "unchanged", same["id"])
    # no engine is here to tell whether it takes clips: what was one stays one
    library.files.no_clips = None if record["kind"] == "video" else NO_CLIPS
    words = {name: record[name] for name in ("filename", "handle", "metadata", "split")}
    press = record["press"] or None
    file = library.files.add(record["owner"], data, expires_after=life, press=press, **words)
    if record["pinned"]:
        library.files.pin(record["owner"], file.id)
    return ImportResult(where, "added", file.id)


def _add_reference(library: Library, record: dict[str, Any], data: bytes, where: str) -> ImportResult:
    words = {name: record[name] for name in ("id", "title", "filename", "description", "metadata")}
    result = run_import(import_one(ImportItem(where, **words), data, LibraryTarget(library.references)))
    if record["pinned"] and result.outcome in ("added", "replaced"):
        library.references.pin(record["id"])
    return result
