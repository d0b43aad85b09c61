"""Imports references in bulk from a folder or a JSONL file. The ``ImportTarget`` is a library or a server.

In a folder, every file is a reference; its title is its name without the suffix, its id comes from its path. Symbolic
links that lead out of the folder are refused.

In a JSONL file, every line is an object ``{"path" or "text", "title", "id"?, "description"?, "metadata"?}``. Paths are
relative to the file and stay below its folder. Decoding finds the kind of a reference; a ``kind`` that differs is
reported. Lists in ``metadata`` become one text, separated by commas. An id ``x`` becomes ``ref_x``.

An import can be run again: references with the same content and words are left as they are, changed ones are replaced.
An interrupted import is therefore resumed by starting it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from mpic.errors import BadRequest, MPICError, OutOfMemory, ReferenceExists, ReferenceNotFound, TooLarge
from mpic.library.records import Reference, Scalar
from mpic.library.references import ReferenceLibrary
from mpic.memory import as_errors

KEYS = frozenset({"id", "title", "kind", "path", "text", "description", "metadata"})
PLAIN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")

Outcome = Literal["added", "replaced", "unchanged", "refused"]


@dataclass(frozen=True)
class ImportItem:
    """A reference to import.

    Args:
        where: name of the file, or the line of the JSONL file, for messages.
        error: reason why it cannot be read, in which case the other fields are empty.
    """

    where: str
    id: str = ""
    title: str = ""
    filename: str = ""
    path: Path | None = None
    text: str | None = None
    kind: str | None = None
    description: str = ""
    metadata: dict[str, Scalar] = field(default_factory=dict)
    error: str | None = None

    def content(self, largest: int | None) -> bytes:
        """Read the content, unless it is a file of more than ``largest`` bytes, which need not fit into memory. Raise
        TooLarge, OSError, UnicodeEncodeError."""
        if self.path is None:
            return (self.text or "").encode()
        if largest is not None and self.path.stat().st_size > largest:
            raise TooLarge(f"the file is larger than {largest} bytes", limit=largest)
        with as_errors():
            return self.path.read_bytes()


class KnownReference(NamedTuple):
    """A reference that the target has already."""

    sha256: str
    title: str
    description: str
    metadata: dict[str, Scalar]


class ImportTarget(Protocol):
    """The library that an import fills. An MPICError with a status below 500 refuses one item; any other error ends the
    import.

    Attributes:
        largest: bytes of the largest content that it takes; None if only an attempt tells.
    """

    largest: int | None

    async def there(self, id: str) -> KnownReference | None: ...

    async def add(self, item: ImportItem, content: bytes) -> str:
        """Store a new reference; return its kind, which decoding found."""
        ...

    async def replace(self, item: ImportItem, content: bytes) -> str: ...


class ImportResult(NamedTuple):
    """The outcome of one item; ``why`` and ``code`` are the reason if it was refused."""

    where: str
    outcome: Outcome
    id: str = ""
    why: str = ""
    code: str = ""


def read_items(source: Path) -> Iterator[ImportItem]:
    """Yield the references in a folder or in a JSONL file. One that cannot be read is an item with an ``error``.

    Raises:
        BadRequest: the source is neither.
    """
    if source.is_dir():
        yield from _from_folder(source)
    elif source.suffix in (".jsonl", ".ndjson") and source.is_file():
        yield from _from_lines(source)
    else:
        raise BadRequest(f"{source} is neither a folder nor a .jsonl file", param="source")


async def import_references(
    source: Path, target: ImportTarget, progress: Callable[[ImportResult], None] = lambda result: None
) -> list[ImportResult]:
    """Import every reference in ``source``; a bad one does not stop the others.

    Raises:
        BadRequest: the source is neither a folder nor a JSONL file.
        StorageFull, Unavailable: nothing more can be stored; run it again later.
    """
    results, seen = [], set()
    for item in read_items(source):
        if item.error is None and item.id in seen:
            item = ImportItem(item.where, error=f"the id {item.id!r} was used before")
        seen.add(item.id)
        results.append(await read_and_import(item, target))
        progress(results[-1])
    return results


async def read_and_import(item: ImportItem, target: ImportTarget) -> ImportResult:
    """Import one reference into a target, unless the target has it already, unchanged.

    Raises:
        StorageFull, Unavailable: nothing more can be stored.
    """
    if item.error is not None:
        return ImportResult(item.where, "refused", item.id, item.error, "bad_request")
    try:
        content = item.content(target.largest)
    except (TooLarge, OutOfMemory) as error:
        return ImportResult(item.where, "refused", item.id, error.message, error.code)
    except (OSError, UnicodeEncodeError) as error:
        return ImportResult(item.where, "refused", item.id, str(error), "bad_request")
    try:
        there = await target.there(item.id)
        same = KnownReference(
            hashlib.sha256(content).hexdigest(), item.title, item.description, item.metadata
        )
        if there == same:
            return ImportResult(item.where, "unchanged", item.id)
        kind = await (target.add if there is None else target.replace)(item, content)
    except MPICError as error:
        if error.status >= 500:
            raise
        return ImportResult(item.where, "refused", item.id, error.message, error.code)
    other = item.kind not in (None, kind)
    why = f"stored as {kind!r}, which it is; its kind was given as {item.kind!r}" if other else ""
    return ImportResult(item.where, "added" if there is None else "replaced", item.id, why)


class LibraryTarget:
    """An ``ImportTarget`` that is a library opened by this process.

    Args:
        source: see ``ReferenceLibrary.add``. With a source, no reference of somebody else is taken over.
        changed: called with each version that was added or replaced.
    """

    def __init__(
        self,
        references: ReferenceLibrary,
        source: str = "",
        changed: Callable[[Reference], None] = lambda reference: None,
    ) -> None:
        self._references, self._source, self._changed = references, source, changed
        self.largest: int | None = references.upload_bytes

    async def there(self, id: str) -> KnownReference | None:
        try:
            found = self._references.get(id)
        except ReferenceNotFound:
            return None
        if self._source and found.synced_from != self._source:
            raise ReferenceExists("another reference has this id, which the sync has not added", param="id")
        return KnownReference(found.sha256, found.title, found.description, found.metadata)

    async def add(self, item: ImportItem, content: bytes) -> str:
        words, source = _words(item), self._source
        added = await self._references.add(content, item.filename, id=item.id, synced_from=source, **words)
        self._changed(added)
        return added.kind

    async def replace(self, item: ImportItem, content: bytes) -> str:
        replaced = await self._references.replace(item.id, content, item.filename, **_words(item))
        self._changed(replaced)
        return replaced.kind


def _words(item: ImportItem) -> dict[str, Any]:
    return {"title": item.title, "description": item.description, "metadata": item.metadata}


def _from_folder(folder: Path) -> Iterator[ImportItem]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            try:
                item = ImportItem(str(name), _id(str(name)), path.stem, path.name, path)
                if not _lies_in(path, folder):
                    item = ImportItem(str(name), error="it is a symbolic link out of the folder")
                yield item
            except UnicodeEncodeError:
                yield ImportItem(os.fsencode(name).decode(errors="replace"), error="its name is not UTF-8")


def _lies_in(path: Path, folder: Path) -> bool:
    """Return whether the file that a path leads to, over symbolic links, is below a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def _from_lines(file: Path) -> Iterator[ImportItem]:
    with file.open("rb") as lines:  # decoded line by line, so that a bad one does not stop the others
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{file.name}:{number}"
                try:
                    yield _from_object(json.loads(line), where, file.parent)
                except (ValueError, TypeError, RecursionError) as error:
                    yield ImportItem(where, error=f"not usable: {error}")


def _from_object(value: Any, where: str, folder: Path) -> ImportItem:
    """Raise ValueError, TypeError."""
    if not isinstance(value, dict):
        raise ValueError("a line holds one JSON object")
    unknown = sorted(set(value) - KEYS)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(KEYS))}")
    if ("path" in value) == ("text" in value):
        raise ValueError("give either path or text")
    for key in KEYS - {"metadata"}:
        if not isinstance(value.get(key, ""), str):
            raise ValueError(f"{key} must be a text")
    path = None
    if "path" in value:
        path = folder / value["path"]
        if not _lies_in(path, folder):
            raise ValueError(f"{value['path']!r} lies outside of the file's folder")
    metadata = value.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError("metadata must be an object")
    title = value.get("title") or (path.stem if path else "")
    return ImportItem(
        where=where,
        id=_id(value.get("id") or (value["path"] if path else title)),
        title=title,
        filename=path.name if path else f"{title}.txt",
        path=path,
        text=value.get("text"),
        kind=value.get("kind"),
        description=value.get("description", ""),
        metadata={key: _flat(one) for key, one in metadata.items()},
    )


def _flat(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(one, (str, int, float, bool)) for one in value):
        return ", ".join(map(str, value))
    return value


def _id(name: str) -> str:
    """Return ``ref_`` and the name if that is a valid id, else ``ref_``, a readable part of it and a hash of the
    whole."""
    name = name.removeprefix("ref_")
    if PLAIN_ID.fullmatch(name):
        return f"ref_{name}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"ref_{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}-{digest}"
