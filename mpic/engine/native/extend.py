"""Retrieval while decoding: a request is paused, references are found, and they are linked where it stands.

Nothing that has been computed is computed again. The request's plan is made again under its own policy, over its
prompt, the generated tokens and the inserted segments. Everything before the insertion comes out as it was, so only the
new own tokens (markers, recomputed heads) are rows of the next step, and the references' pages are mapped behind them.
By construction this is the plan of a request that had the references there from the start, and after a preemption it is
prefilled as one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import NamedTuple

from mpic.engine import search
from mpic.engine.base import Hit, RetrievalRound
from mpic.engine.checks import check_extends
from mpic.engine.native.builder import RequestBuilder, shapes_of
from mpic.engine.native.request import (
    LinkedChunk,
    LinkedPrompt,
    OwnTokens,
    Request,
    mapped_chunks,
    own_tokens,
)
from mpic.engine.tombstones import Tombstones
from mpic.link import make_plan
from mpic.prompt.segments import ChunkSegment, Segment, TextSegment

log = logging.getLogger(__name__)
SEARCHERS = 2


class Extension(NamedTuple):
    """The extended prompt of a request, the new chunks that its plan maps (``found``), and its new own tokens."""

    prompt: LinkedPrompt
    found: list[LinkedChunk]
    own: OwnTokens
    max_tokens: int


class SearchOutcome(NamedTuple):
    """The outcome of one search. Without an extension the answer ends, because nothing more fits or because the model
    cannot go on without a reference; in the second case ``says`` is the text that ends it."""

    round: RetrievalRound
    extension: Extension | None
    says: str | None = None


class Extender:
    """Searches on threads of its own.

    Args:
        done: called on the engine's thread with the request and the outcome of its search, or the error that ends the
            request.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        tombstones: Tombstones,
        post: Callable[..., None],
        done: Callable[[Request, SearchOutcome | Exception], None],
    ) -> None:
        self._builder, self._tombstones, self._post, self._done = builder, tombstones, post, done
        self._threads = ThreadPoolExecutor(SEARCHERS, "mpic-search")

    def begin(self, request: Request, call: str) -> None:
        """Start the search that a paused request has called for."""
        self._threads.submit(self._search, request, call, time.monotonic(), self._tombstones.begin())

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ---- on a search thread; the request does not change while it is paused

    def _search(self, request: Request, call: str, began: float, arrived: float) -> None:
        try:
            outcome: SearchOutcome | Exception = self._outcome(request, call, began, arrived)
        except Exception as error:
            log.exception("a request could not be extended")
            outcome = error
        finally:
            self._tombstones.end(arrived)
        self._post(lambda: self._done(request, outcome), quiet=True)

    def _outcome(self, request: Request, call: str, began: float, arrived: float) -> SearchOutcome:
        retrieval, links = request.spec.retrieval, {}
        assert retrieval is not None  # only such requests search

        def link(hit: Hit) -> None:
            self._builder.check_presses([hit.chunk], request.spec.policy)
            links[id(hit.chunk)] = self._builder.linker.link([hit.chunk], request.spec.policy, arrived)[0]

        found = search.search(retrieval, call)
        hits, error = search.linkable(found, link)
        hits, extension, unfit = search.insert(
            retrieval,
            hits,
            request.usage.retrieval,
            lambda inserted: self._extension(request, inserted, links),
        )
        round = search.ended(retrieval, found, hits, request.generated, unfit or error)
        if extension is not None:
            round.tokens = inserted_tokens(request, extension)
            round.reused = round.tokens - len(extension.own.ids)
        round.search_ms = (time.monotonic() - began) * 1e3
        return SearchOutcome(round, extension, None if hits else retrieval.nothing)

    def _extension(
        self, request: Request, inserted: Sequence[Segment], links: dict[int, LinkedChunk]
    ) -> Extension:
        policy, prompt = request.spec.policy, request.prompt
        generated = TextSegment(tuple(request.ids[prompt.plan.own :]))
        segments = (*prompt.segments, generated, *inserted)
        # copies: a chunk that is found twice is linked twice
        found = [copy(links[id(s.chunk)]) for s in inserted if isinstance(s, ChunkSegment)]
        chunks = [*prompt.chunks, *found]
        plan = make_plan(shapes_of(segments, chunks, policy, self._builder.scope), policy)
        check_extends(plan, prompt.plan, policy)
        since = prompt.plan.length + len(generated)
        own = own_tokens(segments, plan, chunks, request.positions.shape[0], since)
        needed = mapped_chunks(plan, chunks)
        left = self._builder.tokens_left(plan, needed)
        return Extension(
            LinkedPrompt(segments, plan, chunks, needed),
            [chunk for chunk in needed if chunk in found],
            own,
            min(request.max_tokens, request.generated + left),
        )


def inserted_tokens(request: Request, extension: Extension) -> int:
    """Return how many tokens an extension adds to a request that has not been extended by it yet."""
    return extension.prompt.plan.length - request.prompt.plan.length - request.since_plan


def apply(request: Request, extension: Extension) -> None:
    """Extend a request and count the inserted tokens as prompt. Run on the engine's thread; pages come after."""
    usage, old = request.usage, len(request.prompt.chunks)
    tokens = inserted_tokens(request, extension)
    reused = tokens - len(extension.own.ids)
    request.extend(extension.prompt, extension.own, extension.max_tokens)
    usage.prompt_tokens += tokens
    usage.reused += reused
    usage.recomputed += sum(place.length for place in extension.prompt.plan.places[old:]) - reused
