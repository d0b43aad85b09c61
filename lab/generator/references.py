"""The reference sets of `data/references` and, of the second generation, `data/references-large`: 200 images and texts
for a retrieval library, and queries with the truth.

    python -m mpic_lab.generator.references [--generation 1|2] [--out FOLDER] [--seed N]

All of it is from the held-out half of the generated world. `references.jsonl` has one entry a line: pictures
(`path`), one-sentence facts and descriptions of pictures (`text`). `queries.jsonl` holds what finds which entry:

    task   text->image, image->text or text->text: what is asked with, and what kind of entry is the truth
    form   caption, search (the call the demo model makes), question (what a person asks; with `answer`), picture
    truth  the id of the one entry that answers it

Thirty pictures have an object (`metadata.key`) that is in no other entry, so that "picture with a red circle" has one
answer. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from mpic.data.bundled import REFERENCES
from mpic_lab.generator import questions
from mpic_lab.generator.conversation import number_word
from mpic_lab.generator.documents import draw_value, reference_fact
from mpic_lab.generator.images import Scene, draw_scene
from mpic_lab.generator.words import COLOURS, OBJECTS, POSITIONS, SHAPES, draw_people
from mpic_lab.generator.worlds import WORLDS

SEED = 30
KEYED, PLAIN, DESCRIBED, PEOPLE, THINGS = 30, 60, 40, 20, 10
COMMON = 3  # colours of each shape that any picture may have; the others are kept for keys

FRAMES = (
    "A picture that shows {c}.",
    "image of {c}",
    "This is a picture with {n}: {c}.",
    "in this image: {c}",
)
PLACES = ("{o} in the {p}", "at the {p} {o}")


def caption(rng: random.Random, scene: Scene) -> str:
    """Return all objects of a scene with their places, in one of many wordings and orders."""
    objects = list(scene.objects)
    if rng.random() < 0.5:
        rng.shuffle(objects)
    place = rng.choice(PLACES)
    parts = [
        place.format(o=f"{'an' if c == 'orange' else 'a'} {c} {s}", p=POSITIONS[q]) for q, c, s in objects
    ]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    text = ", ".join(parts) if rng.random() < 0.6 else joined
    count = len(objects) if rng.random() < 0.5 else number_word(len(objects))
    shapes = f"{count} shape{'s' * (len(objects) > 1)}"
    return rng.choice(FRAMES).format(c=text, n=shapes)


class ReferenceSet:
    """Entries and queries, drawn from a seed; `generation` is that of the pictures."""

    def __init__(self, seed: int = SEED, generation: int = 1) -> None:
        self.world = WORLDS[generation]
        self.rng = random.Random(f"references-{seed}")
        self.pixels: dict[str, Any] = {}  # path -> image
        self.entries: list[dict[str, Any]] = []
        self.queries: list[dict[str, Any]] = []
        self.scenes: set[Scene] = set()
        self._pictures()
        self._descriptions()
        self._facts()

    def _add(self, kind: str, stem: str, title: str, metadata: dict[str, Any], **content: Any) -> str:
        number = 1 + sum(e["id"].startswith(stem) for e in self.entries)
        id = f"{stem}-{number:03d}"
        if kind == "image":
            content = {"path": self._draw(f"images/{id}.png", content["scene"])}
        entry = {"id": id, "title": title.format(n=number), "kind": kind, **content, "metadata": metadata}
        self.entries.append(entry)
        return id

    def _ask(self, task: str, form: str, truth: str, **content: Any) -> None:
        id = f"q{len(self.queries) + 1:03d}"
        self.queries.append({"id": id, "task": task, "form": form, "truth": truth, **content})

    def _draw(self, path: str, scene: Scene) -> str:
        self.pixels[path] = self.world.render(scene, self.rng, "eval")
        return path

    def _scene(self, key: tuple[str, str] | None = None) -> Scene:
        """Return a scene of common objects and digits (or of the key and common objects) that no other entry shows."""
        while True:
            scene = draw_scene(self.rng, digits=key is None)
            objects = {(c, s) for _, c, s in scene.objects}
            rest = {o for o in objects - {key} if o[1] in SHAPES}
            fits = rest <= self.common and (key is None or (key in objects and len(objects) > 1))
            if fits and scene not in self.scenes:
                self.scenes.add(scene)
                return scene

    def _pictures(self) -> None:
        rng = self.rng
        self.common = {(c, s) for s in SHAPES for c in rng.sample(list(COLOURS), COMMON)}
        keys = rng.sample([(c, s) for c in COLOURS for s in SHAPES if (c, s) not in self.common], KEYED)
        for key in keys:
            scene = self._scene(key)
            id = self._picture(scene, " ".join(key))
            self._ask("text->image", "search", id, text=f"picture with a {' '.join(key)}")
            others = [o for o in scene.objects if o[1:] != key]
            _, colour, shape = rng.choice(others)
            text = questions.ask(rng, "eval", "library colour", x=" ".join(key), y=shape)
            self._ask("text->image", "question", id, text=text, answer=colour)
            text = questions.ask(rng, "eval", "library", x=" ".join(key))
            self._ask("text->image", "question", id, text=text, answer=str(len(scene.objects)))
        for _ in range(PLAIN):
            self._picture(self._scene())

    def _picture(self, scene: Scene, key: str | None = None) -> str:
        metadata: dict[str, Any] = {"objects": _objects(scene), "count": len(scene.objects)}
        if key:
            metadata["key"] = key
        id = self._add("image", "picture", "Picture {n}", metadata, scene=scene)
        self._ask("text->image", "caption", id, text=caption(self.rng, scene))
        return id

    def _descriptions(self) -> None:
        """Add texts about pictures that are not in the library themselves."""
        for _ in range(DESCRIBED):
            scene = self._scene()
            metadata = {"objects": _objects(scene), "count": len(scene.objects)}
            text = f"A picture that shows {scene.caption()}."
            id = self._add("text", "description", "Description {n}", metadata, text=text)
            self._ask("image->text", "picture", id, path=self._draw(f"queries/{id}.png", scene))
            self._ask("text->text", "caption", id, text=caption(self.rng, scene))

    def _facts(self) -> None:
        rng = self.rng
        subjects = [(p, a) for p in draw_people(rng, PEOPLE, "eval") for a in questions.ATTRIBUTES]
        for subject, attribute in [*subjects, *((t, "code") for t in rng.sample(OBJECTS, THINGS))]:
            value = draw_value(rng, attribute)
            metadata = {"subject": subject, "attribute": attribute, "value": value}
            text = reference_fact(attribute, subject, value)
            id = self._add("text", "fact", f"{subject}, {attribute}", metadata, text=text)
            self._ask("text->text", "search", id, text=f"{attribute} of {subject}")
            kind = "needle" if attribute == "code" else attribute
            asked = questions.ask(rng, "eval", kind, x=subject)
            self._ask("text->text", "question", id, text=asked, answer=value)

    def write(self, folder: Path) -> None:
        """Write entries, queries and images; other files in the folder are left alone."""
        for path, pixels in self.pixels.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            PILImage.fromarray(pixels).save(folder / path, optimize=True)
        for name, rows in (("references.jsonl", self.entries), ("queries.jsonl", self.queries)):
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / name).write_text("".join(lines), encoding="utf-8")


def _objects(scene: Scene) -> list[str]:
    return [f"{c} {s}" for _, c, s in scene.objects]


def load(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (entries, queries) of a written reference set; paths are absolute."""

    def rows(name: str) -> Iterator[dict[str, Any]]:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row | ({"path": str(folder / row["path"])} if "path" in row else {})

    return list(rows("references.jsonl")), list(rows("queries.jsonl"))


def main() -> None:
    """Write the reference set."""
    parser = argparse.ArgumentParser(description="Write the retrieval reference set.")
    parser.add_argument("--generation", type=int, choices=sorted(WORLDS), default=2, help="of the demo model")
    parser.add_argument("--out", type=Path, help="folder (default: where that of the generation is)")
    parser.add_argument("--seed", type=int, default=SEED, help="another seed gives another library")
    args = parser.parse_args()
    references, out = ReferenceSet(args.seed, args.generation), args.out or REFERENCES[args.generation]
    references.write(out)
    print(f"{len(references.entries)} entries and {len(references.queries)} queries in {out}")


if __name__ == "__main__":
    main()
