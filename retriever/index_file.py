"""The index on disk: a cache of the catalogue's vectors, verified whenever it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mpic.durable import FileSystem, write_durably
from mpic.retriever.embedder import EmbedderName
from mpic.retriever.index import VectorIndex

MAGIC = b"MPICVEC1"


class IndexFile:
    """The file of an index: ``MPICVEC1``, length of the header (u32), header (JSON), faiss's bytes.

    Args:
        path: path of the file.
        name: name of the embedder whose vectors it holds.
    """

    def __init__(self, path: Path, name: EmbedderName, files: FileSystem | None = None) -> None:
        self.path, self._name, self._files = path, name, files or FileSystem()

    def write(self, index: VectorIndex, revision: int) -> None:
        """Write the index durably and completely, or not at all. Raise StorageFull."""
        data: Any = index.serialize()
        header = {
            "embedder": list(self._name),
            "revision": revision,
            "vectors": len(index),
            "xxh3": xxhash.xxh3_128_hexdigest(memoryview(data)),
        }
        head = json.dumps(header).encode()
        parts = [MAGIC, len(head).to_bytes(4, "little"), head, memoryview(data)]
        write_durably(self._files, self.path, [memoryview(part) for part in parts])

    def read(self, revision: int, approximate_from: int) -> VectorIndex:
        """Read the index as of ``revision``; for ``approximate_from`` see ``VectorIndex``.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
            ValueError: it is damaged, stale or belongs to another embedder; the message says which.
        """
        raw = np.fromfile(self.path, np.uint8)
        head = raw[12 : 12 + int.from_bytes(raw[8:12].tobytes(), "little")]
        if raw[:8].tobytes() != MAGIC:
            raise ValueError("damaged: it does not begin with the magic number")
        try:
            header = json.loads(head.tobytes())
            data: Any = raw[12 + len(head) :]
            if header["xxh3"] != xxhash.xxh3_128_hexdigest(memoryview(data)):
                raise ValueError("the checksum does not match")
            if EmbedderName(*header["embedder"]) != self._name:
                raise ValueError("it is another embedder's")
            if header["revision"] != revision:
                raise ValueError("stale: vectors have changed since it was written")
            index = VectorIndex.deserialize(data, self._name.dimension, approximate_from)
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"damaged: {error!r}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"damaged: {error}") from error
        if len(index) != header["vectors"]:
            raise ValueError("damaged: it does not have as many vectors as its header says")
        return index
