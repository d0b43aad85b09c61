"""A library as one file: ``export`` and ``restore``.

The tar file holds ``manifest.jsonl`` (one line for each file or reference, with the SHA-256 of its content) and the
originals under their hash. It holds neither compiled chunks, which belong to a model and are compiled again, nor
explicit caches (``/v1/caches``).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpic.durable import publish, storage_error, temporary_name
from mpic.errors import BadRequest, CorruptFile, MPICError
from mpic.library.copies.bulk_import import ImportItem, ImportResult, LibraryTarget, import_one, run_import
from mpic.library.intake.decode import NO_CLIPS
from mpic.library.library import Library

FORMAT = 1
MANIFEST = "manifest.jsonl"

Progress = Callable[[int], None]


def size_of(library: Library, user: str | None = None) -> int:
    """Returns the bytes of all originals that ``export`` reads and reports to ``progress``."""
    return sum(entry["bytes"] for entry, _ in _entries(library, user))


def export(
    library: Library, path: Path, user: str | None = None, progress: Progress = lambda done: None
) -> int:
    """Writes all originals, or those of one user, to a new tar file that only its owner can read; returns the number of
    entries. Every original is verified. The file gets its name when it is complete, and survives a crash when this
    returns.

    Raises:
        BadRequest: the file exists.
        CorruptFile: an original is damaged or lost; ``mpic library check`` lists all of them.
        StorageFull: the disk of the tar file is full; nothing is left behind.
    """
    if path.exists():
        raise BadRequest(f"{path} exists already")
    entries, written = list(_entries(library, user)), set()
    files, temporary = library.filesystem, temporary_name(path)
    try:
        with open(files.create(temporary), "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            lines = [json.dumps({"format": FORMAT})] + [json.dumps(entry) for entry, _ in entries]
            _put(tar, MANIFEST, "\n".join(lines).encode())
            for entry, original in entries:
                try:
                    data = original.read_bytes()
                except FileNotFoundError as error:
                    raise CorruptFile(f"the original of {entry['id']} is lost") from error
                if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                    raise CorruptFile(f"the original of {entry['id']} is damaged")
                if entry["sha256"] not in written:
                    written.add(entry["sha256"])
                    _put(tar, f"originals/{entry['sha256']}", data)
                progress(len(data))
            tar.close()
            stream.flush()
            files.sync(stream.fileno())
        publish(files, temporary, path)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        files.try_remove(temporary)
    return len(entries)


def restore(
    library: Library, path: Path, progress: Callable[[ImportResult], None] = lambda result: None
) -> list[ImportResult]:
    """Puts an export into a library; files get new ids. It can be run again: a file is left out if its owner has one of
    the same content and handle, a reference if it is unchanged. A reference that differs is replaced.

    Raises:
        BadRequest: this is not an export of this program.
        StorageFull: nothing more can be stored; run it again when there is space.
    """
    results = []
    try:
        with tarfile.open(path, mode="r:") as tar:
            lines = _member(tar, MANIFEST).decode().splitlines()
            if not lines or _object(lines[0]).get("format") != FORMAT:
                raise BadRequest(f"{path} is an export of another version")
            for line in lines[1:]:
                entry = _object(line)
                results.append(_restore_one(library, entry, tar))
                progress(results[-1])
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise BadRequest(f"{path} is not an export of this program, or is damaged ({error})") from error
    return results


def _restore_one(library: Library, entry: dict[str, Any], tar: tarfile.TarFile) -> ImportResult:
    where = f"{entry['owner']}/{entry['id']}" if entry["what"] == "file" else entry["id"]
    try:
        data = _member(tar, f"originals/{entry['sha256']}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            return ImportResult(where, "refused", entry["id"], "its content is damaged", "corrupt_file")
        restore_one = _restore_reference if entry["what"] == "reference" else _restore_file
        return restore_one(library, entry, data, where)
    except MPICError as error:
        if error.status >= 500:
            raise
        return ImportResult(where, "refused", entry["id"], error.message, error.code)


def _restore_file(library: Library, entry: dict[str, Any], data: bytes, where: str) -> ImportResult:
    now = library.clock()
    life = None if entry["expires_at"] is None else int(entry["expires_at"] - now)
    if life is not None and life <= 0:
        return ImportResult(where, "refused", entry["id"], "it has expired", "expired")
    same = library.catalog.one(
        "SELECT id FROM files WHERE owner = ? AND sha256 = ? AND handle IS ? "
        "AND (expires_at IS NULL OR expires_at > ?) AND id NOT IN (SELECT id FROM cache_chunks)",
        entry["owner"],
        entry["sha256"],
        entry["handle"],
        now,
    )
    if same is not None:
        return ImportResult(where, "unchanged", same["id"])
    # no engine is here to tell whether it takes clips: what was one stays one
    library.files.no_clips = None if entry.get("kind") == "video" else NO_CLIPS
    file = library.files.add(
        entry["owner"],
        data,
        entry["filename"],
        entry["handle"],
        life,
        entry["metadata"],
        split=entry.get("split"),  # the exports of earlier versions say neither this nor the press
        press=entry.get("press") or None,
    )
    if entry["pinned"]:
        library.files.pin(entry["owner"], file.id)
    return ImportResult(where, "added", file.id)


def _restore_reference(library: Library, entry: dict[str, Any], data: bytes, where: str) -> ImportResult:
    words = {name: entry[name] for name in ("id", "title", "filename", "description", "metadata")}
    result = run_import(import_one(ImportItem(where, **words), data, LibraryTarget(library.references)))
    if entry["pinned"] and result.outcome in ("added", "replaced"):
        library.references.pin(entry["id"])
    return result


def _entries(library: Library, user: str | None) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yields the lines of the manifest and the paths of the originals."""
    names = ("filename", "bytes", "sha256", "created_at", "pinned")
    for row in library.catalog.read("SELECT DISTINCT owner FROM files ORDER BY owner"):
        if user in (None, row["owner"]):
            for file in library.files.page(row["owner"], order="asc", limit=1 << 40).files:
                entry = {"what": "file", "id": file.id, "owner": file.owner, "handle": file.handle}
                entry |= {"expires_at": file.expires_at, "metadata": file.metadata}
                entry |= {"kind": file.kind, "split": file.split, "press": file.press}
                yield entry | {name: getattr(file, name) for name in names}, file.path
    if user is None:
        for reference in library.references.listing(order="asc", limit=1 << 40).references:
            entry = {"what": "reference", "id": reference.id, "version": reference.version}
            entry |= {"title": reference.title, "description": reference.description}
            entry |= {"metadata": reference.metadata}
            yield entry | {name: getattr(reference, name) for name in names}, reference.path


def _object(line: str) -> dict[str, Any]:
    """Parses a line of the manifest. Raises ValueError."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a line of its manifest is not an object")
    return value


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """Reads a member of the tar file. Raises KeyError."""
    stream = tar.extractfile(name)
    if stream is None:
        raise KeyError(name)
    return stream.read()
