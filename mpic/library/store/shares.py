"""Shares decide whose chunks are evicted when a tier is full. The rules are the same for every tier with a byte budget
(disk, host memory).

Every user who stores anything is guaranteed a share of the budget. Within its share, a user loses chunks only to newer
chunks of its own, least recently used first. Bytes beyond the share, which others left unused, are lent: these chunks
are evicted, least recently used first, when a user who stays within its own share needs room. Such a user gives up
chunks of its own only where others have nothing to return.

A chunk may lie partly within its owner's share. It goes after those that are wholly lent, and only if it is not pinned:
the users below their shares would find no room otherwise. An owner that is not beyond its share never loses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from mpic.errors import StorageFull, StorageQuotaExceeded
from mpic.library.records import SHARED

Why = Literal["quota", "budget", "share"]
"""Why a chunk was evicted: its owner's quota, its owner's newer chunks, or another user's guaranteed share."""


class Held(NamedTuple):
    """A chunk that could be evicted.

    Args:
        key: its key in the tier.
        pinned: whether its owner pinned it.
        last_used: greater than that of every chunk of the tier that was used before.
    """

    key: Any
    bytes: int
    pinned: bool
    last_used: float


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
        """Return the bytes that an owner is guaranteed, given the bytes that each owner uses."""
        shared = self.budget * self.shared if used.get(SHARED) else 0.0
        if owner == SHARED:
            return shared
        users = {name for name, size in used.items() if size and name != SHARED} | {owner}
        return (self.budget - shared) / len(users)


def make_room(
    bounds: TierBounds, used: Mapping[str, int], saver: str, size: int, candidates: Candidates[H]
) -> list[tuple[H, Why]]:
    """Choose the chunks to evict so that ``saver`` can store ``size`` bytes.

    Args:
        used: bytes by owner, including those being written.
        candidates: function that returns an owner's chunks, least recently used first.

    Raises:
        StorageQuotaExceeded: the user's quota is smaller than ``size``, or all its chunks are pinned.
        StorageFull: the budget is smaller than ``size``, or nothing may be evicted for this user.
    """
    return _Eviction(bounds, used, saver, size, candidates).make()


class _Eviction(Generic[H]):
    def __init__(
        self, bounds: TierBounds, used: Mapping[str, int], saver: str, size: int, candidates: Candidates[H]
    ) -> None:
        self.bounds, self.saver, self.size, self.candidates = bounds, saver, size, candidates
        self.used = dict(used)
        self.used[saver] = self.used.get(saver, 0) + size
        self.gone: list[tuple[H, Why]] = []
        self._remaining: dict[str, Iterator[H]] = {}
        self._known: dict[str, list[H]] = {}  # chunks read so far, by owner, least recently used first

    def make(self) -> list[tuple[H, Why]]:
        quota = self.bounds.quota if self.saver != SHARED else 0
        while quota and self.used[self.saver] > quota:
            if not self._take(self.saver, "quota"):
                raise StorageQuotaExceeded(
                    f"a chunk of {self.size} bytes does not fit your quota of {quota} bytes of compiled chunks",
                    quota=quota,
                )
        while sum(self.used.values()) > self.bounds.budget:
            if not (self._from_others() or self._partly_lent() or self._take(self.saver, "budget")):
                raise StorageFull(
                    f"a chunk of {self.size} bytes does not fit the tier's {self.bounds.budget}: {self._why_not()}",
                    budget=self.bounds.budget,
                )
        self._keep_what_fits()
        return self.gone

    def _keep_what_fits(self) -> None:
        """Keep those of the saver's own chunks that still fit, because a larger one was chosen after them; the most
        recently used first."""
        free, gone = self.bounds.budget - sum(self.used.values()), []
        for victim, why in reversed(self.gone):
            if why == "budget" and victim.bytes <= free:
                free -= victim.bytes
            else:
                gone.append((victim, why))
        self.gone = gone[::-1]

    def _why_not(self) -> str:
        """Return the reason why nothing may be evicted."""
        if self._over(self.saver) <= 0:
            return "what others hold beyond their shares is pinned or being written"
        share = int(self.bounds.share(self.saver, self.used))
        return f"its owner would exceed a share of {share} bytes, and all its other chunks are pinned or being written"

    def _over(self, owner: str) -> float:
        return self.used[owner] - self.bounds.share(owner, self.used)

    def _from_others(self) -> bool:
        """Evict a chunk of another owner that exceeds that owner's share, if the saver is within its own."""
        others = sorted(self._lenders(), key=self._over, reverse=True)
        return any(
            self._take(owner, "share", self._over(owner), pinned)
            for owner in others
            for pinned in (False, True)
        )

    def _partly_lent(self) -> bool:
        """Evict the least recently used chunk of those owners, which takes its owner below its share."""
        firsts = {owner: self._first(owner, None, pinned=False) for owner in self._lenders()}
        found = {owner: chunk for owner, chunk in firsts.items() if chunk is not None}
        if not found:
            return False
        return self._take(min(found, key=lambda owner: found[owner].last_used), "share")

    def _lenders(self) -> list[str]:
        """Return the other owners that exceed their shares; none if the saver exceeds its own."""
        if self._over(self.saver) > 0:
            return []
        return [owner for owner in self.used if owner != self.saver and self._over(owner) > 0]

    def _take(self, owner: str, why: Why, at_most: float | None = None, pinned: bool = False) -> bool:
        """Evict one chunk of this owner that has at most this many bytes; return False if there is none."""
        chunk = self._first(owner, at_most, pinned)
        if chunk is None:
            return False
        self._known[owner].remove(chunk)
        self.used[owner] -= chunk.bytes
        self.gone.append((chunk, why))
        return True

    def _first(self, owner: str, at_most: float | None, pinned: bool) -> H | None:
        """Return this owner's least recently used chunk of at most this many bytes, or None."""
        known = self._known.setdefault(owner, [])
        remaining = self._remaining.setdefault(owner, iter(self.candidates(owner)))
        for chunk in known:
            if self._fits(chunk, at_most, pinned):
                return chunk
        for chunk in remaining:
            known.append(chunk)
            if self._fits(chunk, at_most, pinned):
                return chunk
        return None

    def _fits(self, chunk: H, at_most: float | None, pinned: bool) -> bool:
        return chunk.pinned == pinned and (at_most is None or chunk.bytes <= at_most)
