"""Whose chunk goes when a tier is full. One rule for every tier with a byte budget (disk, host memory).

Every user who stores anything is guaranteed a share of the budget. Within it a user loses chunks only to uploads of
its own, least recently used first; nobody else can push it below. What a user holds beyond its share, because others
left it unused, is lent: it goes, least recently used first, when a user below its own share needs room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

from mpic.errors import StorageFull, StorageQuotaExceeded
from mpic.library.records import SHARED

Why = Literal["quota", "budget", "share"]
"""Why a chunk was evicted: its owner's quota, its owner's newer chunks, or another user's guaranteed share."""


class Held(NamedTuple):
    """A chunk that could be evicted: its key in the tier, its bytes, whether its owner pinned it."""

    key: object
    bytes: int
    pinned: bool


H = TypeVar("H", bound=Held)
Turns = Callable[[str], Iterable[H]]


class Rules(NamedTuple):
    """Bounds of a tier.

    Args:
        budget: bytes of the tier.
        quota: most bytes of one user; 0: none but the budget. The dynamic library has none.
        shared: part of the budget that the dynamic library is guaranteed while it stores anything, 0 to 1.
    """

    budget: int
    quota: int = 0
    shared: float = 0.5

    def share(self, owner: str, used: Mapping[str, int]) -> float:
        """Bytes an owner is guaranteed when these owners use the tier."""
        shared = self.budget * self.shared if used.get(SHARED) else 0.0
        if owner == SHARED:
            return shared
        users = {name for name, size in used.items() if size and name != SHARED} | {owner}
        return (self.budget - shared) / len(users)


def make_room(
    rules: Rules, used: Mapping[str, int], saver: str, size: int, turns: Turns
) -> list[tuple[H, Why]]:
    """What must go so that ``saver`` can store ``size`` bytes.

    Args:
        used: bytes by owner, those being written included.
        turns: an owner's chunks, least recently used first.

    Raises:
        StorageQuotaExceeded: the user's quota is smaller, or all it holds is pinned.
        StorageFull: the budget is, or nothing may go in favour of this user.
    """
    return _Room(rules, used, saver, size, turns).make()


class _Room:
    def __init__(self, rules: Rules, used: Mapping[str, int], saver: str, size: int, turns: Turns) -> None:
        self.rules, self.saver, self.size, self.turns = rules, saver, size, turns
        self.used = dict(used)
        self.used[saver] = self.used.get(saver, 0) + size
        self.gone: list[tuple[H, Why]] = []
        self._turns: dict[str, Iterator[H]] = {}
        self._passed: dict[str, list[H]] = {}  # looked at and left, by owner, least recently used first

    def make(self) -> list[tuple[H, Why]]:
        quota = self.rules.quota if self.saver != SHARED else 0
        while quota and self.used[self.saver] > quota:
            if not self._take(self.saver, "quota"):
                raise StorageQuotaExceeded(
                    f"a chunk of {self.size} bytes does not fit your quota of {quota} bytes of compiled chunks",
                    quota=quota,
                )
        while sum(self.used.values()) > self.rules.budget:
            if not self._from_others() and not self._take(self.saver, "budget"):
                raise StorageFull(
                    f"a chunk of {self.size} bytes does not fit the tier's {self.rules.budget}: the rest is pinned or "
                    "guaranteed to others",
                    budget=self.rules.budget,
                )
        return self.gone

    def _over(self, owner: str) -> float:
        return self.used[owner] - self.rules.share(owner, self.used)

    def _from_others(self) -> bool:
        """Take back what another owner was lent, if the saver is within its own share."""
        if self._over(self.saver) > 0:
            return False
        others = sorted((o for o in self.used if o != self.saver), key=self._over, reverse=True)
        return any(
            self._take(owner, "share", self._over(owner), pinned)
            for owner in others
            for pinned in (False, True)
        )

    def _take(self, owner: str, why: Why, at_most: float | None = None, pinned: bool = False) -> bool:
        """Evict one chunk of this owner, of at most so many bytes; False when there is none."""
        passed = self._passed.setdefault(owner, [])
        turn = self._turns.setdefault(owner, iter(self.turns(owner)))
        for chunk in list(passed):
            if self._fits(chunk, at_most, pinned):
                passed.remove(chunk)
                return self._evict(owner, chunk, why)
        for chunk in turn:
            if self._fits(chunk, at_most, pinned):
                return self._evict(owner, chunk, why)
            passed.append(chunk)
        return False

    def _fits(self, chunk: H, at_most: float | None, pinned: bool) -> bool:
        return chunk.pinned == pinned and (at_most is None or chunk.bytes <= at_most)

    def _evict(self, owner: str, chunk: H, why: Why) -> bool:
        self.used[owner] -= chunk.bytes
        self.gone.append((chunk, why))
        return True
