"""Drawn pictures: what is asked about them is true, and a tower's words say what is there."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from mpic_lab.eval.metrics import exact_match
from mpic_lab.eval.tasks import Options, find
from mpic_lab.generator.scenes import (
    GRID,
    GROUNDS,
    PLACES,
    SPOKEN,
    WORDS,
    Picture,
    Thing,
    covered,
    draw_picture,
    pick,
    questions,
    render,
    words,
)

RED_STAR = Thing(0, "star", "red", "small", 40, 40, 15)
BLUE_SEVEN = Thing(8, "7", "blue", "large", 184, 176, 28)
TWO = Picture("yellow", (RED_STAR, BLUE_SEVEN))


def test_a_picture_is_asked_every_kind_of_question_and_the_answers_are_true():
    found = {(q.kind, q.key.strip()) for q in questions(TWO, random.Random(0))}
    assert found - {("exists", "Yes"), ("exists", "No")} == {
        ("color", "red"), ("size", "small"), ("where", "top left"), ("shape", "star"), ("color_at", "red"),
        ("shape_at", "star"), ("color", "blue"), ("size", "large"), ("where", "bottom right"),
        ("color_at", "blue"), ("digit", "seven"), ("count", "two"), ("background", "yellow"),
    }  # fmt: skip


def test_nothing_is_asked_that_two_objects_could_answer():
    twins = Picture("white", (RED_STAR, Thing(4, "star", "red", "large", 112, 112, 28)))
    kinds = Counter(q.kind for q in questions(twins, random.Random(0)))
    assert kinds == {"color_at": 2, "shape_at": 2, "count": 1, "background": 1, "exists": 1}


@pytest.mark.parametrize("seed", range(30))
def test_no_question_is_picked_twice(seed):
    rng = random.Random(seed)
    texts = [q.text for q in pick(draw_picture(rng, 9), rng, 12)]
    assert len(set(texts)) == len(texts)


def test_the_words_of_the_patches_tell_each_object_in_every_row_of_its_place():
    grid = np.array(words(TWO)).reshape(GRID, GRID)
    assert all({"small", "red", "star", "top", "left"} == set(row) for row in grid[:5, :5])
    assert all({"large", "blue", "seven", "bottom", "right"} == set(row) for row in grid[9:13, 9:])
    assert " ".join(grid[13]).startswith("There are two objects . The color of the background is yellow .")
    assert set(words(TWO)) <= set(WORDS)
    empty = np.array(words(Picture("yellow", ())))
    assert set(np.flatnonzero(grid.ravel() != empty)) <= set(SPOKEN)


@pytest.mark.parametrize("seed", range(10))
def test_an_object_is_drawn_where_its_patches_are(seed):
    rng = random.Random(seed)
    picture = draw_picture(rng, 9)
    pixels, cover = render(picture, rng).astype(int), covered(picture)
    for number, thing in enumerate(picture.things):
        color = np.abs(pixels - np.array(GROUNDS[thing.color])).max(-1) <= 12
        patches = color.reshape(GRID, 16, GRID, 16).any((1, 3)) & (cover == number + 1)
        assert patches.any(), (thing, PLACES[thing.place])
        assert np.abs(np.argwhere(cover == number + 1).mean(0) * 16 + 8 - (thing.y, thing.x)).max() < 12


@pytest.mark.parametrize("kind", ["color", "where", "digit", "exists"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_evaluation_asks_a_kind_about_one_of_several_pictures(kind, chunks):
    options = Options(chunks=chunks, questions=3)
    samples = list(find(f"scene-{kind}").load(options))
    assert samples == list(find(f"scene-{kind}").load(options))
    for sample in samples:
        *images, text = sample.messages[0]["content"]
        assert len(images) == chunks and text["text"].startswith("In image ") == (chunks > 1)
        assert exact_match(sample.expected[0], sample.expected[0].upper()) == 1
