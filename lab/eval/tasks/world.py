"""Tasks of the generated world, on held-out sprites, names and wordings (``mpic_lab.generator``).

They stand for the public ones: ``image`` and ``image-named`` for MMDU (several images before a question),
``word-level`` for SparklesEval (images inside a sentence), ``needle`` and ``card`` for needles in a haystack,
``biography`` for biography retrieval, ``two-hop`` for 2WikiMQA, HotpotQA and MuSiQue, ``few-shot`` for SAMSum's
examples in context, ``mixed`` for images and documents together. ``long-text`` has all people in one text, with a
paragraph for each, which KVSplit cuts (``split``, ``tokens``). Images and documents have the sizes of the options'
``generation``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from mpic_lab.eval.tasks.base import Options, Sample, TaskError, task
from mpic_lab.eval.tasks.documents import ask, in_pieces, needle_cells, parts_of
from mpic_lab.generator import EVAL_TASKS, Document, Generator
from mpic_lab.generator.client import messages_of
from mpic_lab.generator.documents import draw_value, reference_fact
from mpic_lab.generator.wordings import draw
from mpic_lab.generator.words import OBJECTS, fillers
from mpic_lab.generator.worlds import WORLDS

_SUMMARIES = {
    "image": "several images, then a question about one of them",
    "image named": "the same, by handle",
    "caption": "describe one of several images",
    "compare": "compare two of several images",
    "word level": "compare two images that stand inside the sentence",
    "few-shot": "images each followed by its label, the last one unlabelled",
    "card": "documents of key and value pairs",
    "card named": "the same, by handle",
    "needle": "a code hidden in one of several documents",
    "biography": "a fact of one of several people",
    "two-hop": "a fact of the friend of one of several people",
    "both people": "whether two of several people share a city or a job: needs both chunks",
    "last person": "a fact of whoever comes last, told by order alone",
    "mixed": "images and documents together",
}


def generator_of(options: Options) -> Generator:
    """Return the held-out half of the world that the options ask for, with a different seed for each number of
    chunks."""
    return Generator(options.seed * 1000 + options.chunks, "eval", world=WORLDS[options.generation])


def _loader(name: str) -> Callable[[Options], Iterator[Sample]]:
    def load(options: Options) -> Iterator[Sample]:
        generator = generator_of(options)
        for number in range(options.questions):
            conversation = generator.task(name, options.chunks)
            answer = conversation.turns[-1].answer
            yield Sample(str(number), messages_of(conversation), (answer,), max_tokens=48)

    return load


for _name, _summary in _SUMMARIES.items():
    assert _name in EVAL_TASKS
    task(f"world-{_name.replace(' ', '-')}", _summary, "em", counts_chunks=True)(_loader(_name))


@task(
    "world-long-text", "a fact of one of several people in one text, cut by `split`", "em", counts_chunks=True
)
def long_text(options: Options) -> Iterator[Sample]:
    """Ask about ``chunks`` people in one text; the splitter decides how many chunks the text becomes."""
    generator = generator_of(options)
    for number in range(options.questions):
        (turn,) = generator.task("biography", options.chunks).turns
        text = "\n\n".join(part.text for part in turn.user if isinstance(part, Document))
        (question,) = (part for part in turn.user if isinstance(part, str))
        yield Sample(str(number), ask(parts_of(text, options), "", question), (turn.answer,), max_tokens=48)


@task("world-niah", "one code in filler, by length (tokens) and depth (percent)", "em")
def needle_grid(options: Options) -> Iterator[Sample]:
    """Hide the code of one object in held-out filler sentences: for every length and depth ``questions`` of them. Ids
    read ``LENGTH@DEPTH#NUMBER``.

    The haystack has at most ``length`` tokens of the model (words, for a judge, who reads the question only), and is
    cut into documents of ``tokens``.
    """
    for length, depth, id, rng in needle_cells(options):
        thing, code = rng.choice(OBJECTS), draw_value(rng, "code")
        text = _haystack(rng, options, length, depth, reference_fact("code", thing, code))
        question = draw(rng, "eval", "needle").format(x=thing)
        yield Sample(id, ask(parts_of(text, in_pieces(options)), "", question), (code,), 16)


def _haystack(rng: random.Random, options: Options, length: int, depth: int, needle: str) -> str:
    """Return the filler sentences that fit into ``length`` tokens, with the needle after ``depth`` percent of them."""
    count = options.count or (lambda text: len(text.split()))
    room, filler = length - count(f" {needle}"), list[str]()
    while (size := count(f" {(sentence := rng.choice(fillers('eval')))}")) <= room:
        filler.append(sentence)
        room -= size
    if not filler:
        raise TaskError(f"world-niah: a haystack of {length} tokens has no room for a needle and a sentence")
    filler.insert(round(len(filler) * depth / 100), needle)
    return " ".join(filler)
