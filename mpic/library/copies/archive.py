"""A library as one file: ``export`` and ``restore``.

The tar file holds ``manifest.jsonl`` (one line for each file or reference, with the SHA-256 of its content) and the
originals under their hash. It holds neither compiled chunks, which belong to a model and are compiled again, nor
explicit caches (``/v1/caches``).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from mpic import bounded_json
from mpic.durable import publish, storage_error, temporary_name
from mpic.errors import BadRequest, CorruptFile, MPICError, TooLarge
from mpic.keys import NAME
from mpic.library.copies.bulk_import import ImportItem, ImportResult, LibraryTarget, import_one, run_import
from mpic.library.intake.decode import NO_CLIPS
from mpic.library.library import Library

FORMAT = 1
MANIFEST = "manifest.jsonl"
ORIGINAL = re.compile(r"originals/[0-9a-f]{64}")
LATEST = 253_402_300_800
"""The year 10000, in seconds since the epoch."""
LONGEST_LINE = 1 << 20
LONGEST_READ = 4 << 20
"""Bytes that are read at a time."""
BOUNDS = bounded_json.Bounds(values=1 << 12, depth=16)
ENTRY_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("what", "id", "filename", "sha256"), (str,)),
    "metadata": (dict,),
    "pinned": (bool, int),
}
FILE_FIELDS = ENTRY_FIELDS | {
    "owner": (str,),
    "expires_at": (int, float, NoneType),
    **dict.fromkeys(("handle", "kind", "press"), (str, NoneType)),
    "split": (dict, NoneType),
}
REFERENCE_FIELDS = ENTRY_FIELDS | dict.fromkeys(("title", "description"), (str,))
"""The fields of an entry that are read, with their types."""

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
        with path.open("rb") as stream, tarfile.open(fileobj=_Bounded(stream), mode="r:") as tar:
            members = _members(tar)
            lines = tar.extractfile(members[MANIFEST])
            assert lines is not None  # it is a file
            if _object(lines.readline(LONGEST_LINE)).get("format") != FORMAT:
                raise BadRequest(f"{path} is an export of another version")
            while line := lines.readline(LONGEST_LINE):
                results.append(_restore_one(library, _entry(line), tar, members))
                progress(results[-1])
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise BadRequest(f"{path} is not an export of this program, or is damaged ({error})") from error
    return results


class _Bounded(io.RawIOBase):
    """A stream of which nobody reads more than an original at a time: what a header of tar declares is read at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell  # type: ignore[method-assign]

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= LONGEST_READ:
            raise tarfile.ReadError(f"{size} bytes at a time")
        return self._stream.read(size)


def _members(tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """Returns the members of an export by their names.

    Raises:
        ValueError: it has what ``export`` never writes, such as a link, a device, a sparse file (whose few bytes stand
            for any number), another path, or a name twice.
    """
    found: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        known = member.name == MANIFEST or ORIGINAL.fullmatch(member.name)
        plain = member.isreg() and not member.issparse() and member.size >= 0
        if not (known and plain) or member.name in found:
            raise ValueError(f"{member.name[:100]!r} is not what an export has, or is there twice")
        found[member.name] = member
    return found


def _restore_one(
    library: Library, entry: dict[str, Any], tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo]
) -> ImportResult:
    where = f"{entry['owner']}/{entry['id']}" if entry["what"] == "file" else entry["id"]
    try:
        member, most = members[f"originals/{entry['sha256']}"], library.limits.upload_bytes
        if member.size > most:
            return ImportResult(
                where, "refused", entry["id"], f"it is larger than {most} bytes", TooLarge.code
            )
        stream = tar.extractfile(member)
        assert stream is not None  # it is a file
        data = b"".join(iter(lambda: stream.read(LONGEST_READ // 4), b""))
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


def _object(line: bytes) -> dict[str, Any]:
    """Parses a line of the manifest. Raises ValueError."""
    value = bounded_json.read(line, BOUNDS)
    if not isinstance(value, dict):
        raise ValueError("a line of its manifest is not an object")
    return value


def _entry(line: bytes) -> dict[str, Any]:
    """Parses the line of a file or a reference, and checks the types of its fields. Raises ValueError."""
    entry = _object(line)
    types = REFERENCE_FIELDS if entry.get("what") == "reference" else FILE_FIELDS
    for name, kinds in types.items():
        if type(entry.get(name)) not in kinds:
            raise ValueError(f"{name} of a line of its manifest is missing or of a wrong type")
    if not 0 <= (entry.get("expires_at") or 0) < LATEST:
        raise ValueError("expires_at of a line of its manifest is no time")
    if entry["what"] == "file" and not NAME.fullmatch(entry["owner"]):
        raise ValueError(f"no user is called {entry['owner'][:100]!r}")
    return entry


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))
