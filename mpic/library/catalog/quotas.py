"""The quotas of users. Every quota is checked here, within the transaction that stores something.

Two quotas bound the originals of a user, and the tighter one decides: the user's own (``Library.set_quota``) or,
without one, that of every user (``Limits.user_files``, ``user_bytes``); and that of the API key
(``mpic.keys.KeyLimits``). Compiled chunks are bounded by the first alone.
"""

from __future__ import annotations

from collections.abc import Callable
from sqlite3 import Row

from mpic.errors import StorageQuotaExceeded
from mpic.keys import KeyLimits
from mpic.library.limits import Limits

Read = Callable[..., list[Row]]
"""Reads rows: ``(sql, *values)``."""
NO_KEY = KeyLimits()
YOURS = "your quota"


def quota(read: Read, user: str, what: str, limits: Limits) -> int:
    """Return a user's own quota of ``files``, ``bytes`` (of originals) or ``disk`` (bytes of compiled chunks), or
    that of the limits when the user has none of its own; 0 means no quota."""
    own = _own(read, user, what)
    return getattr(limits, f"user_{what}" if what != "disk" else "user_disk_bytes") if own is None else own


def _own(read: Read, user: str, what: str) -> int | None:
    rows = read(f"SELECT quota_{what} FROM users WHERE id = ?", user)
    return rows[0][0] if rows else None


def check_originals(
    read: Read, user: str, files: int, size: int, limits: Limits, key: KeyLimits, now: float
) -> None:
    """Check that the user may store ``files`` more originals of ``size`` bytes in all. Expired files do not count.

    Raises:
        StorageQuotaExceeded: a quota of the user or the key would be exceeded.
    """
    quotas = {what: _tightest(read, user, what, limits, key) for what in ("files", "bytes")}
    if not any(most for most, _ in quotas.values()):
        return
    (held,) = read("SELECT count, bytes FROM usage WHERE owner = ? AND tier = 'original'", user) or [(0, 0)]
    wanted = {"files": files, "bytes": size}
    have = {"files": held[0], "bytes": held[1]}
    if not _exceeded(quotas, have, wanted):
        return
    sql = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ? AND expires_at <= ?"
    # this query reads every file of the user, so it is made only if there is a quota
    (gone,) = read(sql, user, now)
    have = {"files": held[0] - gone[0], "bytes": held[1] - gone[1]}
    what = _exceeded(quotas, have, wanted)
    if what is not None:
        most, whose = quotas[what]
        more = f" and would store {size} more" if what == "bytes" else ""
        configured = whose == YOURS and _own(read, user, what) is None
        by = f" (user_{what} in [library] of the server's configuration)" if configured else ""
        message = f"you have {have[what]} {what}{more}; {whose} is {most} {what}{by}. Delete something first"
        raise StorageQuotaExceeded(message, quota=most, limit=most, used=have[what])


def _exceeded(quotas: dict[str, tuple[int, str]], have: dict[str, int], wanted: dict[str, int]) -> str | None:
    """Return the quantity that would exceed a quota, ``files`` or ``bytes``."""
    return next((w for w, (most, _) in quotas.items() if most and have[w] + wanted[w] > most), None)


def _tightest(read: Read, user: str, what: str, limits: Limits, key: KeyLimits) -> tuple[int, str]:
    """Return the smallest quota (0: there is none) and the words that name its owner."""
    found = [(quota(read, user, what, limits), YOURS), (getattr(key, what) or 0, "your key's quota")]
    return min((one for one in found if one[0]), default=(0, ""))
