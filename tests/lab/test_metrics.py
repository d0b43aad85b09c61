"""Scores of answers, on cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from mpic_lab.eval.metrics import best, first_token_kl


@pytest.mark.parametrize(
    "metric, answer, references, score",
    [
        ("em", "The Eiffel Tower.", ("eiffel tower",), 1),
        ("em", "tower", ("eiffel tower", "Tower!"), 1),
        ("em", "tower of london", ("tower",), 0),
        ("f1", "in the red house", ("red house",), 0.8),
        ("f1", "", ("red",), 0),
        ("f1", "", ("the",), 1),
        ("contains", "It is 5437 and 1.", ("5437", "99"), 0.5),
        ("rouge-l", "the cat sat on a mat", ("the cat sat on a mat",), 1),
        ("rouge-l", "dog", ("cat",), 0),
    ],
)
def test_scores(metric, answer, references, score):
    assert best(metric, answer, references) == pytest.approx(score)


def test_kl_is_that_of_the_whole_vocabulary_when_all_of_it_is_listed():
    p, q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.9), 2: math.log(0.1)}
    assert first_token_kl(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert first_token_kl(p, p) == 0


def test_kl_of_short_lists_is_a_lower_bound():
    p = {1: math.log(0.6), 2: math.log(0.3), 3: math.log(0.1)}
    q = {2: math.log(0.7), 3: math.log(0.2), 1: math.log(0.1)}
    whole = first_token_kl(p, q)
    assert 0 < first_token_kl(dict(list(p.items())[:2]), dict(list(q.items())[:2])) <= whole
