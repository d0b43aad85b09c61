"""Compresses chunks that are stored (``mpic library press``), one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from sqlite3 import Row
from typing import Literal, NamedTuple

from mpic.errors import CorruptFile, NotFound, OutOfMemory, StorageFull, StorageQuotaExceeded
from mpic.kv.chunk import ChunkKV
from mpic.library.library import Library
from mpic.library.store import DiskStore
from mpic.library.store.chunk_rows import ChunkRow, Source
from mpic.library.upkeep import Progress, key_of, names_of, read_chunk
from mpic.memory import as_errors
from mpic.press import Press

Compress = Callable[[ChunkKV], ChunkKV]
"""Returns a chunk as compiling it under the press would have stored it."""


class Pressed(NamedTuple):
    """The outcome for an uncompressed chunk: it was ``pressed``, was pressed ``already``, belongs to another ``model``,
    or is ``left`` uncompressed, and why. ``before`` and ``after`` are bytes of the two files, 0 where there is none."""

    path: str
    outcome: Literal["pressed", "already", "model", "left"]
    before: int
    after: int = 0
    why: str = ""
    name: str = ""


def candidates(library: Library, user: str | None = None) -> list[Row]:
    """Return the rows of the chunks that are stored uncompressed, least recently used first.

    Args:
        user: only this user's.
    """
    sql = """
        SELECT * FROM chunks WHERE tier = 'disk' AND state = 'ready' AND json_extract(recipe, '$.press') IS NULL
            AND (:user IS NULL OR owner = :user) ORDER BY last_used, key"""
    return library.catalog.read(sql, user=user)


def press_chunks(
    library: Library,
    press: Press,
    model: str,
    compress: Compress,
    replaced: bool,
    user: str | None = None,
    progress: Progress = lambda done: None,
) -> list[Pressed]:
    """Store the compressed form of every uncompressed chunk of a model, whatever else its recipe says.

    Each is durable before the next one is read, so after an interruption the same call goes on where it was. Nothing is
    evicted for it, and no chunk counts as used because of it. A damaged file is put aside, as by ``check``.

    Args:
        model: digest of the model; chunks of other models are left alone.
        compress: presses one chunk.
        replaced: remove the uncompressed form in the transaction that stores the compressed one.
        user: only this user's.
        progress: called with the bytes of each file that was read.
    """
    names, done = names_of(library), []
    for row in candidates(library, user):
        if row["model"] != model:
            one = Pressed(row["path"], "model", row["bytes"])
        else:
            one = _press_one(library, press, row, compress, replaced)
        done.append(one._replace(name=names.get(row["path"], "")))
        progress(row["bytes"])
    return done


def _press_one(library: Library, press: Press, row: Row, compress: Compress, replaced: bool) -> Pressed:
    store, key = library.store, key_of(row)
    if not isinstance(store, DiskStore):
        raise ValueError("the library is open with tiers beside its disk")
    source = ChunkRow(row["key"], row["path"], row["bytes"])
    pressed = replace(key, recipe=replace(key.recipe, press=press.name))
    sql = "SELECT bytes FROM chunks WHERE key = ? AND state = 'ready'"
    existing = library.catalog.one(sql, pressed.digest)
    if existing is not None:
        if replaced:
            store.remove(source)
        return Pressed(row["path"], "already", row["bytes"], existing["bytes"])
    left = partial(Pressed, row["path"], "left", row["bytes"], 0)
    if key.digest != row["key"]:
        return left("has a row that is not its own")
    try:
        chunk = read_chunk(store.path(key), key, library.filesystem)
        with as_errors():
            store.save(compress(chunk), Source(source, replaced))
    except CorruptFile as error:
        store.set_aside(key, error)
        return left(f"is damaged and was put aside: {error.message}")
    except FileNotFoundError:
        store.open(key)  # marks the row as missing
        return left("is gone")
    except (OSError, OutOfMemory, NotFound, StorageFull, StorageQuotaExceeded) as error:
        return left(str(error))
    after = library.catalog.read(sql, pressed.digest)[0]["bytes"]
    return Pressed(row["path"], "pressed", row["bytes"], after)
