"""The schema of the catalogue, as a list of steps in order. Steps are only ever added."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from mpic.library.records import SHARED

Migration = Callable[[sqlite3.Connection], None]
MIGRATIONS: list[Migration] = []


def migration(step: Migration) -> Migration:
    """Registers a step. Steps run once, in the order of this file, each in its own transaction."""
    MIGRATIONS.append(step)
    return step


@migration
def m001_users_files_chunks(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE users (id TEXT PRIMARY KEY, created_at REAL NOT NULL) WITHOUT ROWID")
    db.execute("""
        CREATE TABLE files (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL REFERENCES users (id),
            handle TEXT,                 -- as given; unique per owner ignoring case, see below
            kind TEXT NOT NULL CHECK (kind IN ('image', 'text')),
            filename TEXT NOT NULL,
            path TEXT NOT NULL,          -- of the original, relative to the library's root
            bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL,        -- of the original's bytes
            digest TEXT NOT NULL,        -- of the decoded content (ChunkKey.digest)
            created_at REAL NOT NULL,
            expires_at REAL,
            tokens INTEGER,
            state TEXT NOT NULL CHECK (state IN ('compiling', 'ready', 'failed')),
            error TEXT
        )""")
    db.execute(
        "CREATE UNIQUE INDEX files_handle ON files (owner, handle COLLATE NOCASE) WHERE handle IS NOT NULL"
    )
    db.execute("CREATE INDEX files_content ON files (owner, digest)")
    db.execute("CREATE INDEX files_expiry ON files (expires_at) WHERE expires_at IS NOT NULL")
    db.execute("""
        CREATE TABLE chunks (
            key TEXT PRIMARY KEY,        -- KVKey.digest
            owner TEXT NOT NULL REFERENCES users (id),
            kind TEXT NOT NULL,
            digest TEXT NOT NULL,
            model TEXT NOT NULL,
            recipe TEXT NOT NULL,        -- JSON of the recipe's fields
            path TEXT NOT NULL,          -- relative to the library's root
            bytes INTEGER NOT NULL,
            tokens INTEGER NOT NULL,
            tier TEXT NOT NULL DEFAULT 'disk',
            state TEXT NOT NULL CHECK (state IN ('ready', 'evicted', 'expired', 'corrupt', 'missing')),
            created_at REAL NOT NULL,
            last_used REAL NOT NULL
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX chunks_content ON chunks (owner, kind, digest)")
    db.execute("CREATE INDEX chunks_use ON chunks (tier, state, last_used, bytes)")


@migration
def m002_references_and_metadata(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE files ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}'")  # JSON object of scalars
    columns = """
            id TEXT NOT NULL,
            version INTEGER NOT NULL,
            kind TEXT NOT NULL CHECK (kind IN ('image', 'text')),
            title TEXT NOT NULL,
            description TEXT NOT NULL,
            metadata TEXT NOT NULL,      -- JSON object of scalars
            filename TEXT NOT NULL,
            path TEXT NOT NULL,          -- of the original, relative to the library's root
            bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL,
            digest TEXT NOT NULL,        -- of the decoded content (ChunkKey.digest)
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            tokens INTEGER,
            state TEXT NOT NULL CHECK (state IN ('compiling', 'ready', 'failed')),
            error TEXT"""
    db.execute(f"CREATE TABLE refs (seq INTEGER PRIMARY KEY AUTOINCREMENT, {columns}, UNIQUE (id))")
    db.execute("CREATE INDEX refs_content ON refs (digest)")
    # versions that were replaced or removed and that a running request may still link
    db.execute(f"CREATE TABLE retired_refs ({columns}, PRIMARY KEY (id, version)) WITHOUT ROWID")
    db.execute("CREATE INDEX retired_refs_content ON retired_refs (digest)")


@migration
def m003_quotas_pins_usage(db: sqlite3.Connection) -> None:
    for quota in ("files", "bytes", "disk"):  # NULL: the quota of the limits; 0: no quota
        db.execute(f"ALTER TABLE users ADD COLUMN quota_{quota} INTEGER")
    for table in ("files", "refs"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE chunks ADD COLUMN why TEXT")  # the reason for an eviction: quota, budget, share
    db.execute("DROP INDEX chunks_use")
    db.execute("CREATE INDEX chunks_turn ON chunks (owner, tier, state, last_used)")
    # the usage of each owner per tier, kept by triggers so that no query adds up all rows
    db.execute("""
        CREATE TABLE usage (
            owner TEXT NOT NULL,
            tier TEXT NOT NULL,          -- original, disk
            count INTEGER NOT NULL,
            bytes INTEGER NOT NULL,
            PRIMARY KEY (owner, tier)
        ) WITHOUT ROWID""")
    sources = {
        "files": ("{row}.owner", "'original'", "1"),
        "refs": (f"'{SHARED}'", "'original'", "1"),
        "chunks": ("{row}.owner", "{row}.tier", "{row}.state = 'ready'"),
    }
    for table, (owner, tier, counts) in sources.items():
        add = (
            f"INSERT INTO usage SELECT {owner}, {tier}, {{sign}}1, {{sign}}{{row}}.bytes WHERE {counts} "
            "ON CONFLICT DO UPDATE SET count = count + excluded.count, bytes = bytes + excluded.bytes"
        )
        gain, loss = (
            add.replace("{row}", row).replace("{sign}", sign) for row, sign in (("new", ""), ("old", "-"))
        )
        change = "UPDATE OF state, bytes" if table == "chunks" else "UPDATE OF bytes"
        for name, event, does in (
            ("more", "INSERT", gain),
            ("less", "DELETE", loss),
            ("other", change, f"{loss}; {gain}"),
        ):
            db.execute(f"CREATE TRIGGER {table}_{name} AFTER {event} ON {table} BEGIN {does}; END")
        row = owner.replace("{row}", table), tier.replace("{row}", table), counts.replace("{row}", table)
        db.execute(
            f"INSERT INTO usage SELECT {row[0]} AS o, {row[1]} AS t, COUNT(*), SUM(bytes) FROM {table} "
            f"WHERE {row[2]} GROUP BY o, t HAVING COUNT(*) > 0 "
            "ON CONFLICT DO UPDATE SET count = count + excluded.count, bytes = bytes + excluded.bytes"
        )


@migration
def m004_caches(db: sqlite3.Connection) -> None:
    """Adds caches. The chunks of a cache are files (id ``cache-...``) that listings of files leave out; ``start`` and
    ``end`` are characters of the text that they were cut from."""
    db.execute("""
        CREATE TABLE caches (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL REFERENCES users (id),
            name TEXT NOT NULL,
            split TEXT,                  -- JSON of how it was cut
            created_at REAL NOT NULL,
            expires_at REAL
        )""")
    db.execute("""
        CREATE TABLE cache_chunks (
            id TEXT PRIMARY KEY REFERENCES files (id) ON DELETE CASCADE,
            cache TEXT NOT NULL REFERENCES caches (id),
            position INTEGER NOT NULL,
            start INTEGER NOT NULL,
            "end" INTEGER NOT NULL
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX cache_chunks_cache ON cache_chunks (cache, position)")


@migration
def m005_vectors(db: sqlite3.Connection) -> None:
    db.execute("""
        CREATE TABLE embedders (
            id INTEGER PRIMARY KEY,
            architecture TEXT NOT NULL,
            weights TEXT NOT NULL,       -- SHA-256
            dimension INTEGER NOT NULL,
            revision INTEGER NOT NULL DEFAULT 0, -- of the vectors; an index of another revision is stale
            UNIQUE (architecture, weights, dimension)
        )""")
    db.execute("""
        CREATE TABLE vectors (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            embedder INTEGER NOT NULL REFERENCES embedders (id),
            reference TEXT NOT NULL,     -- refs.id; a row may outlive it until the retriever hears of the removal
            version INTEGER NOT NULL,
            vector BLOB NOT NULL,        -- little-endian fp32, of length 1
            UNIQUE (embedder, reference)
        )""")


@migration
def m006_order_of_listings(db: sqlite3.Connection) -> None:
    db.execute("CREATE INDEX files_age ON files (owner)")  # within an owner, rows come in the order of seq
    db.execute("CREATE INDEX files_pending ON files (seq) WHERE state = 'compiling'")


@migration
def m007_identity_and_deletions(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE library (id TEXT NOT NULL)")  # one row: the id in the folder's marker
    db.execute("""
        CREATE TABLE deleted (
            path TEXT PRIMARY KEY,       -- of a file whose row was deleted, relative to the library's root
            at REAL NOT NULL
        ) WITHOUT ROWID""")


@migration
def m008_pieces_of_files(db: sqlite3.Connection) -> None:
    """Adds documents that are cut: ``split`` says how, and NULL means that a file is one chunk. Their pieces are
    computed from the text when they are first needed; ``start`` and ``end`` are characters of it."""
    db.execute("ALTER TABLE files ADD COLUMN split TEXT")
    db.execute("""
        CREATE TABLE pieces (
            file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            start INTEGER NOT NULL,
            "end" INTEGER NOT NULL,
            digest TEXT NOT NULL,        -- of the piece (ChunkKey.digest)
            PRIMARY KEY (file, position)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX pieces_content ON pieces (digest)")
    # every content that a file stands for, as a whole or in pieces; looked up by content, hence the order of the join
    db.execute("""
        CREATE VIEW contents AS
        SELECT id, owner, kind, digest, pinned FROM files
        UNION ALL
        SELECT files.id, files.owner, files.kind, pieces.digest, files.pinned
        FROM pieces CROSS JOIN files ON files.id = pieces.file""")


@migration
def m009_presses_of_files(db: sqlite3.Connection) -> None:
    """Adds files whose upload said how they are compressed: ``press`` names it, empty where nothing was said."""
    db.execute("ALTER TABLE files ADD COLUMN press TEXT NOT NULL DEFAULT ''")


@migration
def m010_clips(db: sqlite3.Connection) -> None:
    """Lets a file be a clip. The check of a column cannot be changed, so the column is made anew; the view, which has
    it, too. (To drop the table would delete what refers to it.)"""
    [view] = db.execute("SELECT sql FROM sqlite_schema WHERE type = 'view' AND name = 'contents'").fetchone()
    db.execute("DROP VIEW contents")
    db.execute("ALTER TABLE files RENAME COLUMN kind TO first_kind")
    db.execute(
        "ALTER TABLE files ADD COLUMN kind TEXT NOT NULL DEFAULT 'text' CHECK (kind IN ('image', 'text', 'video'))"
    )
    db.execute("UPDATE files SET kind = first_kind")
    db.execute("ALTER TABLE files DROP COLUMN first_kind")
    db.execute(view)


@migration
def m011_listings_of_uploads(db: sqlite3.Connection) -> None:
    """Lets a listing of files pass over the chunks of caches, of which a user may have thousands."""
    db.execute("CREATE INDEX files_uploads ON files (owner) WHERE id NOT GLOB 'cache-*'")
