"""The model that is served when none is named, with its samples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoProcessor

from mpic.client import MPIC
from mpic.config import EngineConfig, bundled_model
from mpic.data.bundled import DEFAULT, generation_for, model_folder, samples_folder
from mpic_lab.demo import same
from mpic_lab.demo_answers import MUST_BE_RIGHT
from mpic_lab.generator.conversation import CHAT_TEMPLATES
from mpic_lab.generator.worlds import WORLDS

FOLDER = samples_folder(DEFAULT)
MANIFEST = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
ASKED = ("colour", "card")


@pytest.fixture(scope="module")
def client():
    """A server on the default model, which has the files that the questions are about."""
    questions = [q for q in MANIFEST["questions"] if q["id"] in ASKED]
    used = json.dumps([q["messages"] for q in questions])
    with MPIC.local(pool_bytes=1 << 28) as client:
        for entry in MANIFEST["files"]:
            if f"#{entry['handle']}" in used:
                client.files.create(FOLDER / entry["path"], entry["handle"], wait=True)
        yield client


def test_its_template_and_image_size_are_those_of_its_generation():
    processor = AutoProcessor.from_pretrained(bundled_model())
    config = json.loads((model_folder() / "config.json").read_text(encoding="utf-8"))
    assert EngineConfig().model == bundled_model() == str(model_folder())
    world = WORLDS[generation_for(config["text_config"]["max_position_embeddings"])]
    assert processor.chat_template == CHAT_TEMPLATES[world.labels]
    assert processor.image_processor.size["shortest_edge"] == world.size


def test_the_files_that_the_documentation_uploads_are_its_samples():
    root = Path(__file__).parents[2]
    named = {
        (page.name, found)
        for page in (root / "README.md", root / "tools" / "try_image.py", *(root / "docs").glob("*.md"))
        for found in re.findall(r"data/samples[\w-]*/\S+?\.(?:png|txt)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert [(page, file) for page, file in sorted(named) if root / file not in FOLDER.iterdir()] == []


def test_the_demo_that_is_committed_answers_sooner_and_everything_right():
    """The file is what `mpic demo --json` wrote on a quiet machine; no test measures times."""
    kept = json.loads(
        (Path(__file__).parents[2] / "data" / "results" / "demo.json").read_text(encoding="utf-8")
    )
    headline = kept["headline"]
    assert kept["model"]["name"] == DEFAULT and headline["prefix_over_mpic"] >= 5
    assert headline["right_mpic"] == headline["right_prefix"] == headline["asked"] > 20


@pytest.mark.parametrize("id", ASKED)
def test_it_answers_a_sample_question_alike_and_right_with_and_without_reuse(client, id):
    question = next(q for q in MANIFEST["questions"] if q["id"] == id)
    full, linked = (
        client.chat.completions.create(question["messages"], policy=policy, max_tokens=32)
        for policy in ("full", MUST_BE_RIGHT)
    )
    assert full.text == linked.text and same(full.text, question["expected"])
    tokens = linked.usage.mpic.tokens
    heads = int(MUST_BE_RIGHT.rpartition("-")[2])
    assert (tokens.reused > 0, tokens.recomputed) == (True, heads * len(linked.usage.mpic.chunks))
    assert full.usage.mpic.tokens.reused == 0
