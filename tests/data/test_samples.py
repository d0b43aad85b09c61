"""The samples of both generations: made from their seed, complete, and spelled as in the model's training data."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from mpic.kv.chunk import Chunk, ChunkKey
from mpic.prompt.messages import parse_messages
from mpic.prompt.segments import TextSegment
from mpic.prompt.template import ChatTemplate
from mpic_lab.generator import segments
from mpic_lab.generator.conversation import CHAT_TEMPLATES
from mpic_lab.generator.samples import EIGHT_IMAGES, FOLDERS, Samples, chat
from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.generator.worlds import WORLDS

MANIFESTS = {g: json.loads((folder / "manifest.json").read_text()) for g, folder in FOLDERS.items()}
GENERATIONS = pytest.mark.parametrize("generation", FOLDERS)


class Library:
    """Finds the samples by handle; the text of a document becomes ids through the template, as on a server."""

    def __init__(self, template: ChatTemplate, generation: int) -> None:
        self.chunks = {}
        for entry in MANIFESTS[generation]["files"]:
            path = FOLDERS[generation] / entry["path"]
            if entry["kind"] == "image":
                chunk = Chunk(ChunkKey.of_image(PILImage.open(path)), "me")
            else:
                text = path.read_text()
                chunk = Chunk(ChunkKey.of_text(text), "me", template.tokenize_document(text))
            self.chunks[entry["handle"]] = chunk

    def by_handle(self, kind, name):
        return self.chunks[name]


def template_of(generation: int) -> ChatTemplate:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATES[WORLDS[generation].labels]
    return ChatTemplate(tokenizer, "<image>")


@GENERATIONS
def test_the_same_seed_gives_the_bundled_files(generation: int, tmp_path: Path):
    Samples(generation=generation).write(tmp_path)
    made, bundled = ({p.name: p for p in f.iterdir()} for f in (tmp_path, FOLDERS[generation]))
    assert made.keys() == bundled.keys()
    for name, path in made.items():
        if path.suffix == ".png":  # pixels, because compressors differ
            assert np.array_equal(*(np.asarray(PILImage.open(p)) for p in (path, bundled[name])))
        else:
            assert path.read_bytes() == bundled[name].read_bytes()


def test_another_seed_gives_other_files():
    first, second = Samples(1), Samples(2)
    assert first.facts["VERA"].text != second.facts["VERA"].text
    assert not np.array_equal(first.chunks["BEACH"].pixels, second.chunks["BEACH"].pixels)


@GENERATIONS
def test_the_manifest_covers_what_a_newcomer_should_see(generation: int):
    files, questions = MANIFESTS[generation]["files"], MANIFESTS[generation]["questions"]
    kinds = [entry["kind"] for entry in files]
    assert kinds.count("image") == 10 and kinds.count("text") == 8
    assert len({entry["handle"] for entry in files}) == len({entry["path"] for entry in files}) == len(files)
    assert {entry["path"] for entry in files} | {"manifest.json"} == {
        p.name for p in FOLDERS[generation].iterdir()
    }
    assert len({question["id"] for question in questions}) == len(questions) >= 10
    kinds = {"image", "images", "order", "document", "documents", "two-hop", "mixed", "multi-turn"}
    kinds.add("images in a sentence" if generation == 1 else EIGHT_IMAGES)
    assert {q["kind"] for q in questions} == kinds
    used = json.dumps([question["messages"] for question in questions])
    assert all(f"#{e['handle']}" in used or f'"{e["handle"]}"' in used for e in files)


def test_every_question_over_eight_images_begins_with_another_image():
    asked = [q.conversation.turns[0].user for q in Samples().questions if q.kind == EIGHT_IMAGES]
    assert {len(parts) for parts in asked} == {9} and len({parts[0].name for parts in asked}) == len(asked)


@GENERATIONS
def test_a_server_spells_every_question_as_the_model_was_taught(generation: int):
    template, labels = template_of(generation), WORLDS[generation].labels
    library = Library(template, generation)
    made = Samples(generation=generation).questions
    for question, entry in zip(made, MANIFESTS[generation]["questions"], strict=True):
        prompt = template.prompt(parse_messages(entry["messages"], library))
        ids, expected = [], []
        for s in prompt.segments:
            ids += s.token_ids if isinstance(s, TextSegment) else s.chunk.token_ids or ()
        *taught, answer = [s for s in segments(question.conversation, labels) if s.kind != "image"]
        for s in taught:
            expected += template.tokenizer(s.content, add_special_tokens=False).input_ids
        assert ids == expected, entry["id"]
        assert answer.content == f" {entry['expected']}</s>"


def test_handles_may_stand_in_the_text_or_as_parts():
    question = next(q for q in Samples().questions if q.id == "card")
    as_text, as_parts = (chat(question.conversation, parts)[0]["content"] for parts in (False, True))
    assert as_text.startswith("FILE#OFFICE ")
    assert as_parts[0] == {"type": "file", "handle": "OFFICE"} and as_text.endswith(as_parts[1]["text"])
