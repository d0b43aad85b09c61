"""The cases that the bench measures of every peer, and the checks that a measurement fits its case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.peers.prompts import First, Peer, Questions, Settings

PREFIX, LINKS, STOCK = "MPIC prefix", ("MPIC mpic-32", "MPIC legolink-16"), "transformers"
SHUFFLED, FRESH, SHORT, AGAIN = "documents in a new order", "all fresh", "few fresh tokens", "the same again"
IMAGES, NEW_IMAGES = "images in a new order", "new images"
FIRST = (SHUFFLED, FRESH, SHORT, AGAIN, IMAGES, NEW_IMAGES)
"""Cases whose measurements are milliseconds to the first token; those of the others are tokens per second."""
TEXT_CASES, IMAGE_CASES = ("shuffled", "fresh", "again", "short", "answers"), ("images", "new-images")
CASES = (*TEXT_CASES, *IMAGE_CASES)
"""Short names of the cases, in the order of a turn."""
BY_CHANCE = 2
"""Tokens that two random prompts may begin with in common."""
LAST_BLOCK = 64
"""Maximum tokens at the end of a repeated prompt that a block-based cache may compute again."""


def answers_case(count: int) -> str:
    """Return the name of the case with ``count`` answers at once."""
    return f"{count} answer{'s' * (count > 1)} over the documents"


def wanted(settings: Settings, cases: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the cases that the settings ask for.

    Raises:
        ValueError: the settings name a case that does not exist.
    """
    if unknown := [name for name in settings.only if name not in CASES]:
        raise ValueError(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return tuple(name for name in cases if not settings.only or name in settings.only)


def turn_of(settings: Settings, peer: Peer, questions: Questions, turn: int) -> dict[str, float]:
    """Empty a peer's caches, show it the system prompt, and measure the requested cases. Cases that a
    policy or peer does not change are left out.

    Raises:
        BenchFailed: a cache found more of a prompt than its case says, or less.
    """
    peer.reset()
    peer.first(questions.opening())
    cases = wanted(settings, IMAGE_CASES if questions.images else TEXT_CASES)
    measure = _images if questions.images else _texts
    return dict(measure(settings, peer, questions, turn, cases))


Timings = Iterator[tuple[str, float]]
"""Case -> measurement: milliseconds to a first token, or tokens per second."""


def _texts(
    settings: Settings, peer: Peer, questions: Questions, turn: int, cases: tuple[str, ...]
) -> Timings:
    if "shuffled" in cases:
        yield SHUFFLED, _system_alone(settings, peer, SHUFFLED, lambda: peer.first(questions.shuffled(turn)))
    if peer.name not in LINKS:
        again = "again" in cases and peer.name != STOCK
        if "fresh" in cases or again:
            prompt = questions.fresh(settings.length)
            fresh = _found(peer, FRESH, peer.first(prompt), most=BY_CHANCE)
            if "fresh" in cases:
                yield FRESH, fresh
            if again:
                least = settings.length - LAST_BLOCK
                yield AGAIN, _found(peer, AGAIN, peer.first(prompt), least=least)
        if "short" in cases:
            yield SHORT, _found(peer, SHORT, peer.first(questions.fresh(settings.short)), most=BY_CHANCE)
    if "answers" in cases and peer.name not in (PREFIX, LINKS[1]):
        for count in settings.answers:
            yield answers_case(count), peer.rate([questions.ordered() for _ in range(count)], settings.tokens)


def _images(
    settings: Settings, peer: Peer, questions: Questions, turn: int, cases: tuple[str, ...]
) -> Timings:
    if "images" in cases:
        yield IMAGES, _system_alone(settings, peer, IMAGES, lambda: peer.first(questions.shuffled(turn)))
    if "new-images" in cases and peer.name not in LINKS:
        yield NEW_IMAGES, _system_alone(settings, peer, NEW_IMAGES, lambda: peer.first(questions.unseen()))


def _system_alone(settings: Settings, peer: Peer, case: str, ask: Callable[[], First]) -> float:
    """Measure a long prompt of which a cache may hold the system prompt but no document."""
    return _found(peer, case, ask(), most=settings.system + BY_CHANCE)


def _found(peer: Peer, case: str, first: First, least: int = 0, most: int | None = None) -> float:
    """Return the milliseconds of a first token, after checking how much of its prompt a cache had."""
    if first.found is not None and not least <= first.found <= (first.found if most is None else most):
        raise BenchFailed(
            f"{peer.name}, {case}: a cache held the first {first.found} tokens of the prompt, not "
            + (f"{least} or more" if most is None else f"{most} or less")
        )
    return first.ms
