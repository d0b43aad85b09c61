"""Shares decide whose chunks are evicted when a tier is full. The rules are the same for every tier with a byte budget
(disk, host memory).

Every user who stores anything is guaranteed a share of the budget. Within its share, a user loses chunks only to newer
chunks of its own, least recently used first. Bytes beyond the share, which others left unused, are lent: these chunks
are evicted, least recently used first, when a user below its own share needs room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

from mpic.errors import StorageFull, StorageQuotaExceeded
from mpic.library.records import SHARED

Why = Literal["quota", "budget", "share"]
"""Why a chunk was evicted: its owner's quota, its owner's newer chunks, or another user's guaranteed share."""


class Held(NamedTuple):
    """A chunk that could be evicted: its key in the tier, its bytes, and whether its owner pinned it."""

    key: object
    bytes: int
    pinned: bool


H = TypeVar("H", bound=Held)
Candidates = Callable[[str], Iterable[H]]


class TierBounds(NamedTuple):
    """Bounds of a tier.

    Args:
        budget: bytes of the tier.
        quota: maximum number of bytes of one user; 0: only the budget counts. References have no quota.
        shared: part of the budget, 0 to 1, that is guaranteed to references while any are stored.
    """

    budget: int
    quota: int = 0
    shared: float = 0.5

    def share(self, owner: str, used: Mapping[str, int]) -> float:
        """Returns the bytes that an owner is guaranteed, given the bytes that each owner uses."""
        shared = self.budget * self.shared if used.get(SHARED) else 0.0
        if owner == SHARED:
            return shared
        users = {name for name, size in used.items() if size and name != SHARED} | {owner}
        return (self.budget - shared) / len(users)


def make_room(
    bounds: TierBounds, used: Mapping[str, int], saver: str, size: int, candidates: Candidates
) -> list[tuple[H, Why]]:
    """Chooses the chunks to evict so that ``saver`` can store ``size`` bytes.

    Args:
        used: bytes by owner, including those being written.
        candidates: function that returns an owner's chunks, least recently used first.

    Raises:
        StorageQuotaExceeded: the user's quota is smaller than ``size``, or all its chunks are pinned.
        StorageFull: the budget is smaller than ``size``, or nothing may be evicted for this user.
    """
    return _Eviction(bounds, used, saver, size, candidates).make()


class _Eviction:
    def __init__(
        self, bounds: TierBounds, used: Mapping[str, int], saver: str, size: int, candidates: Candidates
    ) -> None:
        self.bounds, self.saver, self.size, self.candidates = bounds, saver, size, candidates
        self.used = dict(used)
        self.used[saver] = self.used.get(saver, 0) + size
        self.gone: list[tuple[H, Why]] = []
        self._remaining: dict[str, Iterator[H]] = {}
        self._passed: dict[str, list[H]] = {}  # chunks passed over, by owner, least recently used first

    def make(self) -> list[tuple[H, Why]]:
        quota = self.bounds.quota if self.saver != SHARED else 0
        while quota and self.used[self.saver] > quota:
            if not self._take(self.saver, "quota"):
                raise StorageQuotaExceeded(
                    f"a chunk of {self.size} bytes does not fit your quota of {quota} bytes of compiled chunks",
                    quota=quota,
                )
        while sum(self.used.values()) > self.bounds.budget:
            if not self._from_others() and not self._take(self.saver, "budget"):
                raise StorageFull(
                    f"a chunk of {self.size} bytes does not fit the tier's {self.bounds.budget}: the rest is pinned or "
                    "guaranteed to others",
                    budget=self.bounds.budget,
                )
        return self.gone

    def _over(self, owner: str) -> float:
        return self.used[owner] - self.bounds.share(owner, self.used)

    def _from_others(self) -> bool:
        """Evicts a chunk of another owner that exceeds that owner's share, if the saver is within its own."""
        if self._over(self.saver) > 0:
            return False
        beyond = [owner for owner in self.used if owner != self.saver and self._over(owner) > 0]
        others = sorted(beyond, key=self._over, reverse=True)
        return any(
            self._take(owner, "share", self._over(owner), pinned)
            for owner in others
            for pinned in (False, True)
        )

    def _take(self, owner: str, why: Why, at_most: float | None = None, pinned: bool = False) -> bool:
        """Evicts one chunk of this owner that has at most this many bytes; returns False if there is none."""
        passed = self._passed.setdefault(owner, [])
        remaining = self._remaining.setdefault(owner, iter(self.candidates(owner)))
        for chunk in list(passed):
            if self._fits(chunk, at_most, pinned):
                passed.remove(chunk)
                return self._evict(owner, chunk, why)
        for chunk in remaining:
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
