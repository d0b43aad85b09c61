"""Counting that both engines share: requests that wait, the shape of a prompt, the tokens of an answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpic.engine.base import GenerationUsage
from mpic.errors import ContextLengthExceeded, QueueFull
from mpic.link.plan import LinkPlan, Policy, SegmentShape
from mpic.prompt.segments import Segment, TextSegment


class Arrivals:
    """Limits how many requests wait. A request enters before any of its preparation starts, so that a flood costs
    nothing, and leaves when the engine has seen it or has refused it. Thread-safe.

    When as many wait as may, a user still has his share of the limit, an equal one for each user who has any waiting:
    one user's flood has no other refused. With ``u`` users, at most ``1 + 1/2 + ... + 1/u`` times the limit wait.

    Args:
        waiting: returns how many of the requests that the engine has seen wait for their turn, by user.
        limit: returns how many requests may wait now; None for any number.
    """

    def __init__(self, waiting: Callable[[], Mapping[str, int]], limit: Callable[[], int | None]) -> None:
        self._waiting, self._limit = waiting, limit
        self._lock = threading.Lock()
        self._entered: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Requests that have entered and not left."""
        return self._entered.total()

    def enter(self, user: str) -> None:
        """Register an arriving request. Raise QueueFull when the maximum number of requests is waiting already, and
        the user has his share of it."""
        with self._lock:
            limit = self._limit()
            if limit is not None:
                waiting = self._entered + Counter(self._waiting())
                users = len(waiting.keys() | {user})
                if waiting.total() >= limit and waiting[user] >= min(limit, max(1, limit // users)):
                    raise QueueFull(
                        f"{waiting[user]} of your requests are waiting for their turn, and no more may",
                        waiting=waiting[user],
                    )
            self._entered[user] += 1

    def leave(self, user: str) -> None:
        with self._lock:
            self._entered[user] -= 1
            self._entered += Counter()  # drops zeros


def segment_shapes(
    segments: Sequence[Segment], chunk_sizes: Iterable[tuple[int, int]], policy: Policy
) -> list[SegmentShape]:
    """Return the shapes of segments, from which ``make_plan`` lays out a prompt.

    Args:
        chunk_sizes: tokens and rotary positions of each chunk, in prompt order.
    """
    sizes = iter(chunk_sizes)
    shapes = []
    for segment in segments:
        if isinstance(segment, TextSegment):
            shapes.append(SegmentShape(len(segment), len(segment), False))
        else:
            size = next(sizes)
            shapes.append(SegmentShape(*(size if policy.context else (0, 0)), True))
    return shapes


def count_prompt(usage: GenerationUsage, plan: LinkPlan) -> None:
    """Set the prompt token counts of a usage from the plan of the prompt."""
    usage.prompt_tokens = plan.length
    usage.reused = plan.length - plan.own
    usage.recomputed = sum(place.length for place in plan.places) - usage.reused


def count_answer(counters: Counter[str], usage: GenerationUsage, reason: str) -> None:
    """Add a request that ended without an error to an engine's counters ``finished_*`` and ``tokens_*``."""
    counters[f"finished_{reason}"] += 1
    if usage.ttft_ms:
        counts = {"requested": usage.prompt_tokens, "reused": usage.found, "computed": usage.spent}
        counts |= {"recomputed": usage.recomputed, "prefix_hit": usage.prefix_hit}
        counters.update({f"tokens_{name}": count for name, count in counts.items()})


def oversized_chunk(tokens: int, sink: int, context: int, prompt_tokens: int) -> ContextLengthExceeded:
    """Return the error for a chunk that does not fit a model's context behind its sink tokens."""
    return ContextLengthExceeded(
        f"a chunk has {tokens} tokens{f' and {sink} before it' if sink else ''}; the model's context is {context}",
        prompt_tokens=prompt_tokens,
        context_length=context,
    )
