"""A needle at a chosen depth of a context of a chosen length, cut into documents: the grid of depth and length."""

from __future__ import annotations

from mpic.data.generator.conversation import Conversation, Document, Turn
from mpic.data.generator.documents import length_of, reference_fact
from mpic.data.generator.questions import ask
from mpic.data.generator.tasks import Generator
from mpic.data.generator.words import OBJECTS, draw_code, fillers

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (500, 1000, 2000, 4000, 7000)  # words and marks of the documents together: about as many tokens
LONGEST = 900  # of a document


def needle_grid(generator: Generator, depth: float, length: int, others: int = 3) -> Conversation:
    """One question after the code of a thing.

    Args:
        generator: draws things, codes and filler.
        depth: where the sentence with the code stands, from 0 (before all filler) to 1 (after it).
        length: words and marks of all documents together.
        others: codes of other things at random depths.
    """
    rng = generator.rng
    things = rng.sample(OBJECTS, others + 1)
    codes = {thing: draw_code(rng) for thing in things}
    count = max(1, round(length / LONGEST + 0.49))
    texts: list[list[str]] = [[] for _ in range(count)]
    for text in texts:
        size = 0
        while size < length / count - 12:
            text.append(rng.choice(fillers(generator.split)))
            size += length_of(text[-1])
    sentences = sum(map(len, texts))
    places = [round(depth * sentences), *(rng.randint(0, sentences) for _ in range(others))]
    for thing, place in sorted(zip(things, places, strict=True), key=lambda pair: -pair[1]):
        document = 0
        while document < count - 1 and place > len(texts[document]):
            place -= len(texts[document])
            document += 1
        texts[document].insert(place, reference_fact("code", thing, codes[thing]))
    asked = ask(rng, generator.asking, "needle", x=things[0])
    parts = [Document(" ".join(text)) for text in texts]
    tags = {"depth": depth, "length": length}
    return Conversation(
        [Turn([*parts, asked], codes[things[0]], kind="needle")], task="needle grid", tags=tags
    )
