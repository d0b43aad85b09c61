"""Decide whose request goes first: users take turns at the places of a batch, the pages of the pool and rows of a step.

Each user has a queue of his own, in order of arrival. What all of them want goes to those who have least of it, so that
one user, however much he sends, delays another by a step or two, and alone he has everything:

- *Places and pages.* Next is the first request of the user with the fewest running, and among equals of the one for
  whom fewer rows have been computed. If it does not fit, the youngest requests of users who hold more are preempted for
  it (``room_for``): by their dominant share, the larger of the shares of places and of pages (Ghodsi et al., Dominant
  Resource Fairness, NSDI 2011, section 4).
- *Rows* of prompts and uploads go first to the user for whom the fewest have been computed, until all who want more are
  level (``level``; Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, section 4.1, count tokens so).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from mpic.engine.native.batch import CompileJob, CompileRequest
from mpic.engine.native.request import Request

CREDIT = 1 << 14
"""Most rows by which a user who comes back is ahead of those who have been there all the time."""
SLICE = 256
"""Rows that a user must have had more than another who has nothing running, to lose his only place to him. What the
other computes then, before they change places again, is worth the second prefill of a preempted request."""
TRIED = 8
"""Users whose first requests a step tries to admit in vain."""


@dataclass(eq=False)
class Share:
    """The requests and pages of one user.

    Attributes:
        waiting, running: his requests and uploads in the queue, and his admitted requests, by arrival.
        pages: pages that the running ones hold, each chunk counted once; None when that has changed.
    """

    waiting: list[Request | CompileRequest] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    pages: int | None = None
    rows: int = 0  # computed for him, without the tokens that the running ones have generated

    @property
    def served(self) -> int:
        """Rows computed for him: of prompts and uploads, once each, and generated tokens."""
        return self.rows + sum(request.generated for request in self.running)

    @property
    def active(self) -> bool:
        return bool(self.waiting or self.running)


class Turns:
    """The shares of all users. All methods run on the engine's thread, but for ``waiting``.

    Args:
        places: requests that can run at once.
        pages: size of the pool.
    """

    def __init__(self, places: int, pages: int) -> None:
        self._places, self._pages = places, pages
        self._shares: dict[str, Share] = {}

    def waiting(self) -> dict[str, int]:
        """Return how many requests of each user wait. May be called from any thread."""
        queues = [(user, list(share.waiting)) for user, share in list(self._shares.items()) if share.waiting]
        return {user: sum(isinstance(item, Request) for item in queue) for user, queue in queues}

    def forget(self) -> None:
        """Forget what was computed for whom, when nobody has anything in the engine."""
        self._shares.clear()

    # ---- what users have

    def queue(self, item: Request | CompileRequest) -> None:
        insort(self._share(item.user).waiting, item, key=lambda i: i.arrived)

    def leave_queue(self, item: Request | CompileRequest) -> None:
        self._shares[item.user].waiting.remove(item)

    def run(self, request: Request) -> None:
        share = self._shares[request.user]
        insort(share.running, request, key=lambda r: r.arrived)
        share.rows -= request.generated  # which ``served`` counts now
        share.pages = None

    def stop(self, request: Request) -> None:
        share = self._shares[request.user]
        share.running.remove(request)
        share.rows += request.generated
        request.charged = max(request.charged, request.computed)
        share.pages = None

    def moved(self, request: Request) -> None:
        """Record that a running request holds other pages than before."""
        self._shares[request.user].pages = None

    def computed(self, user: str, rows: Request | CompileJob, end: int) -> None:
        """Record rows up to ``end`` of a prompt or a chunk that are computed for a user. What a preempted request has
        lost is not counted twice."""
        if isinstance(rows, Request):
            begin = max(rows.computed, rows.charged)
            rows.charged = max(rows.charged, end)
        else:
            begin = rows.computed
        self._share(user).rows += max(0, end - begin)

    def _share(self, user: str) -> Share:
        share = self._shares.get(user)
        if share is None:
            share = self._shares[user] = Share()
        if not share.active:
            least = min((s.served for s in self._shares.values() if s.active), default=0)
            share.rows = max(share.rows, least - CREDIT)
        return share

    # ---- who is next

    def next(self, without: Collection[str]) -> Request | CompileRequest | None:
        """Return the first of the queue, or None. Uploads come after all requests of other users.

        Args:
            without: users whose turn is over.
        """
        shares = [s for user, s in self._shares.items() if s.waiting and user not in without]
        if len(shares) < 2:
            return shares[0].waiting[0] if shares else None

        def order(share: Share) -> tuple[bool, int, int, float]:
            first = share.waiting[0]
            return isinstance(first, CompileRequest), len(share.running), share.served, first.arrived

        return min(shares, key=order).waiting[0]

    def others_wait(self, user: str) -> bool:
        return any(share.waiting for other, share in self._shares.items() if other != user)

    def level(self, wanted: Mapping[str, int], budget: int) -> dict[str, int]:
        """Return the rows of a step for each user. A quarter of the step is split equally; the rest goes to the user
        who has had least until that user has had as much as the next, with whom it is then shared.

        Args:
            wanted: rows that could be computed for each.
        """
        if len(wanted) == 1 or sum(wanted.values()) <= budget:
            return dict(wanted)
        served = {user: self._share(user).served for user in wanted}
        least = budget // (4 * len(wanted))

        def up_to(level: int) -> dict[str, int]:
            return {user: min(max(level - served[user], least), n) for user, n in wanted.items()}

        low, high = min(served.values()), max(served[user] + n for user, n in wanted.items())
        while low < high:
            middle = (low + high + 1) // 2
            if sum(up_to(middle).values()) <= budget:
                low = middle
            else:
                high = middle - 1
        given, more = up_to(low), up_to(low + 1)
        rest = budget - sum(given.values())  # fewer rows than there are users at the level
        for user in [user for user in given if more[user] > given[user]][:rest]:
            given[user] += 1
        return dict(sorted(given.items(), key=lambda pair: served[pair[0]]))

    # ---- who makes room

    def room_for(self, item: Request | CompileRequest, pages: int) -> Iterator[Request]:
        """Yield the running requests that may be preempted for an item, in order: always the youngest of the user with
        the largest dominant share who may lose it. That is one who still has as much without it as the item's user
        has with the item; or, if that user has nothing running and the item is a request, one who has others running
        or has had ``SLICE`` rows more.

        Args:
            pages: pages that the item takes.
        """
        mine = self._shares[item.user]
        left = {id(s): list(s.running) for s in self._shares.values() if s.running and s is not mine}
        others = [s for s in self._shares.values() if id(s) in left]
        if not others:
            return
        has = {id(s): self._dominant(s.running, self._held(s)) for s in others}
        wants = self._dominant([*mine.running, item], self._held(mine) + pages)
        served = mine.served
        upload = isinstance(item, CompileRequest)
        while others:
            others.sort(key=lambda s: (has[id(s)], s.served), reverse=True)
            for share in others:
                running = left[id(share)]
                victim, rest = running[-1], running[:-1]
                after = self._dominant(rest, _pages(rest))
                idle = not upload and not mine.running
                if after >= wants or (idle and (rest or share.served - served >= SLICE)):
                    break
            else:
                return
            yield victim
            left[id(share)], has[id(share)] = rest, after
            if not rest:
                others.remove(share)

    def most(self) -> Request:
        """Return the youngest running request of the user whose running ones hold the most pages."""
        shares = [share for share in self._shares.values() if share.running]
        return max(shares, key=lambda s: (self._held(s), s.running[-1].arrived)).running[-1]

    def _held(self, share: Share) -> int:
        if share.pages is None:
            share.pages = _pages(share.running)
        return share.pages

    def _dominant(self, running: Collection[Request | CompileRequest], pages: int) -> float:
        return max(len(running) / self._places, pages / self._pages)


def _pages(running: Collection[Request]) -> int:
    """Return the pages that requests hold."""
    residents = {linked.resident for request in running for linked in request.prompt.needed}
    extents = [holder.extent for holder in (*running, *residents) if holder is not None]
    return sum(extent.pages for extent in extents if extent is not None)
