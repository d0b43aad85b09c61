"""The generated world: seeded, split, spelled the same by the generator and by the chat template."""

import random

import numpy as np
import pytest

from mpic_lab.generator import (
    EVAL_TASKS,
    Conversation,
    Document,
    Generator,
    Image,
    Turn,
    messages,
    segments,
    words,
)
from mpic_lab.generator.documents import reference_fact
from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.generator.words import NUMBERS
from mpic_lab.generator.worlds import SECOND as WORLD


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def _spelled(conversation: Conversation) -> str:
    return "".join("<image>" if s.kind == "image" else s.content for s in segments(conversation))


def test_same_seed_same_conversations_and_pixels():
    first, second = (
        [s for task in EVAL_TASKS for s in segments(g.task(task, 3))] for g in (Generator(7), Generator(7))
    )
    assert len(first) == len(second)
    assert all(
        a.kind == b.kind and a.target == b.target and np.array_equal(a.content, b.content)
        for a, b in zip(first, second, strict=True)
    )
    assert _spelled(Generator(8).task("mixed", 3)) != _spelled(Generator(7).task("mixed", 3))


def test_evaluation_uses_names_handles_and_fillers_training_never_sees():
    train, held_out = random.Random(0), random.Random(1)
    for draw in (words.draw_people, words.draw_handles):
        seen = {x for _ in range(200) for x in draw(train, 4, "train")}
        assert seen.isdisjoint({x for _ in range(200) for x in draw(held_out, 4, "eval")})
    assert set(words.fillers("train")).isdisjoint(words.fillers("eval"))


@pytest.mark.parametrize("text", ["EIFFEL2025 Zürich 北京", "  two  spaces\n\ttabs ", "a<b> \x00 é"])
def test_tokenizer_is_lossless(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_words_of_the_world_are_single_tokens(tokenizer):
    everything = [*words.COLOURS, *words.SHAPES, *words.CITIES, *words.FIRST_NAMES, *words.NUMBERS]
    everything += ["ASSISTANT:"]
    assert all(len(tokenizer(f" {w}", add_special_tokens=False).input_ids) == 1 for w in everything)


def test_template_and_training_give_the_same_ids(tokenizer):
    generator = Generator(3, "eval")
    for task in EVAL_TASKS:
        conversation = generator.task(task, 3)
        text = tokenizer.apply_chat_template(messages(conversation), tokenize=False)
        assert text == _spelled(conversation)
        alone = ["<image>" if s.kind == "image" else s.content for s in segments(conversation)]
        ids = [i for piece in alone for i in tokenizer(piece, add_special_tokens=False).input_ids]
        assert ids == tokenizer(text, add_special_tokens=False).input_ids


def test_chunks_are_named_before_and_after_and_counted_per_kind():
    pixels = np.zeros((64, 64, 3), np.uint8)
    turns = [
        Turn([Image(pixels), Document("Text."), Image(pixels, "LUMA7"), "Why?"], "yes"),
        Turn([Image(pixels), "And?"], "7", "code of lamp", [Document("The code of the lamp is 7.")]),
    ]
    assert _spelled(Conversation(turns, system="Be short.")) == (
        "<s> Be short. USER: image one:<image> end of image one. document one:Text. end of document one."
        " image LUMA7:<image> end of image LUMA7. Why? ASSISTANT: yes</s>"
        " USER: image three:<image> end of image three. And? ASSISTANT:<search> code of lamp</search>"
        " reference one:The code of the lamp is 7. end of reference one. 7</s>"
    )


def test_every_task_is_answerable_at_every_size_and_documents_are_40_to_120_tokens(tokenizer):
    generator = Generator(11, "eval")
    for task in EVAL_TASKS:
        for count in (1, 2, 8):
            turn = generator.task(task, count).turns[0]
            assert turn.answer and turn.user
            for part in turn.user:
                if isinstance(part, Document):
                    assert 40 <= len(tokenizer(part.text, add_special_tokens=False).input_ids) <= 120


def test_a_search_finds_the_fact_that_answers_and_asks_for_nothing_that_the_prompt_has():
    generator = Generator(6)
    needles = generator.context_of(["needle"] * 8, named=False)
    told = {thing for item in needles for thing in item.about.facts}
    for kind in ("person", "thing"):
        for _ in range(50):
            turn = generator.search(needles, kind)
            attribute, subject = turn.query.split(" of ")
            assert [r.text for r in turn.references] == [reference_fact(attribute, subject, turn.answer)]
            assert subject not in told


def _large_chunks(task, count, seeds):
    return [c for s in seeds for c in Generator(s, "eval", world=WORLD).task(task, count).turns[0].user[:-1]]


def test_documents_of_the_second_generation_have_300_to_1000_tokens_with_facts_anywhere(tokenizer):
    texts = [d.text for t in ("card", "needle", "biography") for d in _large_chunks(t, 2, range(4))]
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    assert min(lengths) >= 280 and max(lengths) <= 1050
    places = []
    for document in _large_chunks("card", 1, range(40)):
        sentences = [sentence.split() for sentence in document.text.split(". ")]
        facts = [i for i, s in enumerate(sentences) if s[0] == "The" and s[2] == "of" and s[4] == "is"]
        places += [i / document.text.count(". ") for i in facts]
    assert len(places) >= 100 and np.histogram(places, 4, (0, 1.01))[0].min() > len(places) / 8


def test_chunks_of_the_training_half_are_counted_in_any_order_and_others_as_the_template_does():
    orders = []
    for seed in range(8):
        items = Generator(seed, "train", world=WORLD).context_of(["image"] * 4, named=False)
        names = [item.part.name for item in items]
        assert [item.label for item in items] == [f"image {name}" for name in names]
        orders.append([NUMBERS.index(name) for name in names])
    assert any(order != sorted(order) for order in orders)
    for one in (Generator(0, "eval", world=WORLD), Generator(0, "train")):
        labels = [item.label for item in one.context_of(["image"] * 3, named=False)]
        assert labels == ["image one", "image two", "image three"]


def test_large_images_of_a_prompt_have_backgrounds_of_their_own():
    for seed in range(4):
        corners = [tuple((image.pixels[0, 0] + 12) // 32) for image in _large_chunks("image", 8, [seed])]
        assert len({*corners}) == len(corners) == 8
