"""Vectors in the catalogue: the truth of which the index is a cache. All SQL of retrieval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from sqlite3 import Connection
from typing import Any

import numpy as np

from mpic.errors import BadRequest
from mpic.library.catalog import Catalog
from mpic.library.records import Reference
from mpic.retriever.embedder import EmbedderName

COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<=", "ne": "!="}
FIELDS = ("id", "kind", "title")


class VectorRows:
    """Table ``vectors`` for one embedder, table ``embedders``, and metadata filters over ``refs``."""

    def __init__(self, catalog: Catalog, name: EmbedderName) -> None:
        self._catalog = catalog
        self.name = name
        with catalog.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO embedders (architecture, weights, dimension) VALUES (?, ?, ?)", name
            )
        row = catalog.one(
            "SELECT id FROM embedders WHERE architecture = ? AND weights = ? AND dimension = ?", *name
        )
        self.embedder: int = row["id"]

    def revision(self) -> int:
        """Grows with every change of this embedder's vectors."""
        return self._catalog.one("SELECT revision FROM embedders WHERE id = ?", self.embedder)["revision"]

    def put(self, references: Sequence[Reference], vectors: np.ndarray) -> list[tuple[int, int]]:
        """Commit the vectors of references; (position, id) of those that are still current."""
        kept = []
        with self._catalog.write() as db:
            for at, (reference, vector) in enumerate(zip(references, vectors, strict=True)):
                if not db.execute(
                    "SELECT 1 FROM refs WHERE id = ? AND version = ?", (reference.id, reference.version)
                ).fetchone():
                    continue
                db.execute(
                    "INSERT INTO vectors (embedder, reference, version, vector) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (embedder, reference) "
                    "DO UPDATE SET version = excluded.version, vector = excluded.vector",
                    (self.embedder, reference.id, reference.version, vector.astype("<f4").tobytes()),
                )
                row = db.execute(
                    "SELECT id FROM vectors WHERE embedder = ? AND reference = ?",
                    (self.embedder, reference.id),
                ).fetchone()
                kept.append((at, row["id"]))
            self._revise(db)
        return kept

    def remove(self, reference: str) -> list[int]:
        """Forget a reference's vectors of every embedder; the ids of this one's."""
        with self._catalog.write() as db:
            gone = db.execute(
                "SELECT id FROM vectors WHERE embedder = ? AND reference = ?", (self.embedder, reference)
            ).fetchall()
            db.execute("DELETE FROM vectors WHERE reference = ?", (reference,))
            self._revise(db)
        return [row["id"] for row in gone]

    def sweep(self) -> list[int]:
        """Forget the vectors of references that are no longer there; ids of this embedder's."""
        orphans = "reference NOT IN (SELECT id FROM refs)"
        gone = self._catalog.read(f"SELECT id FROM vectors WHERE embedder = ? AND {orphans}", self.embedder)
        if gone:
            with self._catalog.write() as db:
                db.execute(f"DELETE FROM vectors WHERE {orphans}")
                self._revise(db)
        return [row["id"] for row in gone]

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids ``[n]`` int64 and vectors ``[n, dimension]`` fp32."""
        rows = self._catalog.read("SELECT id, vector FROM vectors WHERE embedder = ?", self.embedder)
        ids = np.fromiter((row["id"] for row in rows), np.int64, len(rows))
        data = b"".join(row["vector"] for row in rows)
        return ids, np.frombuffer(data, "<f4").reshape(len(rows), self.name.dimension).astype(np.float32)

    def ids(self) -> set[int]:
        rows = self._catalog.read("SELECT id FROM vectors WHERE embedder = ?", self.embedder)
        return {row["id"] for row in rows}

    def missing(self, after: str = "", limit: int = -1) -> list[str]:
        """Ids of references whose current version has no vector of this embedder, in order of id."""
        rows = self._catalog.read(
            "SELECT r.id FROM refs r LEFT JOIN vectors v ON v.embedder = ? AND v.reference = r.id "
            "AND v.version = r.version WHERE v.id IS NULL AND r.id > ? ORDER BY r.id LIMIT ?",
            self.embedder,
            after,
            limit,
        )
        return [row["id"] for row in rows]

    def others(self) -> list[EmbedderName]:
        """Embedders that have vectors of references that this one has none of."""
        rows = self._catalog.read(
            "SELECT DISTINCT e.architecture, e.weights, e.dimension FROM vectors o "
            "JOIN embedders e ON e.id = o.embedder JOIN refs r ON r.id = o.reference "
            "WHERE o.embedder != ?1 "
            "AND NOT EXISTS (SELECT 1 FROM vectors v WHERE v.embedder = ?1 AND v.reference = o.reference)",
            self.embedder,
        )
        return [EmbedderName(*row) for row in rows]

    def references(self, ids: Sequence[int]) -> dict[int, str]:
        """Reference ids of vectors."""
        rows = self._catalog.read(
            "SELECT v.id, v.reference FROM json_each(?) AS asked JOIN vectors v ON v.id = asked.value",
            json.dumps(list(ids)),
        )
        return {row["id"]: row["reference"] for row in rows}

    def matching(self, filter: Mapping[str, Any]) -> np.ndarray:
        """Ids of vectors whose reference fits a filter.

        Args:
            filter: ``id``, ``kind``, ``title`` or a key of the metadata -> a value, a list of values, or comparisons
                ``{"gt" | "gte" | "lt" | "lte" | "ne": value}``. All must hold; a key that is not there does not fit.

        Raises:
            BadRequest: a value or comparison that means nothing.
        """
        terms, values = ["v.embedder = ?"], [self.embedder]
        for key, wanted in filter.items():
            column = f"r.{key}" if key in FIELDS else "json_extract(r.metadata, ?)"
            path = [] if key in FIELDS else [_path(key)]
            tests = wanted if isinstance(wanted, Mapping) else {"in": wanted}
            for name, value in tests.items():
                if name == "in":
                    options = list(value) if isinstance(value, list | tuple) else [value]
                    terms.append(f"{column} IN ({', '.join('?' * len(options))})")
                elif name in COMPARISONS:
                    options = [value]
                    terms.append(f"{column} {COMPARISONS[name]} ?")
                else:
                    known = ", ".join(COMPARISONS)
                    raise BadRequest(f"no comparison {name!r}; known: {known}", param=f"filter.{key}")
                if not all(isinstance(o, str | int | float | bool) for o in options):
                    raise BadRequest(
                        "a filter compares with text, numbers and booleans", param=f"filter.{key}"
                    )
                values += [*path, *options]
        rows = self._catalog.read(
            "SELECT v.id FROM vectors v JOIN refs r ON r.id = v.reference AND r.version = v.version "
            f"WHERE {' AND '.join(terms)}",
            *values,
        )
        return np.fromiter((row["id"] for row in rows), np.int64, len(rows))

    def _revise(self, db: Connection) -> None:
        db.execute("UPDATE embedders SET revision = revision + 1")


def _path(key: str) -> str:
    """A metadata key in SQLite's JSON path."""
    if '"' in key or "\0" in key:
        raise BadRequest("a metadata key has no quotes", param="filter")
    return f'$."{key}"'
