"""Decoding one step ahead: the next step is given to the device before the host knows the tokens of this one.

Between two decoding steps the host turns tokens into text, looks for stop strings and streams, and the device would
wait for it. Yet all that the next step needs of this one are its tokens, and they are on the device. So where the next
step is known to be the same requests, each one token further, it is launched behind this one at once, and the host
reads this one's tokens meanwhile.

It may turn out then that a request has ended, searches, or has another token than the device drew at first. The row of
such a request is discarded: nothing of it is visible, since a row writes nothing but the KV of its own token, into a
slot that its request held when it was launched and that is written again before it is read. Whoever is given that slot
writes it later, too: on the same stream, or by copies that are ordered behind it (``Copies.order``). The other rows are
the next step, whatever has arrived meanwhile; what has arrived is scheduled after it.

Only the forward runs ahead. The tokens of a step are drawn when the host has taken those of the step before, so that
the mask of an answer with a grammar (``mpic.engine.grammar``) is that of its last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.executor import Executor
from mpic.engine.native.request import Request, Status
from mpic.engine.native.sampling import Drawing
from mpic.engine.native.scheduler import Scheduler
from mpic.kernels.upload import send
from mpic.kv.pool import Extent


class _Launched(NamedTuple):
    """A step that the device has been given.

    Args:
        slices: one token of each request, which the device knows from ``drawing``.
        extents: where their KV is written.
        logits: ``[rows, vocabulary]`` fp32.
    """

    slices: list[BatchSlice]
    extents: list[Extent]
    drawing: Drawing
    logits: torch.Tensor


class Ahead:
    """See the module. All methods run on the engine's thread.

    Args:
        enabled: False never launches anything.

    ``counters``: ``steps_ahead``, ``rows_ahead_discarded``.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, enabled: bool) -> None:
        self._executor, self._scheduler, self._enabled = executor, scheduler, enabled
        self._launched: _Launched | None = None
        self.counters: Counter[str] = Counter()

    def launch(self, slices: Sequence[BatchSlice], drawing: Drawing) -> None:
        """Launch the step after one whose tokens are being drawn, if it is known which one that will be.

        Args:
            slices: those of the step, all of whose requests draw a token.
        """
        if not self._enabled or drawing.tokens is None or not self._continues(slices):
            return
        if self._executor.reuses_logits:
            drawing.keep_logits()
        requests: list[Any] = [part.rows for part in slices]
        with ExitStack() as longer:
            for request in requests:
                longer.enter_context(request.with_next())
            following = [BatchSlice(request, len(request) - 1, len(request)) for request in requests]
            logits = self._executor.run(following, ids=drawing.tokens.clamp_min(0))
        extents = [request.extent for request in requests]
        self._launched = _Launched(following, extents, drawing, logits)
        self.counters["steps_ahead"] += 1

    def _continues(self, slices: Sequence[BatchSlice]) -> bool:
        """Return whether the next step has to be the requests of this one, unless one of them ends unforeseen."""
        scheduler = self._scheduler
        unread = sum(request.stream.full for request in scheduler.running)
        if scheduler.waiting or scheduler.jobs or len(scheduler.running) - unread != len(slices):
            return False
        return all(_continues(part) for part in slices)

    def take(self) -> tuple[list[BatchSlice], torch.Tensor] | None:
        """Return the slices of the step that was launched and their logits, without those of requests that do not go
        on with the token that they were given; None if there are none."""
        launched, self._launched = self._launched, None
        if launched is None or not launched.drawing.found:  # they could not be read
            return None
        slices, extents, drawing, logits = launched
        kept = [
            row
            for row, (part, extent, token) in enumerate(zip(slices, extents, drawing.found, strict=True))
            if _goes_on(part, extent, token)
        ]
        self.counters["rows_ahead_discarded"] += len(slices) - len(kept)
        if not kept:
            return None
        if len(kept) < len(slices):
            logits = logits[send(torch.tensor(kept), logits.device)]
        return [slices[row] for row in kept], logits

    def forget(self) -> None:
        """Discard the step that was launched."""
        self._launched = None


def _continues(part: BatchSlice) -> bool:
    """Return whether a request is decoding, may generate more than the token that is being drawn, has a slot for its
    KV, and is being read. Log-probabilities are read from the logits when the token is known, so requests with them
    take one step after the other."""
    request, lo, hi = part
    return (
        isinstance(request, Request)
        and hi - lo == 1
        and request.left > 1
        and request.spec.sampling.logprobs is None
        and not request.stream.full
        and len(request) + 1 - request.mapped <= request.extent.tokens
    )


def _goes_on(part: BatchSlice, extent: Extent, token: int) -> bool:
    request: Any = part.rows
    return (
        request.status is Status.RUNNING
        and request.extent is extent
        and (request.computed, len(request)) == (part.lo, part.hi)
        and request.ids[part.lo] == token
    )
