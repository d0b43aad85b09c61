"""A report on a remote store: the objects that do not match their names or checksums."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from mpic.errors import CorruptFile
from mpic.kv.file import IO_BYTES, ChunkFile
from mpic.library.store.objects import ObjectReader, Objects
from mpic.library.store.remote import CHUNKS, DAMAGED, DELETED, SUFFIX, object_of

CHUNK = re.compile(rf"{CHUNKS}/([0-9a-f]{{64}})/([a-z]+-[0-9a-f]{{64}})/[0-9a-f]{{64}}({SUFFIX}|{DAMAGED})")


class StoredObject(NamedTuple):
    """A chunk's object. ``content`` is the name that all forms of its content begin with."""

    name: str
    owner: str
    content: str
    damaged: bool


class Fault(NamedTuple):
    """An object that is not as it should be, the hash of its owner, what is wrong and what was done."""

    name: str
    owner: str
    what: str
    then: str


def stored(objects: Objects) -> Iterator[StoredObject]:
    """Yield the chunks of a store and skip all other objects. Raise StoreUnavailable."""
    for found in objects.list(f"{CHUNKS}/"):
        if match := CHUNK.fullmatch(found["path"]):
            owner, content, suffix = match.groups()
            yield StoredObject(match[0], owner, f"{owner}/{content}", suffix == DAMAGED)


def check(objects: Objects, contents: bool = True) -> Iterator[Fault]:
    """Yield what is wrong in a store. What should have been deleted, or was moved aside earlier, is deleted; what is
    found to be damaged is moved aside.

    Args:
        contents: read every byte of every chunk; otherwise names alone are looked at.

    Raises:
        StoreUnavailable: the store has failed; what was yielded has been done.
    """
    deleted = {found["path"].removeprefix(f"{DELETED}/") for found in objects.list(f"{DELETED}/")}
    for one in list(stored(objects)):  # what is renamed below must not be met again
        if one.content in deleted and objects.exists(
            f"{DELETED}/{one.content}"
        ):  # and not added anew meanwhile
            objects.delete(one.name)
            yield Fault(one.name, one.owner, "its content was deleted", "deleted now")
        elif one.damaged:
            objects.delete(one.name)
            yield Fault(one.name, one.owner, "was moved aside as damaged", "deleted now")
        elif contents and (what := _damage(objects, one.name)) is not None:
            objects.rename(one.name, one.name.removesuffix(SUFFIX) + DAMAGED)
            yield Fault(one.name, one.owner, what, "moved aside; compiled again on next use")


def _damage(objects: Objects, name: str) -> str | None:
    """Read a chunk in pieces; return what is wrong with it, or None, also if it has gone meanwhile."""
    if (head := objects.head(name)) is None:
        return None
    try:
        with closing(ChunkFile(Path(name), files=ObjectReader(objects, name, head))) as file:
            if object_of(file.key) != name:
                return "holds another chunk than its name says"
            for part in file.parts(4 * IO_BYTES):
                for piece, read in file.read_part(part):
                    size = (len(piece.planes), len(piece.slots), file.shape.head_dim)
                    read(torch.empty(size, dtype=file.dtype))
    except FileNotFoundError:
        return None
    except CorruptFile as error:
        return error.message
    return None
