"""References in bulk, from a folder or a JSONL file; into a library or over HTTP, whoever gives the ``Target``.

A folder: every file below it is a reference; its title is its name without the suffix, its id comes from its path.

A JSONL file: one object a line, ``{"path" or "text", "title", "id"?, "description"?, "metadata"?}``; paths are relative
to the file and stay below its folder. What kind it is, is found by decoding; a ``kind`` that says otherwise is noted.
Lists in ``metadata`` become one text, separated by commas. An id ``x`` becomes ``ref_x``.

An import can be run again: what is there already with the same content and words is left as it is, what has changed is
replaced. So an interrupted import is resumed by starting it once more.
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

from mpic.errors import BadRequest, MPICError, ReferenceNotFound
from mpic.library.dynamic import DynamicLibrary
from mpic.library.records import Scalar

KEYS = frozenset({"id", "title", "kind", "path", "text", "description", "metadata"})
PLAIN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")

Outcome = Literal["added", "replaced", "unchanged", "refused"]


@dataclass(frozen=True)
class Item:
    """One reference to import.

    Args:
        where: for people: the file, or the line of the JSONL file.
        error: why it cannot even be read; the rest is then empty.
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

    def content(self) -> bytes:
        """Raises OSError, UnicodeEncodeError."""
        return self.path.read_bytes() if self.path is not None else (self.text or "").encode()


class There(NamedTuple):
    """What is known of a reference that is there already."""

    sha256: str
    title: str
    description: str
    metadata: dict[str, Scalar]


class Target(Protocol):
    """Where an import goes. Errors of the tree refuse one item; any other error ends the import."""

    async def there(self, id: str) -> There | None: ...

    async def add(self, item: Item, content: bytes) -> str:
        """Returns the kind it turned out to be."""
        ...

    async def replace(self, item: Item, content: bytes) -> str: ...


class Result(NamedTuple):
    """What became of one item; ``why`` and ``code`` of a refused one."""

    where: str
    outcome: Outcome
    id: str = ""
    why: str = ""
    code: str = ""


def read_items(source: Path) -> Iterator[Item]:
    """The references in a folder, or in a JSONL file. What cannot be read is an item with an ``error``.

    Raises:
        BadRequest: neither.
    """
    if source.is_dir():
        yield from _from_folder(source)
    elif source.suffix in (".jsonl", ".ndjson") and source.is_file():
        yield from _from_lines(source)
    else:
        raise BadRequest(f"{source} is neither a folder nor a .jsonl file", param="source")


async def import_references(
    source: Path, target: Target, progress: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Import everything in ``source``; one bad item does not stop the others.

    Raises:
        BadRequest: the source is neither a folder nor a JSONL file.
        StorageFull, Unavailable: nothing more can be stored; run it again afterwards.
    """
    results, seen = [], set()
    for item in read_items(source):
        if item.error is None and item.id in seen:
            item = Item(item.where, error=f"the id {item.id!r} came before")
        seen.add(item.id)
        results.append(await _import_one(item, target))
        progress(results[-1])
    return results


async def _import_one(item: Item, target: Target) -> Result:
    if item.error is not None:
        return Result(item.where, "refused", item.id, item.error, "bad_request")
    try:
        content = item.content()
    except (OSError, UnicodeEncodeError) as error:
        return Result(item.where, "refused", item.id, str(error), "bad_request")
    try:
        there = await target.there(item.id)
        same = There(hashlib.sha256(content).hexdigest(), item.title, item.description, item.metadata)
        if there == same:
            return Result(item.where, "unchanged", item.id)
        kind = await (target.add if there is None else target.replace)(item, content)
    except MPICError as error:
        if error.status >= 500:
            raise
        return Result(item.where, "refused", item.id, error.message, error.code)
    if item.kind not in (None, kind):
        why = f"stored, but it is said to be of kind {item.kind!r} and is {kind!r}"
        return Result(item.where, "added" if there is None else "replaced", item.id, why)
    return Result(item.where, "added" if there is None else "replaced", item.id)


class IntoLibrary:
    """A ``Target`` in this process."""

    def __init__(self, references: DynamicLibrary) -> None:
        self._references = references

    async def there(self, id: str) -> There | None:
        try:
            found = self._references.get(id)
        except ReferenceNotFound:
            return None
        return There(found.sha256, found.title, found.description, found.metadata)

    async def add(self, item: Item, content: bytes) -> str:
        words = {"title": item.title, "description": item.description, "metadata": item.metadata}
        return (await self._references.add(content, item.filename, id=item.id, **words)).kind

    async def replace(self, item: Item, content: bytes) -> str:
        words = {"title": item.title, "description": item.description, "metadata": item.metadata}
        return (await self._references.replace(item.id, content, item.filename, **words)).kind


def _from_folder(folder: Path) -> Iterator[Item]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            try:
                yield Item(str(name), _id(str(name)), path.stem, path.name, path)
            except UnicodeEncodeError:
                yield Item(os.fsencode(name).decode(errors="replace"), error="its name is not UTF-8")


def _from_lines(file: Path) -> Iterator[Item]:
    with file.open("rb") as lines:  # decoded line by line, so that a bad one does not stop the others
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{file.name}:{number}"
                try:
                    yield _from_object(json.loads(line), where, file.parent)
                except (ValueError, TypeError, RecursionError) as error:
                    yield Item(where, error=f"not usable: {error}")


def _from_object(value: Any, where: str, folder: Path) -> Item:
    """Raises ValueError, TypeError."""
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
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{value['path']!r} lies outside of the file's folder")
    metadata = value.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError("metadata must be an object")
    title = value.get("title") or (path.stem if path else "")
    return Item(
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
    """``ref_`` and the name where that can be, else a readable part of it and a hash of the whole."""
    name = name.removeprefix("ref_")
    if PLAIN_ID.fullmatch(name):
        return f"ref_{name}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"ref_{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}-{digest}"
