"""Retrieval while decoding: a request is paused, references are found, and they are linked where it stands.

Nothing is rebuilt and nothing that has been computed is computed again. The request's plan is made anew over its
prompt, what it has said, and what is inserted, under its own policy; everything before the insertion comes out as it
was, so only the new own tokens (markers, recomputed heads) are rows of the next step, and the references' pages are
mapped behind them. By construction this is the plan of a request that had the references there from the start, and
after a preemption it is prefilled as one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import NamedTuple

import torch

from mpic.engine import search
from mpic.engine.base import Hit, RetrievalRound
from mpic.engine.checks import check_extends
from mpic.engine.deletions import Deletions
from mpic.engine.native.lanes import LinkedChunk, Own, Piece, lay_out, mapped_chunks
from mpic.engine.native.lanes import Sequence as Request
from mpic.engine.native.prepare import Preparer
from mpic.link.plan import LinkPlan, make_plan
from mpic.prompt.segments import ChunkSegment, Segment, TextSegment

log = logging.getLogger(__name__)
SEARCHERS = 2


class Extension(NamedTuple):
    """What a request becomes. ``linked`` are all its chunks, ``found`` the new ones that its plan maps."""

    segments: tuple[Segment, ...]
    plan: LinkPlan
    linked: list[LinkedChunk]
    found: list[LinkedChunk]
    own: Own
    max_tokens: int


class Outcome(NamedTuple):
    """Of one search. Without an extension the answer ends: because nothing more fits, or, with ``says``, because the
    model cannot go on without a reference."""

    round: RetrievalRound
    extension: Extension | None
    says: str | None = None


class Extender:
    """Searches on threads of its own; the rest of the engine sees ``begin`` and ``apply``, on the engine's thread.

    Args:
        done: called on the engine's thread with the request and the outcome of its search, or why the request fails.

    ``counters``: ``retrieval_rounds``, ``retrieval_references``, ``retrieval_tokens``, ``retrieval_failures``.
    """

    def __init__(
        self,
        preparer: Preparer,
        deletions: Deletions,
        post: Callable[..., None],
        done: Callable[[Request, Outcome | Exception], None],
    ) -> None:
        self._preparer, self._deletions, self._post, self._done = preparer, deletions, post, done
        self._threads = ThreadPoolExecutor(SEARCHERS, "mpic-search")
        self.counters: Counter[str] = Counter()

    def begin(self, request: Request, call: str) -> None:
        """Pause a request and search for what it asked."""
        request.searching = True
        self._threads.submit(self._search, request, call, time.monotonic(), self._deletions.begin())

    def count(self, round: RetrievalRound) -> None:
        search.count(self.counters, round)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ---- on a search thread; the request does not change while it is paused

    def _search(self, request: Request, call: str, began: float, arrived: float) -> None:
        try:
            outcome: Outcome | Exception = self._outcome(request, call, began, arrived)
        except Exception as error:
            log.exception("a request could not be extended")
            outcome = error
        finally:
            self._deletions.end()
        self._post(lambda: self._done(request, outcome), quiet=True)

    def _outcome(self, request: Request, call: str, began: float, arrived: float) -> Outcome:
        retrieval, links = request.request.retrieval, {}

        def link(hit: Hit) -> None:
            links[id(hit.chunk)] = self._preparer.link([hit.chunk], request.request.policy, arrived)[0]

        found = search.search(retrieval, call)
        hits, error = search.linkable(found, link)
        hits, extension, unfit = search.insert(
            retrieval,
            hits,
            request.usage.retrieval,
            lambda inserted: self._extension(request, inserted, links),
        )
        round = search.ended(found, hits, request.usage.completion_tokens, unfit or error)
        if extension is not None:
            round.tokens = extension.plan.length - request.plan.length - self._said(request)
            round.reused = round.tokens - len(extension.own.ids)
        round.search_ms = (time.monotonic() - began) * 1e3
        return Outcome(round, extension, None if hits else retrieval.nothing)

    @staticmethod
    def _said(request: Request) -> int:
        """Tokens said since the plan was made."""
        return len(request.ids) - request.plan.own

    def _extension(
        self, request: Request, inserted: Sequence[Segment], links: dict[int, LinkedChunk]
    ) -> Extension:
        policy = request.request.policy
        since = request.plan.length + self._said(request)
        said = (TextSegment(tuple(request.ids[request.plan.own :])),)
        segments = (*request.segments, *said, *inserted)
        chunks = [segment.chunk for segment in inserted if isinstance(segment, ChunkSegment)]
        new = [copy(links[id(chunk)]) for chunk in chunks]  # one found twice is linked twice
        linked = [*request.linked, *new]
        plan = make_plan(self._preparer.shapes(segments, linked, policy), policy)
        check_extends(plan, request.plan, policy)
        own = lay_out(segments, plan, linked, request.positions.shape[0], since)
        needed = mapped_chunks(plan, linked)
        left = self._preparer.room(plan, needed)
        return Extension(
            segments,
            plan,
            linked,
            [one for one in needed if any(one is other for other in new)],
            own,
            min(request.max_tokens, request.generated + left),
        )


def apply(request: Request, extension: Extension) -> None:
    """Put the new own tokens behind what the request has said. On the engine's thread; pages come after."""
    own, usage = extension.own, request.usage
    tokens = extension.plan.length - request.plan.length - (len(request.ids) - request.plan.own)
    request.pieces = [*request.pieces, *(Piece(p.start + len(request.ids), *p[1:]) for p in own.pieces)]
    request.ids += own.ids
    request.items += own.items
    request.positions = torch.cat([request.positions, *own.positions], 1)
    request.inserted += len(own.ids)
    old = len(request.linked)
    request.segments, request.plan, request.linked = extension.segments, extension.plan, extension.linked
    request.max_tokens = extension.max_tokens
    reused = tokens - len(own.ids)
    usage.prompt_tokens += tokens
    usage.reused += reused
    usage.recomputed += sum(slot.length for slot in request.plan.slots[old:]) - reused
