"""The rows of vectors in the catalogue, of which the index is a cache. All SQL of retrieval is here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from sqlite3 import Connection
from typing import Any, NamedTuple

import numpy as np

from mpic.errors import BadRequest, cut
from mpic.library.catalog.database import Catalog
from mpic.library.intake.checks import METADATA_KEYS, is_text
from mpic.library.records import Reference
from mpic.retriever.embedder import EmbedderName

COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<=", "ne": "!="}
FIELDS = ("id", "kind", "title")
FILTER_KEYS = METADATA_KEYS + len(FIELDS)


class StoredVector(NamedTuple):
    """A vector that was committed.

    Args:
        at: its index among the given vectors.
        id: its id, never used before. With a reused id, a search that still finds the previous vector in the index
            would give its score to the new one.
        replaced: id of the vector that it replaces, from an older version of the reference, or None.
    """

    at: int
    id: int
    replaced: int | None


class VectorRows:
    """Table ``vectors`` for one embedder, table ``embedders``, and metadata filters over ``refs``."""

    def __init__(self, catalog: Catalog, name: EmbedderName) -> None:
        self._catalog = catalog
        self.name = name
        with catalog.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO embedders (architecture, weights, dimension) VALUES (?, ?, ?)", name
            )
        row = catalog.read(
            "SELECT id FROM embedders WHERE architecture = ? AND weights = ? AND dimension = ?", *name
        )[0]
        self.embedder: int = row["id"]

    def revision(self) -> int:
        """Return a number that grows with every change of this embedder's vectors."""
        return self._catalog.read("SELECT revision FROM embedders WHERE id = ?", self.embedder)[0]["revision"]

    def put(self, references: Sequence[Reference], vectors: np.ndarray) -> list[StoredVector]:
        """Commit the vectors of references; return those of the references that are still current."""
        kept = []
        with self._catalog.write() as db:
            for at, (reference, vector) in enumerate(zip(references, vectors, strict=True)):
                name = reference.id, reference.version, reference.key.kind, reference.key.digest
                # a reference that was removed and added again starts with version 1
                same = "id = ? AND version = ? AND kind = ? AND digest = ?"
                if not db.execute(f"SELECT 1 FROM refs WHERE {same}", name).fetchone():
                    continue
                before = self._id(db, reference.id)
                db.execute("DELETE FROM vectors WHERE id = ?", (before,))
                id = db.execute(
                    "INSERT INTO vectors (embedder, reference, version, vector) VALUES (?, ?, ?, ?)",
                    (self.embedder, reference.id, reference.version, vector.astype("<f4").tobytes()),
                ).lastrowid
                assert id is not None
                kept.append(StoredVector(at, id, before))
            self._revise(db)
        return kept

    def remove(self, reference: str) -> int | None:
        """Delete a reference's vectors of every embedder; return the id of this embedder's, if there was one."""
        with self._catalog.write() as db:
            gone = self._id(db, reference)
            db.execute("DELETE FROM vectors WHERE reference = ?", (reference,))
            self._revise(db)
        return gone

    def sweep(self) -> None:
        """Delete every embedder's vectors of references that are gone."""
        with self._catalog.write() as db:
            if db.execute("DELETE FROM vectors WHERE reference NOT IN (SELECT id FROM refs)").rowcount:
                self._revise(db)

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids ``[n]`` int64 and vectors ``[n, dimension]`` fp32."""
        rows = self._catalog.read("SELECT id, vector FROM vectors WHERE embedder = ?", self.embedder)
        ids = np.fromiter((row["id"] for row in rows), np.int64, len(rows))
        data = b"".join(row["vector"] for row in rows)
        return ids, np.frombuffer(data, "<f4").reshape(len(rows), self.name.dimension).astype(np.float32)

    def ids(self) -> set[int]:
        rows = self._catalog.read("SELECT id FROM vectors WHERE embedder = ?", self.embedder)
        return {row["id"] for row in rows}

    def missing(self, after: str = "", limit: int = -1) -> list[str]:
        """Return, in order, the ids of references whose current version has no vector of this embedder."""
        rows = self._catalog.read(
            "SELECT r.id FROM refs r LEFT JOIN vectors v ON v.embedder = ? AND v.reference = r.id "
            "AND v.version = r.version WHERE v.id IS NULL AND r.id > ? ORDER BY r.id LIMIT ?",
            self.embedder,
            after,
            limit,
        )
        return [row["id"] for row in rows]

    def others(self) -> list[EmbedderName]:
        """Return the embedders that have vectors of references of which this embedder has none."""
        rows = self._catalog.read(
            "SELECT DISTINCT e.architecture, e.weights, e.dimension FROM vectors o "
            "JOIN embedders e ON e.id = o.embedder JOIN refs r ON r.id = o.reference "
            "WHERE o.embedder != ?1 "
            "AND NOT EXISTS (SELECT 1 FROM vectors v WHERE v.embedder = ?1 AND v.reference = o.reference)",
            self.embedder,
        )
        return [EmbedderName(*row) for row in rows]

    def some(self, ids: Sequence[int]) -> dict[int, tuple[str, int, np.ndarray]]:
        """Return the reference, its version and the vector ``[dimension]`` fp32 for each of these ids that exists."""
        rows = self._catalog.read(
            "SELECT v.* FROM json_each(?) AS asked JOIN vectors v ON v.id = asked.value",
            json.dumps(list(ids)),
        )
        return {
            row["id"]: (row["reference"], row["version"], np.frombuffer(row["vector"], "<f4")) for row in rows
        }

    def matching(self, filter: Mapping[str, Any]) -> np.ndarray:
        """Return the ids of vectors whose references match a filter.

        Args:
            filter: ``id``, ``kind``, ``title`` or a key of the metadata -> a value, a list of values, or comparisons
                ``{"gt" | "gte" | "lt" | "lte" | "ne": value}``. All must hold. A key that is missing does not match,
                and text is neither less nor greater than a number.

        Raises:
            BadRequest: a value or comparison is not valid.
        """
        if len(filter) > FILTER_KEYS:
            raise BadRequest(f"a filter has at most {FILTER_KEYS} keys, not {len(filter)}", param="filter")
        terms = ["v.embedder = ?"]
        values: list[Any] = [self.embedder]
        for key, wanted in filter.items():
            tests, operands = _tests(key, wanted)
            if key in FIELDS:
                terms.append(tests.format(f"r.{key}"))
                values += operands
            else:  # json_each matches a key however JSON escapes it; a json_extract path does not
                terms.append(
                    "EXISTS (SELECT 1 FROM json_each(r.metadata) AS m "
                    f"WHERE m.key = ? AND {tests.format('m.atom')})"
                )
                values += [key, *operands]
        rows = self._catalog.read(
            "SELECT v.id FROM vectors v JOIN refs r ON r.id = v.reference AND r.version = v.version "
            f"WHERE {' AND '.join(terms)}",
            *values,
        )
        return np.fromiter((row["id"] for row in rows), np.int64, len(rows))

    def _id(self, db: Connection, reference: str) -> int | None:
        row = db.execute(
            "SELECT id FROM vectors WHERE embedder = ? AND reference = ?", (self.embedder, reference)
        ).fetchone()
        return row and row["id"]

    def _revise(self, db: Connection) -> None:
        db.execute("UPDATE embedders SET revision = revision + 1")


def _tests(key: str, wanted: Any) -> tuple[str, list[Any]]:
    """Return SQL that tests ``{0}`` for the wanted values, and its operands. Raise BadRequest."""
    if not is_text(key):
        raise BadRequest("a key of the filter contains half of a surrogate pair", param="filter")
    if wanted == {}:
        raise BadRequest("a comparison needs a value", param=f"filter.{cut(key)}")
    terms, values = [], []
    for name, value in (wanted if isinstance(wanted, Mapping) else {"in": wanted}).items():
        options = list(value) if name == "in" and isinstance(value, list | tuple) else [value]
        if name != "in" and name not in COMPARISONS:
            known = ", ".join(COMPARISONS)
            raise BadRequest(
                f"no comparison {cut(name)!r}; known: {known}", param=f"filter.{cut(key)}.{cut(name)}"
            )
        if not all(_comparable(option) for option in options):
            raise BadRequest(
                "a filter compares with texts, finite numbers and booleans", param=f"filter.{cut(key)}"
            )
        if name == "in":
            # SQLite bounds the number of placeholders
            terms.append("{0} IN (SELECT value FROM json_each(?))")
        elif name == "ne":
            terms.append("{0} != ?")
        else:  # SQLite orders every text after every number
            kinds = "('text')" if isinstance(value, str) else "('integer', 'real')"
            terms.append(f"{{0}} {COMPARISONS[name]} ? AND typeof({{0}}) IN {kinds}")
        operands = [float(o) if isinstance(o, int) and abs(o) >= 1 << 63 else o for o in options]
        values += [json.dumps(operands)] if name == "in" else operands
    return " AND ".join(terms), values


def _comparable(value: Any) -> bool:
    if isinstance(value, str):
        return is_text(value)
    return isinstance(value, int | float) and abs(value) < 1e300
