"""Searches while decoding, shared by both engines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpic.engine.base import Hit, Retrieval, RetrievalRound, SearchResult
from mpic.errors import ContextLengthExceeded, MPICError, PoolTooSmall
from mpic.prompt.segments import Segment

log = logging.getLogger(__name__)
T = TypeVar("T")


def search(retrieval: Retrieval, call: str) -> SearchResult:
    """Run a search. A search that fails returns no references and the reason."""
    try:
        return retrieval.search(call)
    except Exception as error:
        log.warning("a search failed and the answer goes on without it: %s", error)
        return SearchResult(call, (), error.code if isinstance(error, MPICError) else MPICError.code)


def linkable(found: SearchResult, link: Callable[[Hit], None]) -> tuple[list[Hit], str | None]:
    """Return the hits that can be linked, without those that were deleted meanwhile or cannot be read, and the code of
    the error, if there was one."""
    hits, error = [], found.error
    for hit in found.hits:
        try:
            link(hit)
            hits.append(hit)
        except MPICError as refused:
            log.warning("a reference cannot be linked: %s", refused)
            error = refused.code
    return hits, error


def insert(
    retrieval: Retrieval,
    hits: Sequence[Hit],
    rounds: Sequence[RetrievalRound],
    extend: Callable[[tuple[Segment, ...]], T],
) -> tuple[list[Hit], T | None, str | None]:
    """Insert as many of the hits after a call as fit, the best first.

    Args:
        rounds: number of the request's searches so far.
        extend: makes the longer request, or raises ContextLengthExceeded or PoolTooSmall.

    Returns:
        The hits that were inserted, the result of ``extend`` (None: the answer ends), and the error if something did
        not fit.
    """
    number = 1 + sum(len(round.citations) for round in rounds)
    left, error = list(hits), None
    while left or retrieval.nothing is None:
        try:
            return left, extend(retrieval.insert(left, number)), error
        except (ContextLengthExceeded, PoolTooSmall) as refused:
            error = refused.code
            if not left:
                break
            left.pop()
    return left, None, error


def ended(
    retrieval: Retrieval, found: SearchResult, hits: Sequence[Hit], at: int, error: str | None
) -> RetrievalRound:
    """Return the record of a search that has ended.

    Args:
        hits: the hits that were inserted.
        at: number of tokens that the model had generated.
        error: the error, which is reported only when nothing was inserted.
    """
    why = None if hits else error or "nothing_found"
    citations = tuple(hit.citation for hit in hits)
    return RetrievalRound(found.query, citations, at, error=why, trigger=retrieval.trigger)


def too_many(retrieval: Retrieval, call: str, at: int) -> RetrievalRound:
    """Return the record of a call after the last search that the request may make."""
    return RetrievalRound(call, at=at, error="rounds", trigger=retrieval.trigger)


def count(counters: Counter[str], round: RetrievalRound) -> None:
    """Add a search to an engine's counters ``retrieval_*``."""
    counters["retrieval_rounds"] += 1
    counters["retrieval_references"] += len(round.citations)
    counters["retrieval_tokens"] += round.tokens
    counters["retrieval_failures"] += round.error not in (None, "nothing_found")
