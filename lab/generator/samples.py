"""The sample images and documents, with questions and the answers they must get: those of the first generation in
`data/samples`, those of the second in `data/samples-large`.

    python -m mpic_lab.generator.samples [--generation 1|2] [--out FOLDER] [--seed N]

Ten images and eight documents with handles, in the held-out half of the generated world: sprites, names, handles and
filler sentences that training never sees. So are the wordings of most questions; comparisons inside a sentence, the
last person and one "where" are asked in wordings of the training half, because the demo model is unsure in others, and
so are the questions over eight images. Which questions are asked was chosen from what the models can answer.
Every question is built as one of the generator's own conversations and then written as a client would send it, with
`IMAGE#NAME` and `FILE#NAME` in the text or as parts, so that a server spells it as the demo models were taught. The
same seed gives the same files.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image as PILImage

from mpic.data.bundled import SAMPLES
from mpic_lab.generator import documents, questions
from mpic_lab.generator.conversation import Conversation, Document, Image, Part, Turn
from mpic_lab.generator.documents import Fact
from mpic_lab.generator.images import BACKGROUNDS, POSITIONS, Scene
from mpic_lab.generator.wordings import WORDINGS
from mpic_lab.generator.worlds import WORLDS

SEED = 20
FOLDERS = {1: SAMPLES["demo"], 2: SAMPLES["large"]}
"""Generation -> where its samples are."""

# handle -> what is in the four quadrants: top left, top right, bottom left, bottom right
IMAGES: dict[str, tuple[str, str, str, str]] = {
    "EIFFEL2025": ("red circle", "", "", "blue star"),
    "LOUVRE2025": ("", "green triangle", "yellow ring", "purple square"),
    "BEACH": ("yellow circle", "cyan cross", "orange star", "blue triangle"),
    "TOWER": ("", "white 7", "red square", ""),
    "HOME": ("", "", "green cross", ""),
    "GARDEN": ("blue star", "white ring", "", "green circle"),
    "PARTY": ("purple triangle", "orange 3", "cyan square", "red ring"),
    "LOGO4": ("", "orange square", "", ""),
    "MAP7": ("cyan ring", "", "purple star", "yellow cross"),
    "CAT9": ("red circle", "", "white triangle", ""),
}
# handle -> (person, friend)
BIOGRAPHIES = {
    "VERA": ("Grace Hart", "Hugo Reed"),
    "NICO": ("Hugo Reed", "Sam Brook"),
    "TOMA": ("Sam Brook", None),
    "KARO": ("Emma Page", "Grace Hart"),
}
CARDS = ("OFFICE", "MENU6")
NEEDLES = {"PLAN5": "piano", "ALPS3": "camera"}
EIGHT_IMAGES = "eight-images"
"""The kind of the questions that the headline of `mpic demo` is measured with."""


class SampleQuestion(NamedTuple):
    """A conversation whose last answer is the expected one; `as_parts` sends chunks as parts, not in the text."""

    id: str
    kind: str
    conversation: Conversation
    as_parts: bool = False


class Samples:
    """The chunks by handle, and questions about them."""

    def __init__(self, seed: int = SEED, generation: int = 2) -> None:
        self.rng = random.Random(f"samples-{seed}")
        self.generation, self.world = generation, WORLDS[generation]
        self.scenes = {handle: _scene(cells) for handle, cells in IMAGES.items()}
        if self.world.scattered:  # those that can be in one prompt have backgrounds of their own
            places = range(len(BACKGROUNDS))
            backgrounds = random.Random(f"backgrounds-{seed}").sample(places, len(self.scenes))
            self.scenes = {
                handle: replace(scene, background=background)
                for (handle, scene), background in zip(self.scenes.items(), backgrounds, strict=True)
            }
        self.facts = dict(self._facts())
        self.chunks: dict[str, Image | Document] = {}
        for handle, scene in self.scenes.items():
            self.chunks[handle] = Image(self.world.render(scene, self.rng, "eval"), handle)
        for handle, fact in self.facts.items():
            self.chunks[handle] = Document(fact.text, handle)

    def _facts(self) -> Iterator[tuple[str, Fact]]:
        words, scattered = self.world.words, self.world.scattered
        for handle, (person, friend) in BIOGRAPHIES.items():
            yield handle, documents.biography(self.rng, "eval", person, friend, words, scattered)
        for handle in CARDS:
            yield handle, documents.card(self.rng, "eval", words, handle if scattered else "")
        for handle, thing in NEEDLES.items():
            yield handle, documents.needle(self.rng, "eval", thing, words)

    def label(self, handle: str) -> str:
        """Returns the chunk's name in the prompt, such as `image TOWER`."""
        return f"{'image' if handle in self.scenes else 'document'} {handle}"

    def _ask(self, kind: str, taught: bool = False, **slots: str) -> str:
        """Returns a held-out wording, or (`taught`) the first one that training has."""
        held_out = questions.ask(self.rng, "eval", kind, **slots)
        return WORDINGS["train"][kind][0].format(**slots) if taught else held_out

    # one turn per question: (text, answer)

    def _image(self, handle: str, kind: str, at: int = 0, taught: bool = False) -> tuple[str, str]:
        """Returns a question about the object in quadrant `at` of an image, or about all of it."""
        scene = self.scenes[handle]
        thing = scene.at(at)
        colour, _, shape = thing.partition(" ")
        slot, answer = {
            "colour": (shape, colour),
            "shape": (colour, shape),
            "position": (POSITIONS[at], thing),
            "where": (thing, POSITIONS[at]),
            "count": ("", str(len(scene.objects))),
            "digit": ("", shape),
            "caption": ("", scene.caption()),
        }[kind]
        return self._ask(kind, taught, L=self.label(handle), x=slot), answer

    def _card(self, handle: str, at: int = 0) -> tuple[str, str]:
        fact = self.facts[handle]
        key, value = list(fact.facts.items())[at]
        return self._ask("card", L=fact.title or self.label(handle), x=key), value

    def _needle(self, handle: str) -> tuple[str, str]:
        ((thing, code),) = self.facts[handle].facts.items()
        return self._ask("needle", x=thing), code

    def _person(self, handle: str, key: str) -> tuple[str, str]:
        fact = self.facts[handle]
        return self._ask(key, x=fact.subject), fact.facts[key]

    def _friend(self, handle: str, friend: str, key: str) -> tuple[str, str]:
        person, other = self.facts[handle], self.facts[friend]
        assert person.facts["friend"] == other.subject
        verb = {"city": "lives in", "job": "works as a"}[key]
        text = self._ask(f"friend {key}", x=person.subject)
        return text, f"{other.subject} {verb} {other.facts[key]}"

    def _more(self, a: str, b: str) -> Conversation:
        """Asks which of two images shows more shapes, with both inside the sentence."""
        first, second = (len(self.scenes[h].objects) for h in (a, b))
        parts = ["Which has more shapes,", self.chunks[a], "or", self.chunks[b], "?"]
        verdict = "first" if first > second else "second"
        return Conversation([Turn(parts, f"{first} and {second}, so the {verdict}")])

    def _over(self, handles: str, *turns: tuple[str, str], system: str | None = None) -> Conversation:
        """Returns one conversation: chunks first, then questions, as turns."""
        asked = [Turn([text], answer) for text, answer in turns]
        asked[0].user = [*(self.chunks[h] for h in handles.split()), *asked[0].user]
        return Conversation(asked, system)

    @functools.cached_property
    def questions(self) -> list[SampleQuestion]:
        """All questions, from one image to eight chunks of both kinds. The second generation is asked about eight
        images, too, and neither to compare images nor who comes last, which it has not learnt."""
        first = self.generation == 1
        person, friend, other = ("VERA", "NICO", "TOMA") if first else ("NICO", "TOMA", "KARO")
        people = self._friend(person, friend, "city")
        place = self._image("MAP7", "position", 2)
        # drawn here, so that the wordings stay what they were
        orders = list(self._last_person() if first else self._either_order())
        return [
            SampleQuestion(
                "colour", "image", self._over("EIFFEL2025", self._image("EIFFEL2025", "colour", 0))
            ),
            SampleQuestion(
                "position", "image", self._over("BEACH", self._image("BEACH", "position", 1)), True
            ),
            SampleQuestion("digit", "image", self._over("TOWER", self._image("TOWER", "digit", 1))),
            SampleQuestion(
                "caption", "image", self._over("LOUVRE2025", self._image("LOUVRE2025", "caption"))
            ),
            *(self._comparisons() if first else self._two_images()),
            SampleQuestion(
                "one-of-four",
                "images",
                self._over("PARTY GARDEN LOGO4 HOME", self._image("GARDEN", "shape", 1)),
                True,
            ),
            SampleQuestion("three-images", "order", self._over("MAP7 CAT9 BEACH", place)),
            SampleQuestion("three-images-reversed", "order", self._over("BEACH CAT9 MAP7", place)),
            SampleQuestion("card", "document", self._over("OFFICE", self._card("OFFICE"))),
            SampleQuestion(
                "hidden-code", "documents", self._over("PLAN5 ALPS3 MENU6", self._needle("ALPS3")), True
            ),
            SampleQuestion("biography", "documents", self._over("TOMA KARO", self._person("KARO", "job"))),
            SampleQuestion("two-hop", "two-hop", self._over(f"{person} {friend}", people)),
            SampleQuestion("two-hop-reversed", "two-hop", self._over(f"{friend} {other} {person}", people)),
            *orders,
            SampleQuestion(
                "image-and-documents",
                "mixed",
                self._over("OFFICE TOWER VERA", self._image("TOWER", "where", 2, taught=True)),
            ),
            SampleQuestion(
                "eight-chunks",
                "mixed",
                self._over("HOME OFFICE PARTY KARO PLAN5 CAT9 EIFFEL2025 MENU6", self._needle("PLAN5")),
                True,
            ),
            SampleQuestion(
                "three-turns",
                "multi-turn",
                self._over(
                    "PARTY MENU6",
                    self._image("PARTY", "count"),
                    self._card("MENU6", 1),
                    self._image("PARTY", "colour", 3),
                ),
            ),
            *(() if first else self._eight_images()),
        ]

    def _comparisons(self) -> Iterator[SampleQuestion]:
        yield SampleQuestion("more-shapes", "images in a sentence", self._more("EIFFEL2025", "BEACH"))
        yield SampleQuestion("fewer-shapes", "images in a sentence", self._more("BEACH", "GARDEN"))

    def _two_images(self) -> Iterator[SampleQuestion]:
        star = self._image("GARDEN", "position", 0)
        yield SampleQuestion("two-images", "images", self._over("BEACH GARDEN", star))
        yield SampleQuestion("two-images-reversed", "images", self._over("GARDEN BEACH", star))

    def _last_person(self) -> Iterator[SampleQuestion]:
        last = self._ask("last city", taught=True)
        for id, order in (("last-person", "NICO TOMA"), ("last-person-reversed", "TOMA NICO")):
            city = self.facts[order.split()[-1]].facts["city"]
            yield SampleQuestion(id, "order", self._over(order, (last, city)))

    def _either_order(self) -> Iterator[SampleQuestion]:
        pet = self._person("KARO", "pet")
        yield SampleQuestion("person", "order", self._over("VERA KARO", pet))
        yield SampleQuestion("person-reversed", "order", self._over("KARO VERA", pet))

    def _eight_images(self) -> Iterator[SampleQuestion]:
        """Yields questions over the same eight images, each time in another order and behind an instruction that other
        questions lack, so that no prompt begins as another does."""
        handles = list(IMAGES)[:8]
        asked = (
            ("GARDEN", "colour", 3), ("EIFFEL2025", "shape", 3), ("LOUVRE2025", "shape", 2), ("PARTY", "digit", 1),
            ("BEACH", "shape", 2), ("TOWER", "colour", 2),
        )  # fmt: skip
        for turn, (handle, kind, at) in enumerate(asked):
            order = handles[turn:] + handles[:turn]
            question = self._over(
                " ".join(order),
                self._image(handle, kind, at, taught=True),
                system="Please answer in a few words.",
            )
            yield SampleQuestion(f"{EIGHT_IMAGES}-{turn + 1}", EIGHT_IMAGES, question)

    def manifest(self) -> dict[str, Any]:
        """Returns the content of `manifest.json`."""
        entries = []
        for handle, chunk in self.chunks.items():
            kind = "image" if isinstance(chunk, Image) else "text"
            entries.append({"path": _path(chunk), "handle": handle, "kind": kind})
        asked = []
        for question in self.questions:
            *before, last = chat(question.conversation, question.as_parts)
            entry = {
                "id": question.id,
                "kind": question.kind,
                "messages": before,
                "expected": last["content"],
            }
            asked.append(entry)
        return {"files": entries, "questions": asked}

    def write(self, folder: Path) -> None:
        """Writes the files and the manifest; other files in the folder are left alone."""
        folder.mkdir(parents=True, exist_ok=True)
        for chunk in self.chunks.values():
            path = folder / _path(chunk)
            if isinstance(chunk, Image):
                PILImage.fromarray(chunk.pixels).save(path, optimize=True)
            else:
                path.write_text(chunk.text, encoding="utf-8")
        text = json.dumps(self.manifest(), indent=2, ensure_ascii=False)
        (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def _scene(cells: tuple[str, str, str, str]) -> Scene:
    return Scene(tuple((q, *cell.split()) for q, cell in enumerate(cells) if cell))  # type: ignore[misc]


def _path(chunk: Image | Document) -> str:
    assert chunk.name
    return f"{chunk.name.lower()}.{'png' if isinstance(chunk, Image) else 'txt'}"


def chat(conversation: Conversation, as_parts: bool = False) -> list[dict[str, Any]]:
    """Returns a conversation over named chunks as OpenAI messages: handles in the text, or content parts."""
    out: list[dict[str, Any]] = []
    if conversation.system:
        out.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        if as_parts and any(not isinstance(p, str) for p in turn.user):
            content: Any = [_part(p) for p in turn.user]
        else:
            content = " ".join(_mention(p) for p in turn.user).replace(" ?", "?")
        out += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    return out


def _mention(part: Part) -> str:
    if isinstance(part, str):
        return part
    return f"{'IMAGE' if isinstance(part, Image) else 'FILE'}#{part.name}"


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, Image) else "file", "handle": part.name}


def main() -> None:
    """Write the samples."""
    parser = argparse.ArgumentParser(description="Write the sample images, documents and questions.")
    parser.add_argument("--generation", type=int, choices=sorted(WORLDS), default=2, help="of the demo model")
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: where those of the generation are)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="another seed gives other sprites and facts")
    args = parser.parse_args()
    samples, out = Samples(args.seed, args.generation), args.out or FOLDERS[args.generation]
    samples.write(out)
    print(f"{len(samples.chunks)} files and {len(samples.questions)} questions in {out}")


if __name__ == "__main__":
    main()
