"""The samples of both generations are complete: every file is used, and every kind of question is there."""

import json

import pytest

from mpic.data.bundled import SAMPLES
from mpic_lab.demo_answers import EIGHT_IMAGES

FOLDERS = {1: SAMPLES["demo"], 2: SAMPLES["large"]}
MANIFESTS = {g: json.loads((folder / "manifest.json").read_text()) for g, folder in FOLDERS.items()}
GENERATIONS = pytest.mark.parametrize("generation", FOLDERS)


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
    asked = [q["messages"][-1]["content"] for q in MANIFESTS[2]["questions"] if q["kind"] == EIGHT_IMAGES]
    firsts = [text.split()[0] for text in asked]
    assert {text.count("IMAGE#") for text in asked} == {8} and len(set(firsts)) == len(firsts) > 1
