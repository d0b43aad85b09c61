"""The schema of the catalogue: that of version 0.1.0, and the steps that have changed it since, one for each release. A
release may fold those that every catalogue of the last two versions has taken into ``SCHEMA``."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from mpic.library.records import SHARED

SCHEMA = """
CREATE TABLE library (id TEXT NOT NULL)  -- one row: the id in the folder's marker

CREATE TABLE users (
    id TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    quota_files INTEGER,         -- NULL: the quota of the limits; 0: no quota
    quota_bytes INTEGER,
    quota_disk INTEGER
) WITHOUT ROWID

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
    error TEXT,
    metadata TEXT NOT NULL DEFAULT '{}',  -- JSON object of scalars
    pinned INTEGER NOT NULL DEFAULT 0
)

CREATE UNIQUE INDEX files_handle ON files (owner, handle COLLATE NOCASE) WHERE handle IS NOT NULL

CREATE INDEX files_content ON files (owner, digest)

CREATE INDEX files_expiry ON files (expires_at) WHERE expires_at IS NOT NULL

CREATE INDEX files_age ON files (owner)  -- within an owner, rows come in the order of seq

CREATE INDEX files_pending ON files (seq) WHERE state = 'compiling'

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
    last_used REAL NOT NULL,
    why TEXT                     -- the reason for an eviction: quota, budget, share
) WITHOUT ROWID

CREATE INDEX chunks_content ON chunks (owner, kind, digest)

CREATE INDEX chunks_turn ON chunks (owner, tier, state, last_used)

CREATE TABLE refs (seq INTEGER PRIMARY KEY AUTOINCREMENT, {reference}, pinned INTEGER NOT NULL DEFAULT 0, UNIQUE (id))

CREATE INDEX refs_content ON refs (digest)

-- versions that were replaced or removed and that a running request may still link
CREATE TABLE retired_refs ({reference}, PRIMARY KEY (id, version)) WITHOUT ROWID

CREATE INDEX retired_refs_content ON retired_refs (digest)

-- The chunks of a cache are files (id cache-...) that listings of files leave out.
CREATE TABLE caches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    split TEXT,                  -- JSON of how it was cut
    created_at REAL NOT NULL,
    expires_at REAL
)

CREATE TABLE cache_chunks (
    id TEXT PRIMARY KEY REFERENCES files (id) ON DELETE CASCADE,
    cache TEXT NOT NULL REFERENCES caches (id),
    position INTEGER NOT NULL,
    start INTEGER NOT NULL,      -- characters of the text that it was cut from
    "end" INTEGER NOT NULL
) WITHOUT ROWID

CREATE INDEX cache_chunks_cache ON cache_chunks (cache, position)

CREATE TABLE embedders (
    id INTEGER PRIMARY KEY,
    architecture TEXT NOT NULL,
    weights TEXT NOT NULL,       -- SHA-256
    dimension INTEGER NOT NULL,
    revision INTEGER NOT NULL DEFAULT 0, -- of the vectors; an index of another revision is stale
    UNIQUE (architecture, weights, dimension)
)

CREATE TABLE vectors (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    embedder INTEGER NOT NULL REFERENCES embedders (id),
    reference TEXT NOT NULL,     -- refs.id; a row may outlive it until the retriever hears of the removal
    version INTEGER NOT NULL,
    vector BLOB NOT NULL,        -- little-endian fp32, of length 1
    UNIQUE (embedder, reference)
)

CREATE TABLE deleted (
    path TEXT PRIMARY KEY,       -- of a file whose row was deleted, relative to the library's root
    at REAL NOT NULL
) WITHOUT ROWID

-- the usage of each owner per tier, kept by triggers so that no query adds up all rows
CREATE TABLE usage (
    owner TEXT NOT NULL,
    tier TEXT NOT NULL,          -- original, disk
    count INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (owner, tier)
) WITHOUT ROWID
"""
REFERENCE = """
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

CHANGES_OF_0_2_0 = """
ALTER TABLE files RENAME COLUMN kind TO first_kind

-- a file may be a clip; the check of a column cannot be changed, so the column is made anew
ALTER TABLE files ADD COLUMN kind TEXT NOT NULL DEFAULT 'text' CHECK (kind IN ('image', 'text', 'video'))

UPDATE files SET kind = first_kind

ALTER TABLE files DROP COLUMN first_kind

-- JSON of how a document is cut; NULL: it is one chunk
ALTER TABLE files ADD COLUMN split TEXT

-- empty: the upload did not say how it is compressed
ALTER TABLE files ADD COLUMN press TEXT NOT NULL DEFAULT ''

ALTER TABLE files ADD COLUMN pages INTEGER

-- NULL: its chunks are kept unused as the limits say
ALTER TABLE files ADD COLUMN kv_ttl INTEGER

-- an encoding, or a kind of document; empty: UTF-8, or no text
ALTER TABLE files ADD COLUMN format TEXT NOT NULL DEFAULT ''

ALTER TABLE refs ADD COLUMN format TEXT NOT NULL DEFAULT ''

ALTER TABLE retired_refs ADD COLUMN format TEXT NOT NULL DEFAULT ''

ALTER TABLE refs ADD COLUMN expires_at REAL

-- empty: no sync has added it
ALTER TABLE refs ADD COLUMN synced_from TEXT NOT NULL DEFAULT ''

CREATE INDEX refs_expiry ON refs (expires_at) WHERE expires_at IS NOT NULL

CREATE INDEX files_kv_ttl ON files (kv_ttl) WHERE kv_ttl IS NOT NULL

-- a listing of files passes over the chunks of caches, of which a user may have thousands
CREATE INDEX files_uploads ON files (owner) WHERE id NOT GLOB 'cache-*'

-- of documents that are cut, computed from the text when they are first needed
CREATE TABLE pieces (
    file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    start INTEGER NOT NULL,      -- characters of the text
    "end" INTEGER NOT NULL,
    digest TEXT NOT NULL,        -- of the piece (ChunkKey.digest)
    page INTEGER,
    PRIMARY KEY (file, position)
) WITHOUT ROWID

CREATE INDEX pieces_content ON pieces (digest)

-- every content that a file stands for, as a whole or in pieces; looked up by content, hence the order of the join
CREATE VIEW contents AS
    SELECT id, owner, kind, digest, pinned, kv_ttl FROM files
    UNION ALL
    SELECT files.id, files.owner, files.kind, pieces.digest, files.pinned, files.kv_ttl
    FROM pieces CROSS JOIN files ON files.id = pieces.file
"""


def make_schema(db: sqlite3.Connection) -> None:
    for statement in SCHEMA.replace("{reference}", REFERENCE).split("\n\n"):
        db.execute(statement)
    for table, owner, counts in (
        ("files", "{row}.owner, 'original'", "1"),
        ("refs", f"'{SHARED}', 'original'", "1"),
        ("chunks", "{row}.owner, {row}.tier", "{row}.state = 'ready'"),
    ):
        add = (
            f"INSERT INTO usage SELECT {owner}, {{sign}}1, {{sign}}{{row}}.bytes WHERE {counts} "
            "ON CONFLICT DO UPDATE SET count = count + excluded.count, bytes = bytes + excluded.bytes"
        )
        gain, loss = (
            add.replace("{row}", row).replace("{sign}", sign) for row, sign in (("new", ""), ("old", "-"))
        )
        change = "UPDATE OF state, bytes" if table == "chunks" else "UPDATE OF bytes"
        does = {"more": ("INSERT", gain), "less": ("DELETE", loss), "other": (change, f"{loss}; {gain}")}
        for name, (event, then) in does.items():
            db.execute(f"CREATE TRIGGER {table}_{name} AFTER {event} ON {table} BEGIN {then}; END")


def change_to_0_2_0(db: sqlite3.Connection) -> None:
    for statement in CHANGES_OF_0_2_0.split("\n\n"):
        db.execute(statement)


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], object]] = {7: make_schema, 14: change_to_0_2_0}
"""Steps by the version that a catalogue has after them. Each runs once, in a transaction of its own."""
