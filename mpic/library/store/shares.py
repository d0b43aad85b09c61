"""Shares decide whose chunks are evicted when a tier is full. The rules are the same for every tier with a byte budget
(disk, host memory).

Every user who stores anything is guaranteed a share of the budget. Within its share, a user loses chunks only to newer
chunks of its own, least recently used first. Bytes beyond the share, which others left unused, are lent: these chunks
are evicted, least recently used first, when a user who stays within its own share needs room. Such a user gives up
chunks of its own only where others have nothing to return.

A chunk may lie partly within its owner's share. It goes after those that are wholly lent, and only if it is not pinned:
the users below their shares would find no room otherwise. An owner that is not beyond its share never loses one. Of
each owner, pinned chunks go last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
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
    used = {saver: 0, **used}
    used[saver] += size
    turns = {owner: _EvictionOrder(candidates(owner)) for owner in used}
    over = lambda owner: used[owner] - bounds.share(owner, used)
    gone: list[tuple[H, Why]] = []

    def take(owner: str, why: Why) -> None:
        chunk = turns[owner].take()
        used[owner] -= chunk.bytes
        gone.append((chunk, why))

    quota = bounds.quota if saver != SHARED else 0
    while quota and used[saver] > quota:
        if not turns[saver].unpinned():
            raise StorageQuotaExceeded(
                f"a chunk of {size} bytes does not fit your quota of {quota} bytes of compiled chunks",
                quota=quota,
            )
        take(saver, "quota")
    while sum(used.values()) > bounds.budget:
        lenders = [] if over(saver) > 0 else [name for name in used if name != saver and over(name) > 0]
        lent = [(name, first) for name in lenders if (first := turns[name].first()) is not None]
        able = [(name, first) for name, first in lent if not first.pinned or first.bytes <= over(name)]
        if able:
            take(min((c.pinned, c.bytes > over(name), c.last_used, name) for name, c in able)[-1], "share")
        elif turns[saver].unpinned():
            take(saver, "budget")
        else:
            share = int(bounds.share(saver, used))
            why = (
                "what others hold beyond their shares is pinned or being written"
                if over(saver) <= 0
                else f"its owner would exceed a share of {share} bytes, and all its other chunks are pinned or being "
                "written"
            )
            raise StorageFull(
                f"a chunk of {size} bytes does not fit the tier's {bounds.budget}: {why}",
                budget=bounds.budget,
            )
    free = bounds.budget - sum(used.values())
    # the saver keeps those of its chunks that still fit, because a larger one was chosen after them
    for chunk, why in gone[::-1]:
        if why == "budget" and chunk.bytes <= free:
            free -= chunk.bytes
            gone.remove((chunk, why))
    return gone


class _EvictionOrder(Generic[H]):
    """An owner's chunks in the order in which they are evicted: least recently used first, pinned ones last. No more of
    them are read than it takes to tell the first."""

    def __init__(self, candidates: Iterable[H]) -> None:
        self._left = self._in_turn(candidates)
        self._first: list[H] = []

    @staticmethod
    def _in_turn(candidates: Iterable[H]) -> Iterator[H]:
        pinned = []
        for chunk in candidates:
            if chunk.pinned:
                pinned.append(chunk)
            else:
                yield chunk
        yield from pinned

    def first(self) -> H | None:
        if not self._first:
            self._first.extend(islice(self._left, 1))
        return self._first[0] if self._first else None

    def unpinned(self) -> bool:
        """Return whether the next one is there, and not pinned."""
        first = self.first()
        return first is not None and not first.pinned

    def take(self) -> H:
        """Take the next one, which ``first`` has returned."""
        return self._first.pop()
