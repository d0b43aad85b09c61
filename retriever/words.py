"""The words of references: a full-text index in SQLite (FTS5, ranked by its BM25). Like the index of vectors it is a
cache."""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpic.database import translated
from mpic.durable import FileSystem

NAME = "the index of the references' words"
ADVICE = "stop the server and delete the folder's index/*.words; the next start makes it anew"
MOST_WORDS = 32
"""Maximum words of a query that are searched for; later words are ignored."""
UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Letters of scripts that put no space between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese. Each letter is a
word of the index, and a query searches for every pair of adjacent letters."""
TABLE = """CREATE VIRTUAL TABLE IF NOT EXISTS words
    USING fts5(text, tokenize = "unicode61 remove_diacritics 2 categories 'L* N* M* Co'")"""


class Neighbour(NamedTuple):
    """A vector or text that was found: its id, and how well it matches the query."""

    id: int
    score: float


class Words:
    """Texts by id, in a file. One thread changes them, any thread may search.

    Args:
        path: path of the file, in a folder that exists. A damaged one is replaced by an empty one.

    Raises:
        MPICError: see ``translated``.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._files = path, FileSystem()
        with translated(NAME, ADVICE):
            try:
                self._db = self._opened()
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (
                    sqlite3.SQLITE_CORRUPT,
                    sqlite3.SQLITE_NOTADB,
                ):
                    raise
                for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
                    name.unlink(missing_ok=True)
                self._db = self._opened()

    def ids(self) -> set[int]:
        with translated(NAME, ADVICE):
            return {id for (id,) in self._db.execute("SELECT rowid FROM words")}

    def put(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add the texts of new ids."""
        rows = [(id, _normal(re.sub(UNSPACED, r" \g<0> ", text))) for id, text in texts]
        self._change("INSERT INTO words (rowid, text) VALUES (?, ?)", rows)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove texts; ids without a text are ignored."""
        self._change("DELETE FROM words WHERE rowid = ?", [(id,) for id in ids])

    def search(self, text: str, most: int, among: np.ndarray | None = None) -> list[Neighbour]:
        """Return at most ``most`` texts that have a word of the query, best first, with their BM25, above 0.

        Args:
            text: any text; nothing in it is an operator.
            among: ids that may be found; None for all.
        """
        wanted = query(text)
        if not wanted:
            return []
        ids = None if among is None else json.dumps(among.tolist())
        sql = (
            "SELECT rowid, -rank FROM words WHERE words MATCH ?1 "
            "AND (?2 IS NULL OR rowid IN (SELECT value FROM json_each(?2))) ORDER BY rank LIMIT ?3"
        )
        with translated(NAME, ADVICE), closing(self._files.database(self._path)) as db:
            return [Neighbour(id, score) for id, score in db.execute(sql, (wanted, ids, most))]

    def close(self) -> None:
        self._db.close()

    def _opened(self) -> sqlite3.Connection:
        db = self._files.database(self._path, create=True)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(TABLE)
            db.execute("SELECT rowid FROM words LIMIT 1").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    def _change(self, sql: str, rows: Sequence[tuple]) -> None:
        with translated(NAME, ADVICE), self._db:  # one transaction
            self._db.execute("BEGIN")
            self._db.executemany(sql, rows)


def available() -> bool:
    """Return whether this Python's SQLite has FTS5."""
    with closing(sqlite3.connect(":memory:")) as db:
        try:
            db.execute(TABLE)
        except sqlite3.OperationalError:
            return False
    return True


def query(text: str) -> str:
    """Return the FTS5 query for any of the words of a text; empty if it has none. The query contains only letters,
    digits and marks of the text, with each word in quotes, so that nothing in it is an operator."""
    plain = "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in _normal(text))
    words: dict[str, None] = {}
    for run in re.findall(rf"{UNSPACED}+|(?:(?!{UNSPACED})\S)+", plain):
        pairs = len(run) > 1 and re.match(UNSPACED, run)
        words |= dict.fromkeys(map(" ".join, pairwise(run)) if pairs else [run])
        if len(words) >= MOST_WORDS:
            break
    return " OR ".join(f'"{word}"' for word in list(words)[:MOST_WORDS])


def _normal(text: str) -> str:
    """Return a text in which every letter has a single form, so that for example full-width letters match ordinary
    ones."""
    return unicodedata.normalize("NFKC", text)
