"""Draws conversations, each a question of one task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpic_lab.generator import documents, questions
from mpic_lab.generator.chunks import KINDS, NAMED, ChunkGenerator, Labelled
from mpic_lab.generator.conversation import Conversation, Document, Part, Turn, fill_in
from mpic_lab.generator.documents import Fact
from mpic_lab.generator.images import Scene, draw_scene
from mpic_lab.generator.wordings import draw
from mpic_lab.generator.words import OBJECTS, draw_people

_TRIES = 4  # at a question that differs from those asked, for each that is wanted


class Generator(ChunkGenerator):
    """Draws conversations from a seed. The same seed, split and world give the same conversations."""

    # questions

    def about(self, item: Labelled, kind: str | None = None) -> questions.Question:
        """Return a question about one chunk."""
        if isinstance(item.about, Scene):
            return questions.about_image(self.rng, self.asking, item.about, item.label, kind)
        return questions.about_document(self.rng, self.asking, item.about, item.label)

    def compare(self, items: list[Labelled], kind: str | None = None) -> questions.Question | None:
        """Return a comparison of two of the images, if there are two that can be compared."""
        scenes = [(i.label, i.about) for i in items if isinstance(i.about, Scene)]
        if len(scenes) < 2:
            return None
        return questions.compare(self.rng, self.asking, *self.rng.sample(scenes, 2), kind=kind)

    def hop(self, items: list[Labelled]) -> questions.Question | None:
        """Return a two-hop question, if someone's friend has a biography here too."""
        people = {fact.subject: fact for fact in _people(items)}
        having = [p for p in people.values() if p.facts.get("friend") in people]
        if not having:
            return None
        person = self.rng.choice(having)
        return questions.two_hop(self.rng, self.asking, person, people[person.facts["friend"]])

    def both(self, items: list[Labelled]) -> questions.Question | None:
        """Ask whether two people share a city or a job, if two have a biography here."""
        people = _people(items)
        return questions.both(self.rng, self.asking, *self.rng.sample(people, 2)) if len(people) > 1 else None

    def last(self, items: list[Labelled]) -> questions.Question | None:
        """Return a question about the person who comes last, told by order alone."""
        people = _people(items)
        if not people:
            return None
        key = self.rng.choice(("city", "job"))
        text = questions.ask(self.rng, self.asking, f"last {key}")
        return questions.Question(f"last {key}", text, people[-1].facts[key], f"last {key}")

    def search(self, items: list[Labelled], kind: str) -> Turn:
        """Return a question that only the library can answer: about a ``person``, a ``thing`` or a ``picture``."""
        rng, split, asking = self.rng, self.split, self.asking
        if kind == "picture":
            scene = draw_scene(rng, rng.randint(2, 4), digits=False)
            (_, colour, shape), (_, answer, other) = rng.sample(scene.objects, 2)
            wanted = f"{colour} {shape}"
            found = self.image(scene)
            query = f"picture with a {wanted}"
            if rng.random() < 0.5:
                text = questions.ask(rng, asking, "library colour", x=wanted, y=other)
            else:
                text, answer = questions.ask(rng, asking, "library", x=wanted), str(len(scene.objects))
            return Turn([text], answer, query, [found], "search picture")
        if kind == "thing":
            present = {key for i in items if isinstance(i.about, Fact) for key in i.about.facts}
            subject = rng.choice([o for o in OBJECTS if o not in present])
            attribute, text = "code", questions.ask(rng, asking, "needle", x=subject)
        else:
            present = {i.about.subject for i in items if isinstance(i.about, Fact)}
            subject = next(p for p in iter(lambda: draw_people(rng, 1, split)[0], None) if p not in present)
            attribute = rng.choice(questions.ATTRIBUTES)
            text = questions.ask(rng, asking, attribute, x=subject)
        value = documents.draw_value(rng, attribute)
        fact = Document(documents.reference_fact(attribute, subject, value))
        return Turn([text], value, f"{attribute} of {subject}", [fact], f"search {kind}")

    # conversations

    def _word_level(self, items: list[Labelled]) -> Turn | None:
        """Return a comparison whose two images stand inside the sentence."""
        if not all(isinstance(i.about, Scene) for i in items):
            return None
        (a, b), rng = items, self.rng
        scenes = (a.label, a.about), (b.label, b.about)
        # most pairs do not allow a question about one colour, so training tries that first, then the other kind
        kinds = [rng.choice(("more", "same"))]
        if self.split == "train":
            kinds = ["same"] * 4 + ["more"] if rng.random() < 0.7 else ["more"]
        tried = (questions.compare(rng, self.asking, *scenes, kind=kind) for kind in kinds)
        question = next((q for q in tried if q), None)
        if question is None:
            return None
        slots: dict[str, Part] = {"A": a.part, "B": b.part, "x": question.shape}
        wording = draw(rng, self.asking, f"word {question.kind}")
        return Turn(fill_in(wording, slots), question.answer, kind=f"word {question.kind}")

    def few_shot(self, count: int) -> Conversation:
        """Return images each followed by its colour (or its shape); the last one is left to the model."""
        rng = self.rng
        by_colour = rng.random() < 0.5
        parts: list[Part] = []
        answer = ""
        for i in range(count):
            scene = draw_scene(rng, 1, digits=False)
            _, colour, shape = scene.objects[0]
            answer = colour if by_colour else shape
            parts += [self.image(scene), f"It is {answer}." if i < count - 1 else "It is"]
        return Conversation([Turn(parts, answer, kind="few-shot")], task="few-shot")

    def task(self, name: str, count: int) -> Conversation:
        """Draw one evaluation question of a task over `count` chunks."""
        return self.branches(name, count, 1)[0]

    def branches(self, name: str, count: int, size: int) -> list[Conversation]:
        """Return up to `size` different evaluation questions of a task, each a conversation over the same `count`
        chunks.

        At least one; how many there can be depends on the task and on what was drawn.
        """
        while True:
            conversations = EVAL_TASKS[name](self, count, size)
            if conversations:
                return [replace(c, task=name) for c in conversations]

    def single(
        self,
        size: int,
        kinds: list[str],
        ask: Callable[[list[Labelled]], questions.Question | None],
        named: bool = False,
    ) -> list[Conversation]:
        """Return conversations of one question each over the same chunks of these kinds, none if none can be asked."""
        items = self.context_of(kinds, named)
        asked: dict[str, Conversation] = {}
        for _ in range(1 if size == 1 else _TRIES * size):
            question = ask(items)
            if question is not None:
                turn = Turn([*(i.part for i in items), question.text], question.answer, kind=question.kind)
                asked.setdefault(question.key, Conversation([turn]))
            if len(asked) == size:
                break
        return list(asked.values())

    def single_search(self, size: int, count: int, kind: str) -> list[Conversation]:
        """Return questions for the library over a context that does not have the answer, one a conversation."""
        items = self.context(count)
        asked: dict[str | None, Conversation] = {}
        while len(asked) < size:
            turn = self.search(items, kind)
            turn = replace(turn, user=[*(i.part for i in items), *turn.user])
            asked.setdefault(turn.query, Conversation([turn]))
        return list(asked.values())

    def word_level(self) -> list[Conversation]:
        """Draw one comparison with both images inside the sentence, or none."""
        turn = self._word_level(self.context_of(["image", "image"], self.rng.random() < NAMED))
        return [Conversation([turn])] if turn else []


def _people(items: list[Labelled]) -> list[Fact]:
    return [i.about for i in items if isinstance(i.about, Fact) and i.about.subject]


def _one(kind: str | None, question: str | None = None, named: bool = False):
    def build(g: Generator, count: int, size: int) -> list[Conversation]:
        kinds = [kind or g.rng.choice(KINDS) for _ in range(count)]
        if kind is None and count > 1:
            kinds[:2] = g.rng.sample(["image", g.rng.choice(["card", "biography", "needle"])], 2)
        return g.single(size, kinds, lambda items: g.about(g.rng.choice(items), question), named)

    return build


EVAL_TASKS: dict[str, Callable[[Generator, int, int], list[Conversation]]] = {
    "image": _one("image"),
    "image named": _one("image", named=True),
    "caption": _one("image", "caption"),
    "compare": lambda g, n, size: g.single(size, ["image"] * max(2, n), g.compare),
    "word level": lambda g, n, size: g.word_level(),  # always two chunks
    "few-shot": lambda g, n, size: [g.few_shot(max(2, n))],
    "card": _one("card"),
    "card named": _one("card", named=True),
    "needle": _one("needle"),
    "biography": _one("biography"),
    "two-hop": lambda g, n, size: g.single(size, ["biography"] * max(2, n), g.hop),
    "both people": lambda g, n, size: g.single(size, ["biography"] * max(2, n), g.both),
    "last person": lambda g, n, size: g.single(size, ["biography"] * n, g.last),
    "mixed": _one(None),
    "search person": lambda g, n, size: g.single_search(size, n, "person"),
    "search thing": lambda g, n, size: g.single_search(size, n, "thing"),
    "search picture": lambda g, n, size: g.single_search(size, n, "picture"),
}
"""Questions of each task over `count` chunks, at most `size` of them; none when the drawn chunks allow none."""
