"""Makes the rows and the files of compiled chunks agree at start-up.

A file that the catalogue knows to be gone (evicted, expired, deleted) was left by a crash and is removed. An intact
file that it does not know is adopted: a crash came between the file and its row, or the catalogue is an older copy. Any
other file goes to the orphans, unless it cannot be read now.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, OutOfMemory
from mpic.kv.file import ChunkFile
from mpic.library.catalog.database import Catalog
from mpic.library.folder.layout import chunk_path, scan_chunks
from mpic.library.folder.quarantine import Orphans, Quarantine
from mpic.library.store.chunk_rows import ChunkRows, DurableChunk

log = logging.getLogger(__name__)


def reconcile_chunks(
    root: Path,
    rows: ChunkRows,
    catalog: Catalog,
    quarantine: Quarantine,
    filesystem: FileSystem,
    orphans: Orphans,
) -> Counter[str]:
    """Makes files and rows agree.

    Returns:
        How many of each: ``missing_chunks`` have no file any more (a file of the wrong size is put into quarantine),
        ``found_chunks`` have theirs again, ``adopted_chunks`` had no row, ``leftovers`` were removed, ``orphans`` were
        put aside, ``unknown`` have no name of this program and were left alone.
    """
    found, done = scan_chunks(root), Counter[str]()
    for path in found.leftovers:  # before anything is written: they may be what fills the disk
        filesystem.try_remove(root / path)
    lost, revived, gone = [], [], []
    for row, state in rows.every():
        size = found.sizes.pop(row.path, None)
        if state == "ready" and size != row.bytes:
            lost.append(row.key)
            if size is not None:
                quarantine.take(root / row.path)
        elif state == "missing" and size == row.bytes:
            revived.append(row.key)
        elif state != "ready" and size is not None:
            gone.append(row.path)
    rows.mark(lost, "missing")
    rows.revive(revived)
    deleted = catalog.tombstones(found.sizes)
    gone += deleted
    unknown = [path for path in found.sizes if path not in deleted]
    adopted, strange = _judge(root, unknown, filesystem)
    rows.put_all(adopted)
    orphans.take(strange)
    for path in gone:
        filesystem.try_remove(root / path)
    done.update(
        missing_chunks=len(lost), found_chunks=len(revived), leftovers=len(found.leftovers) + len(gone)
    )
    done.update(adopted_chunks=len(adopted), orphans=len(strange), unknown=len(found.unknown))
    return done


def _judge(root: Path, paths: Iterable[str], filesystem: FileSystem) -> tuple[list[DurableChunk], list[str]]:
    """Returns the chunks among files that have no row, and the paths of the files that are none. A file that cannot be
    read now is in neither: it stays, and the next start tries again."""
    chunks, strange = [], []
    for path in paths:
        try:
            stored = read_stored(root, path, filesystem)
        except (OSError, OutOfMemory) as error:
            log.warning("%s cannot be read and is left where it is: %s", path, error)
            continue
        if stored is None:
            strange.append(path)
        else:
            chunks.append(stored)
    return chunks, strange


def read_stored(root: Path, path: str, filesystem: FileSystem) -> DurableChunk | None:
    """Reads the header of a chunk file that has no row; None if it is damaged or its name belongs to another chunk. Its
    layers are verified when they are read, as those of every chunk.

    Args:
        path: path of the file, relative to the root.

    Raises:
        OSError, OutOfMemory: it cannot be read now.
    """
    try:
        file = ChunkFile(root / path, files=filesystem)
    except CorruptFile as error:
        log.warning("%s is not adopted: %s", path, error)
        return None
    file.close()
    if str(chunk_path(file.key)) != path:
        log.warning("%s is not adopted: it holds another chunk than its name says", path)
        return None
    return DurableChunk(file.key, path, file.bytes, file.tokens)
