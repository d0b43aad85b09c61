"""The savings ledger: the tokens that reuse has saved, for each user and day, and the chunks that were reused.

It is a small SQLite file beside the catalogue. Answers are counted in memory and written together every few seconds
(``BackgroundJobs``), so no answer waits for the disk; a crash loses the counts since the last write. The time that a
token costs is fitted: over the answers of one model, the time to link is close to a constant plus a price for each
token computed. A straight line through them, in which older answers weigh less, gives that price.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpic.database import PATIENCE, translated

if TYPE_CHECKING:
    from mpic.engine.base import GenerationUsage

FILE = "savings.sqlite"
DAYS_KEPT = 400
CHUNKS_KEPT = 10_000
"""Chunks of a user whose uses are remembered; those used longest ago go first."""
MEMORY = 0.995
"""How much the answers before weigh when one is added: 200 answers count, about."""
FEWEST = 5.0
"""Answers that a fit needs."""
SPREAD = 0.1
"""Their numbers of computed tokens must differ by this much of their mean (standard deviation)."""
SCHEMA = """
    CREATE TABLE IF NOT EXISTS days (
        user TEXT NOT NULL, day TEXT NOT NULL, answers INTEGER NOT NULL, prompt INTEGER NOT NULL,
        saved INTEGER NOT NULL, PRIMARY KEY (user, day)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS chunks (
        user TEXT NOT NULL, key TEXT NOT NULL, uses INTEGER NOT NULL, saved INTEGER NOT NULL, last REAL NOT NULL,
        PRIMARY KEY (user, key)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS fits (
        model TEXT PRIMARY KEY, n REAL NOT NULL, x REAL NOT NULL, y REAL NOT NULL, xx REAL NOT NULL,
        xy REAL NOT NULL) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS begun (at REAL NOT NULL);
"""


class ChunkReuse(NamedTuple):
    """The reuse of a chunk: how often it was reused, how many tokens that saved, and when it was last reused (Unix
    time)."""

    uses: int
    saved: int
    last: float


class TimeFit(NamedTuple):
    """Sums over answers for the fit: x is the number of tokens computed, y the milliseconds that it took."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, tokens: float, ms: float) -> TimeFit:
        """Return the sums with one more answer."""
        new = (1.0, tokens, ms, tokens * tokens, tokens * ms)
        return TimeFit(*(MEMORY * old + value for old, value in zip(self, new, strict=True)))

    @property
    def slope(self) -> float | None:
        """Return the milliseconds of one more token; None if the answers do not determine it."""
        if self.n < FEWEST:
            return None
        mean = self.x / self.n
        variance = self.xx / self.n - mean * mean
        if variance < (SPREAD * mean) ** 2 or variance <= 0:
            return None
        slope = (self.xy / self.n - mean * self.y / self.n) / variance
        return slope if slope > 0 else None


class SavingsLedger:
    """See the module. Thread-safe.

    Args:
        folder: the library's folder.
        model: digest of the served model.
        clock: function that returns the Unix time.
    """

    def __init__(self, folder: Path, model: str, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / FILE
        self._model = model
        self._clock = clock
        self._counting = threading.Lock()
        self._writing = threading.Lock()
        self._days: Counter[tuple[str, str, str]] = Counter()
        self._chunks: dict[tuple[str, str], ChunkReuse] = {}
        self._answers: list[tuple[str, float, float]] = []

    def answered(self, user: str, usage: GenerationUsage, answers: int = 1) -> None:
        """Count the answers to a prompt that have ended, unless they ended before the first token. The prompt counts
        once for all of them."""
        if not usage.ttft_ms:
            return
        now = self._clock()
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        with self._counting:
            self._days[user, day, "answers"] += answers
            self._days[user, day, "prompt"] += usage.prompt_tokens
            self._days[user, day, "saved"] += usage.saved
            for chunk in usage.chunks:
                if chunk.reused and chunk.tier != "compiled":
                    old = self._chunks.get((user, chunk.key), ChunkReuse(0, 0, now))
                    self._chunks[user, chunk.key] = ChunkReuse(old.uses + 1, old.saved + chunk.reused, now)
            if usage.computed and usage.link_ms:
                self._answers.append((user, float(usage.computed), usage.link_ms))

    def flush(self) -> None:
        """Write the counts; after a failure they are kept for the next time. See ``translated`` for the errors."""
        with self._writing:
            with self._counting:
                days, chunks, answers = self._days, self._chunks, self._answers
                self._days, self._chunks, self._answers = Counter(), {}, []
            if not days:
                return
            try:
                with self._translated(), closing(self._open()) as db, db:
                    self._write(db, days, chunks, answers)
            except BaseException:
                self._take_back(days, chunks, answers)
                raise

    def days(self, user: str | None, since: str) -> list[tuple[str, int, int, int]]:
        """Return day, answers, prompt tokens and saved tokens of each day from ``since``, of one user or of all."""
        sql = """SELECT day, SUM(answers), SUM(prompt), SUM(saved) FROM days
                 WHERE (?1 IS NULL OR user = ?1) AND day >= ?2 GROUP BY day ORDER BY day"""
        return self._read(sql, user, since)

    def users(self, since: str) -> list[tuple[str, int, int, int]]:
        """Return user, answers, prompt tokens and saved tokens since a day, most saved first."""
        sql = """SELECT user, SUM(answers), SUM(prompt), SUM(saved) FROM days WHERE day >= ?
                 GROUP BY user ORDER BY 4 DESC, user"""
        return self._read(sql, since)

    def uses(self, user: str | None) -> dict[str, ChunkReuse]:
        """Return the reuse of each chunk by its key, for one user or for all."""
        sql = """SELECT key, SUM(uses), SUM(saved), MAX(last) FROM chunks WHERE (?1 IS NULL OR user = ?1)
                 GROUP BY key"""
        return {key: ChunkReuse(*values) for key, *values in self._read(sql, user)}

    def begun(self, user: str | None = None) -> float | None:
        """Return the Unix time since when answers are counted: of the first one of all, or of the day of the first one
        of a user that is still kept."""
        if user is None:
            sql, values = "SELECT at FROM begun LIMIT 1", ()
        else:
            sql, values = (
                "SELECT CAST(strftime('%s', MIN(day)) AS INTEGER) FROM days WHERE user = ? HAVING COUNT(*)",
                (user,),
            )
        rows = self._read(sql, *values)
        return rows[0][0] if rows else None

    def ms_per_token(self, user: str | None = None) -> float | None:
        """Return the milliseconds that one more computed token takes in the answers of a user, or of all; None if that
        is not known yet."""
        rows = self._read("SELECT n, x, y, xx, xy FROM fits WHERE model = ?", self._fit_of(user))
        return TimeFit(*rows[0]).slope if rows else None

    def _write(
        self,
        db: sqlite3.Connection,
        days: Counter[tuple[str, str, str]],
        chunks: dict[tuple[str, str], ChunkReuse],
        answers: Iterable[tuple[str, float, float]],
    ) -> None:
        now = self._clock()
        db.execute("INSERT INTO begun SELECT ? WHERE NOT EXISTS (SELECT 1 FROM begun)", (now,))
        for user, day in {key[:2] for key in days}:
            values = [days[user, day, name] for name in ("answers", "prompt", "saved")]
            db.execute(
                """INSERT INTO days VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET answers = answers +
                   excluded.answers, prompt = prompt + excluded.prompt, saved = saved + excluded.saved""",
                (user, day, *values),
            )
        db.executemany(
            """INSERT INTO chunks VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET uses = uses + excluded.uses,
               saved = saved + excluded.saved, last = excluded.last""",
            [(*key, *uses) for key, uses in chunks.items()],
        )
        for user in {user for user, _ in chunks}:
            db.execute(
                """DELETE FROM chunks WHERE user = ?1 AND key NOT IN (
                   SELECT key FROM chunks WHERE user = ?1 ORDER BY last DESC LIMIT ?2)""",
                (user, CHUNKS_KEPT),
            )
        oldest = time.strftime("%Y-%m-%d", time.gmtime(now - DAYS_KEPT * 86_400))
        db.execute("DELETE FROM days WHERE day < ?", (oldest,))
        for owner in {None, *(user for user, _, _ in answers)}:
            name = self._fit_of(owner)
            row = db.execute("SELECT n, x, y, xx, xy FROM fits WHERE model = ?", (name,)).fetchone()
            fit = TimeFit(*row) if row else TimeFit()
            for user, tokens, ms in answers:
                if owner in (None, user):
                    fit = fit.add(tokens, ms)
            db.execute("INSERT OR REPLACE INTO fits VALUES (?, ?, ?, ?, ?, ?)", (name, *fit))

    def _fit_of(self, user: str | None) -> str:
        """Return the name of a fit: the model's for all users, as earlier versions had it, or of one user."""
        return self._model if user is None else f"{self._model} {user}"

    def _take_back(
        self,
        days: Counter[tuple[str, str, str]],
        chunks: dict[tuple[str, str], ChunkReuse],
        answers: list[tuple[str, float, float]],
    ) -> None:
        with self._counting:
            self._days += days
            for key, old in chunks.items():
                new = self._chunks.get(key, ChunkReuse(0, 0, old.last))
                self._chunks[key] = ChunkReuse(old.uses + new.uses, old.saved + new.saved, new.last)
            self._answers = (answers + self._answers)[-1000:]

    def _read(self, sql: str, *values: object) -> list[tuple]:
        """Return the rows of a query, with everything counted so far."""
        self.flush()
        if not self.path.is_file():
            return []
        with self._translated(), closing(self._open()) as db:
            return db.execute(sql, values).fetchall()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=PATIENCE)
        self.path.chmod(0o600)
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(SCHEMA)
        return db

    def _translated(self) -> AbstractContextManager[None]:
        return translated("the savings ledger", f"remove {FILE}; only what reuse has saved is forgotten")
