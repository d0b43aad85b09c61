"""The lists of wordings: which are held out, what slots they have, how those to train with are drawn."""

import random
import re

import pytest

from mpic_lab.generator import EVAL_TASKS, Generator, questions, tasks
from mpic_lab.generator.wordings import WORDINGS, draw

KINDS = list(WORDINGS["train"])


def _bare(wording: str) -> str:
    return " ".join(re.findall(r"[{}\w]+", wording.lower()))


def _slots(wording: str) -> list[str]:
    return re.findall(r"\{(\w)\}", wording)


@pytest.mark.parametrize("kind", KINDS)
def test_no_wording_is_in_two_lists_or_twice_in_one(kind):
    bare = {name: [_bare(w) for w in kinds[kind]] for name, kinds in WORDINGS.items()}
    assert all(len(set(held)) == len(held) > 0 for held in bare.values())
    assert set(bare["train"]).isdisjoint([*bare["eval"], *bare["fresh"], *bare["free"]])
    assert len({*bare["eval"], *bare["fresh"], *bare["free"]}) == sum(
        len(bare[name]) for name in ("eval", "fresh", "free")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_wording_names_what_its_kind_asks_about(kind):
    assert all(set(kinds) == set(KINDS) for kinds in WORDINGS.values())
    wanted = set(_slots(WORDINGS["train"][kind][0]))
    for wording in (w for kinds in WORDINGS.values() for w in kinds[kind]):
        slots = _slots(wording)
        assert set(slots) == wanted, wording
        chunks = [s for s in slots if s in "LMAB"]
        # answers speak of "the first" and "the second", and an image can stand in a sentence only once
        assert chunks == sorted(chunks) and (
            kind.startswith(("word", "more")) <= (len(chunks) == len(set(chunks)))
        ), wording


def test_a_wording_to_train_with_keeps_its_slots_however_it_is_typed():
    rng = random.Random(0)
    for kind in KINDS:
        wanted = set(_slots(WORDINGS["train"][kind][0]))
        drawn = [draw(rng, "train", kind) for _ in range(200)]
        assert all(set(_slots(w)) == wanted for w in drawn)
        assert not set(drawn) <= set(WORDINGS["train"][kind])  # some in haste, some with a word before them
        assert {draw(rng, "fresh", kind) for _ in range(50)} <= set(WORDINGS["fresh"][kind])


@pytest.mark.parametrize("asking, wanted", [(None, "eval"), ("fresh", "fresh")])
def test_held_out_questions_are_asked_in_the_wordings_of_their_list_only(monkeypatch, asking, wanted):
    drawn = set()

    def recorded(rng, asking, kind):
        drawn.add((asking, kind))
        return draw(rng, asking, kind)

    for module in (questions, tasks):
        monkeypatch.setattr(module, "draw", recorded)
    generator = Generator(0, "eval", asking)
    for task in EVAL_TASKS:
        for count in (0, 2, 4) if task.startswith("search") else (2, 4):
            generator.branches(task, count, 4)
            generator.task(task, count)
    assert {asking for asking, _ in drawn} == {wanted} and len(drawn) > len(EVAL_TASKS)


def test_a_comparison_inside_a_sentence_asks_about_a_shape_that_both_images_have():
    generator = Generator(0)
    for _ in range(200):
        items = generator.context_of(["image", "image"], named=False)
        turn = generator._word_level(items)
        if turn is not None and turn.kind == "word same":
            text = " ".join(p for p in turn.user if isinstance(p, str))
            shared = set.intersection(*({s for _, _, s in i.about.objects} for i in items))
            assert any(re.search(rf"\b{shape}\b", text) for shape in shared)
