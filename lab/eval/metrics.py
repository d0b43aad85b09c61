"""Scores of one answer against its references, each in [0, 1], and the distance of a policy from ``full``.

Exact match and F1 are SQuAD's (Rajpurkar et al. 2016, section 6.1): case, punctuation, articles and extra space are
ignored, and the best reference counts.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, expected: str) -> float:
    return float(normalized(answer) == normalized(expected))


def f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall over words."""
    given, wanted = normalized(answer).split(), normalized(expected).split()
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))


def contains(answer: str, expected: str) -> float:
    """Return whether the reference occurs in the answer (RULER's string match)."""
    return float(expected.lower() in answer.lower())


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l(answer: str, expected: str) -> float:
    """Return the ROUGE-L F-measure (Lin 2004), stemmed."""
    return float(_rouge().score(expected, answer)["rougeL"].fmeasure)


METRICS: dict[str, Callable[[str, str], float]] = {
    "em": exact_match,
    "f1": f1,
    "contains": contains,
    "rouge-l": rouge_l,
}


def best(metric: str, answer: str, references: Sequence[str]) -> float:
    """Return the score of the reference that fits best; ``contains`` asks for all of them, as RULER does."""
    scores = [METRICS[metric](answer, reference) for reference in references]
    return sum(scores) / len(scores) if metric == "contains" else max(scores)


def first_token_kl(full: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the KL divergence in nats of a policy's first-token distribution from that of ``full``.

    Args:
        full, other: token id -> log-probability of the most likely tokens of each.

    Tokens outside ``full``'s list are one event. A token that ``other`` does not list is given the least probability it
    lists, so with short lists the result is a lower bound; with the whole vocabulary it is exact.
    """
    least = min(other.values())
    kl = 0.0
    rest_full, rest_other = 1.0, 1.0
    for token, logprob in full.items():
        theirs = other.get(token, least)
        p = math.exp(logprob)
        kl += p * (logprob - theirs)
        rest_full -= p
        rest_other -= math.exp(theirs)
    if rest_full > 1e-9 and rest_other > 1e-9:
        kl += rest_full * math.log(rest_full / rest_other)
    return max(0.0, kl)
