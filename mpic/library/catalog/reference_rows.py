"""Rows of the catalogue about references: all SQL of the reference library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from sqlite3 import Connection, Row
from typing import Literal

from mpic.errors import ReferenceExists
from mpic.kv.chunk import ChunkKey
from mpic.library.catalog.database import (
    Catalog,
    from_row,
    insert_row,
    page_of,
    relative_path,
    to_row,
    update_row,
)
from mpic.library.folder.sidecars import Sidecar, Sidecars
from mpic.library.records import Reference, State

COLUMNS = (
    "id, version, kind, title, description, metadata, filename, path, bytes, sha256, digest, created_at, updated_at, "
    "tokens, state, error, format"
)


ALIVE = "(expires_at IS NULL OR expires_at > :now)"


class ReferenceRows:
    """Current references (table ``refs``) and retired versions that may still be linked (``retired_refs``)."""

    def __init__(self, catalog: Catalog, root: Path, clock: Callable[[], float], sidecars: Sidecars) -> None:
        self._catalog = catalog
        self._sidecars = sidecars
        self._root = root
        self._clock = clock

    def get(self, reference_id: str) -> Reference | None:
        sql = f"SELECT * FROM refs WHERE id = :id AND {ALIVE}"
        return next(iter(self._read(sql, id=reference_id, now=self._clock())), None)

    def many(self, ids: list[str]) -> dict[str, Reference]:
        sql = f"SELECT refs.* FROM json_each(:ids) AS asked JOIN refs ON refs.id = asked.value WHERE {ALIVE}"
        return {one.id: one for one in self._read(sql, ids=json.dumps(ids), now=self._clock())}

    def synced_from(self, source: str) -> dict[str, Reference]:
        """Return the references that a sync has added from a source, by id."""
        sql = f"SELECT * FROM refs WHERE synced_from = :source AND {ALIVE}"
        return {one.id: one for one in self._read(sql, source=source, now=self._clock())}

    def expired(self) -> list[Reference]:
        return self._read("SELECT * FROM refs WHERE expires_at <= ?", self._clock())

    def exists(self, reference: Reference) -> bool:
        """Return whether this version is current, or retired and not collected yet."""
        sql = "SELECT 1 FROM {} WHERE id = ? AND version = ? AND path = ?"
        name = self._name(reference)
        return any(self._catalog.one(sql.format(table), *name) for table in ("refs", "retired_refs"))

    def listing(self, after: str | None, limit: int, order: str, kind: str | None) -> list[Reference]:
        """Return at most ``limit`` references by age; ``order`` is ``asc`` or ``desc``, ``after`` an existing id."""
        sql = page_of("refs", order, f"(:kind IS NULL OR kind = :kind) AND {ALIVE}")
        return self._read(sql, after=after, limit=limit, kind=kind, now=self._clock())

    def pending(self) -> list[Reference]:
        """Return the references that wait for compilation, oldest first."""
        return self._read("SELECT * FROM refs WHERE state = 'compiling' ORDER BY seq")

    def retired(self) -> list[Reference]:
        return self._read("SELECT * FROM retired_refs")

    def totals(self) -> tuple[int, int]:
        """Return the number of references and the bytes of their originals."""
        return tuple(self._catalog.read("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM refs")[0])

    def paths(self) -> set[str]:
        """Return the paths of all originals, of retired versions too, relative to the root."""
        rows = self._catalog.read("SELECT path FROM refs UNION ALL SELECT path FROM retired_refs")
        return {row["path"] for row in rows}

    def insert(self, reference: Reference, publish: Callable[[Sidecar], None]) -> Reference:
        """Commit a new reference. Where an earlier reference of the same id has left a version or a vector, the
        numbers of its versions continue. One that has expired is retired.

        Args:
            publish: makes the original and this sidecar durable, before the row is committed.

        Raises:
            ReferenceExists: a reference has this id.
        """
        with self._catalog.write() as db:
            for held in self._parse(
                db.execute("SELECT * FROM refs WHERE id = ?", (reference.id,)).fetchall()
            ):
                if held.expires_at is None or held.expires_at > self._clock():
                    raise ReferenceExists(f"there is a reference {reference.id!r}; replace it", param="id")
                self.remove(db, held)  # it has expired and was not collected yet
            sql = """
                SELECT MAX(version) AS last FROM (
                    SELECT version FROM retired_refs WHERE id = :id UNION ALL SELECT version FROM vectors
                    WHERE embedder IN (SELECT id FROM embedders) AND reference = :id)"""
            last = db.execute(sql, {"id": reference.id}).fetchone()["last"]
            if last is not None:
                reference = replace(reference, version=last + 1)
            values = to_row(reference, self._root)
            insert_row(db, "refs", values)
            publish(Sidecar.of("reference", values))
            return reference

    def replace(
        self, reference_id: str, make: Callable[[Reference], Reference], publish: Callable[[Sidecar], None]
    ) -> tuple[Reference, Reference] | None:
        """Commit a new version in place of the current one, which is retired.

        Args:
            make: returns the new version from the current one, whose number it need not change. It is called within
                the transaction, so that the values it takes over are current.
            publish: see ``insert``.

        Returns:
            The new and the retired version, or None if there is no such reference.
        """
        with self._catalog.write() as db:
            sql = f"SELECT * FROM refs WHERE id = :id AND {ALIVE}"
            rows = db.execute(sql, {"id": reference_id, "now": self._clock()}).fetchall()
            if not rows:
                return None
            (current,) = self._parse(rows)
            new = replace(make(current), version=current.version + 1)
            retire(db, reference_id, current.version)
            values = to_row(new, self._root)
            update_row(db, "refs", values)
            publish(Sidecar.of("reference", values))
            return new, current

    def remove(self, db: Connection, reference: Reference) -> bool:
        """Retires, within a transaction, a reference that has no successor; False when it is gone or replaced."""
        if not retire(db, reference.id, reference.version):
            return False
        db.execute("DELETE FROM refs WHERE id = ?", (reference.id,))
        return True

    def collect(self, db: Connection, reference: Reference) -> bool:
        """Delete the row of a retired version within a transaction; False when that has happened already."""
        sql = "DELETE FROM retired_refs WHERE id = ? AND version = ?"
        if db.execute(sql, (reference.id, reference.version)).rowcount == 0:
            return False
        self._catalog.add_tombstones(db, [self._name(reference)[2]], self._clock())
        return True

    def has_content(self, db: Connection, key: ChunkKey, retired: bool) -> bool:
        """Tell, within a transaction, whether a reference (or, with ``retired``, a retired version) holds this
        content."""
        tables = ("refs", "retired_refs") if retired else ("refs",)
        sql = "SELECT 1 FROM {} WHERE digest = ? AND kind = ?"
        return any(db.execute(sql.format(table), (key.digest, key.kind)).fetchone() for table in tables)

    def set_state(
        self, reference: Reference, state: State, tokens: int | None = None, error: str | None = None
    ) -> None:
        """Record the outcome of compiling. A version that was replaced or removed meanwhile is no error."""
        sql = (
            "UPDATE refs SET state = ?, tokens = COALESCE(?, tokens), error = ? "
            "WHERE id = ? AND version = ? AND path = ?"
        )
        with self._catalog.write() as db:
            db.execute(sql, (state, tokens, error, *self._name(reference)))

    def set_column(
        self, reference_id: str, column: Literal["expires_at", "pinned"], value: float | None
    ) -> None:
        """Change a column of a reference, if there is one of this id that has not expired."""
        sql = f"UPDATE refs SET {column} = :value WHERE id = :id AND {ALIVE}"
        with self._catalog.write() as db:
            values = {"value": value, "id": reference_id, "now": self._clock()}
            if db.execute(sql, values).rowcount:
                self._sidecars.rewrite(db, "reference", reference_id)

    def _name(self, reference: Reference) -> tuple[str, int, str]:
        """Return the permanent identity of a version: its id and number may be used again, but its path may not."""
        return reference.id, reference.version, relative_path(reference, self._root)

    def _read(self, sql: str, *values: object, **named: object) -> list[Reference]:
        return self._parse(self._catalog.read(sql, *values, **named))

    def _parse(self, rows: Iterable[Row]) -> list[Reference]:
        return [Reference(**from_row(row, self._root)) for row in rows]


def retire(db: Connection, reference_id: str, version: int) -> bool:
    """Keep the current version of a reference among the retired ones, within the transaction that replaces or remove
    it; False when it is not current any more."""
    sql = f"INSERT INTO retired_refs ({COLUMNS}) SELECT {COLUMNS} FROM refs WHERE id = ? AND version = ?"
    return db.execute(sql, (reference_id, version)).rowcount > 0
