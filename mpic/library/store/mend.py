"""Making the rows and the files of compiled chunks agree, at start-up.

A file that the catalogue knows to be gone (evicted, expired, deleted) was left by a crash and is removed. A whole file
that it does not know is taken in: a crash came between the file and its row, or the catalogue is an older copy. Any
other file goes to the orphans.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpic.durable import Files
from mpic.errors import CorruptFile
from mpic.kv.file import ChunkFile
from mpic.library.catalog import Catalog
from mpic.library.chunk_rows import ChunkRows, Stored
from mpic.library.names import chunk_path, scan_chunks
from mpic.library.store.orphans import Orphans
from mpic.library.store.quarantine import Quarantine

log = logging.getLogger(__name__)


def mend(
    root: Path, rows: ChunkRows, catalog: Catalog, quarantine: Quarantine, files: Files, orphans: Orphans
) -> Counter[str]:
    """Make files and rows agree.

    Returns:
        How many of each: ``missing_chunks`` have no file any more (of the wrong size, it is put in quarantine),
        ``found_chunks`` have theirs again, ``adopted_chunks`` had no row, ``leftovers`` were removed, ``orphans`` were
        put aside, ``unknown`` are not ours and were left alone.
    """
    found, done = scan_chunks(root), Counter[str]()
    lost, revived, gone = [], [], list(found.leftovers)
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
    deleted = catalog.deleted(found.sizes)
    gone += deleted
    unknown = [path for path in found.sizes if path not in deleted]
    whole = [read_stored(root, path, files) for path in unknown]
    strange = [path for path, stored in zip(unknown, whole) if stored is None]
    rows.put_all(stored for stored in whole if stored is not None)
    orphans.take(strange)
    remove(files, (root / path for path in gone))
    done.update(missing_chunks=len(lost), found_chunks=len(revived), leftovers=len(gone))
    done.update(adopted_chunks=len(unknown) - len(strange), orphans=len(strange), unknown=len(found.unknown))
    return done


def read_stored(root: Path, path: str, files: Files) -> Stored | None:
    """What a chunk file that has no row says it holds; None when it is damaged or lies where no such file belongs. Its
    layers are verified when they are read, as those of every chunk.

    Args:
        path: relative to the root.
    """
    try:
        file = ChunkFile(root / path, files=files)
    except (CorruptFile, OSError) as error:
        log.warning("%s is not taken into the catalogue: %s", path, error)
        return None
    file.close()
    if str(chunk_path(file.key)) != path:
        log.warning("%s is not taken into the catalogue: it holds another chunk than its name says", path)
        return None
    return Stored(file.key, path, file.bytes, file.tokens)


def remove(files: Files, paths: Iterable[Path]) -> None:
    """Remove files that nothing refers to; those that cannot be removed are tried again at the next start."""
    for path in paths:
        with suppress(OSError):
            files.remove(path)
