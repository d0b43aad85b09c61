"""Rows of the catalogue about references: all SQL of the dynamic library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from sqlite3 import Connection, Row

from mpic.errors import ReferenceExists
from mpic.kv.chunk import ChunkKey
from mpic.library.catalog import Catalog
from mpic.library.intake import dump_metadata
from mpic.library.records import Reference, State
from mpic.library.rows import insert_row, mark_lost
from mpic.library.sidecars import Sidecar, Sidecars, of_reference

COLUMNS = (
    "id, version, kind, title, description, metadata, filename, path, bytes, sha256, digest, created_at, updated_at, "
    "tokens, state, error"
)


class ReferenceRows:
    """Current references (table ``refs``), and versions that are gone but may still be linked (``retired_refs``)."""

    def __init__(self, catalog: Catalog, root: Path, clock: Callable[[], float], sidecars: Sidecars) -> None:
        self._catalog = catalog
        self._sidecars = sidecars
        self._root = root
        self._clock = clock

    def get(self, reference_id: str) -> Reference | None:
        return next(iter(self._read("SELECT * FROM refs WHERE id = ?", reference_id)), None)

    def many(self, ids: list[str]) -> dict[str, Reference]:
        sql = "SELECT refs.* FROM json_each(?) AS asked JOIN refs ON refs.id = asked.value"
        return {reference.id: reference for reference in self._read(sql, json.dumps(ids))}

    def exists(self, reference: Reference) -> bool:
        """Whether this version is current, or retired and not collected yet."""
        sql = "SELECT 1 FROM {} WHERE id = ? AND version = ? AND path = ?"
        name = self._name(reference)
        return any(self._catalog.one(sql.format(table), *name) for table in ("refs", "retired_refs"))

    def listing(self, after: str | None, limit: int, order: str, kind: str | None) -> list[Reference]:
        """At most ``limit`` references by age; ``order`` is ``asc`` or ``desc``, ``after`` an id that exists."""
        beyond = ">" if order == "asc" else "<"
        sql = f"""
            SELECT * FROM refs
            WHERE (:after IS NULL OR seq {beyond} (SELECT seq FROM refs WHERE id = :after))
            AND (:kind IS NULL OR kind = :kind)
            ORDER BY seq {order} LIMIT :limit"""
        return self._parse(self._catalog.read(sql, after=after, limit=limit, kind=kind))

    def pending(self) -> list[Reference]:
        """References that wait for compilation, oldest first."""
        return self._read("SELECT * FROM refs WHERE state = 'compiling' ORDER BY seq")

    def retired(self) -> list[Reference]:
        return self._read("SELECT * FROM retired_refs")

    def totals(self) -> tuple[int, int]:
        """Number of references and bytes of their originals."""
        return tuple(self._catalog.read("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM refs")[0])

    def paths(self) -> set[str]:
        """Where originals should lie, relative to the root."""
        rows = self._catalog.read("SELECT path FROM refs UNION ALL SELECT path FROM retired_refs")
        return {row["path"] for row in rows}

    def insert(self, reference: Reference, publish: Callable[[Sidecar], None]) -> Reference:
        """Commit a new reference; where an earlier one of its id has left a version or a vector, its versions go on
        from there.

        Args:
            publish: makes the original and this sidecar durable, before the row is committed.

        Raises:
            ReferenceExists.
        """
        with self._catalog.write() as db:
            if db.execute("SELECT 1 FROM refs WHERE id = ?", (reference.id,)).fetchone():
                raise ReferenceExists(f"there is a reference {reference.id!r}; replace it", param="id")
            sql = """
                SELECT MAX(version) AS last FROM (
                    SELECT version FROM retired_refs WHERE id = :id UNION ALL SELECT version FROM vectors
                    WHERE embedder IN (SELECT id FROM embedders) AND reference = :id)"""
            last = db.execute(sql, {"id": reference.id}).fetchone()["last"]
            if last is not None:
                reference = replace(reference, version=last + 1)
            values = self._values(reference)
            insert_row(db, "refs", values)
            publish(of_reference(values))
            return reference

    def replace(
        self,
        reference_id: str,
        make: Callable[[Reference], Reference],
        publish: Callable[[Sidecar], None],
    ) -> tuple[Reference, Reference] | None:
        """Commit a new version in place of the current one, which is retired: both, or None when there is none.

        Args:
            make: the new version from the current one, whose number it need not change. Within the transaction, so
                that what it takes over is not older than what it replaces.
            publish: as for ``insert``.
        """
        with self._catalog.write() as db:
            rows = db.execute("SELECT * FROM refs WHERE id = ?", (reference_id,)).fetchall()
            if not rows:
                return None
            (current,) = self._parse(rows)
            new = replace(make(current), version=current.version + 1)
            self._retire(db, reference_id, current.version)
            values = self._values(new)
            changes = ", ".join(f"{column} = :{column}" for column in values)
            db.execute(f"UPDATE refs SET {changes} WHERE id = :id", values)
            publish(of_reference(values))
            return new, current

    def remove(self, db: Connection, reference: Reference) -> bool:
        """Within a transaction: retire a reference that has no successor; False when it is gone or changed."""
        if not self._retire(db, reference.id, reference.version):
            return False
        db.execute("DELETE FROM refs WHERE id = ?", (reference.id,))
        return True

    def collect(self, db: Connection, reference: Reference) -> bool:
        """Within a transaction: forget a retired version; False when that has happened."""
        sql = "DELETE FROM retired_refs WHERE id = ? AND version = ?"
        if db.execute(sql, (reference.id, reference.version)).rowcount == 0:
            return False
        self._catalog.bury(db, [self._name(reference)[2]], self._clock())
        return True

    def has_content(self, db: Connection, key: ChunkKey, retired: bool) -> bool:
        """Within a transaction: does a reference hold this content (or, with ``retired``, a version on its way out)?"""
        tables = ("refs", "retired_refs") if retired else ("refs",)
        sql = "SELECT 1 FROM {} WHERE digest = ? AND kind = ?"
        return any(db.execute(sql.format(table), (key.digest, key.kind)).fetchone() for table in tables)

    def set_state(self, reference: Reference, state: State, tokens: int | None, error: str | None) -> None:
        sql = (
            "UPDATE refs SET state = ?, tokens = COALESCE(?, tokens), error = ? "
            "WHERE id = ? AND version = ? AND path = ?"
        )
        with self._catalog.write() as db:
            db.execute(sql, (state, tokens, error, *self._name(reference)))

    def set_pin(self, reference_id: str, pinned: bool) -> bool:
        """False when there is none."""
        sql = "UPDATE refs SET pinned = ? WHERE id = ?"
        with self._catalog.write() as db:
            there = db.execute(sql, (pinned, reference_id)).rowcount > 0
            if there:
                self._sidecars.rewrite_reference(db, reference_id)
            return there

    def mark_lost(self, lost: Iterable[str], here: set[str]) -> None:
        """References whose originals are gone cannot be compiled any more; those whose originals are back can."""
        mark_lost(self._catalog, "refs", lost, here)

    def _retire(self, db: Connection, reference_id: str, version: int) -> bool:
        sql = f"INSERT INTO retired_refs ({COLUMNS}) SELECT {COLUMNS} FROM refs WHERE id = ? AND version = ?"
        return db.execute(sql, (reference_id, version)).rowcount > 0

    def _name(self, reference: Reference) -> tuple[str, int, str]:
        """A version for certain: id and number may come again after it is gone, its file does not."""
        return reference.id, reference.version, str(reference.path.relative_to(self._root))

    def _values(self, reference: Reference) -> dict[str, object]:
        values = {name: value for name, value in vars(reference).items() if name != "key"}
        return values | {
            "digest": reference.key.digest,
            "path": self._name(reference)[2],
            "metadata": dump_metadata(reference.metadata),
        }

    def _read(self, sql: str, *values: object) -> list[Reference]:
        return self._parse(self._catalog.read(sql, *values))

    def _parse(self, rows: Iterable[Row]) -> list[Reference]:
        references = []
        for values in map(dict, rows):
            values.pop("seq", None)
            values["key"] = ChunkKey(values["kind"], values.pop("digest"))
            values["path"] = self._root / values["path"]
            values["metadata"] = json.loads(values["metadata"])
            values["pinned"] = bool(values.get("pinned", False))
            references.append(Reference(**values))
        return references
