"""The model that is served when none is named, on vLLM."""

from __future__ import annotations

import json

import pytest
from vllm_facade import Bench, whole

from mpic.data.bundled import DEFAULT, model_folder, samples_folder
from mpic_lab.demo import same
from mpic_lab.demo_answers import MUST_BE_RIGHT

FOLDER = samples_folder(DEFAULT)
MANIFEST = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
ASKED = ("colour", "card")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    questions = [q for q in MANIFEST["questions"] if q["id"] in ASKED]
    used = json.dumps([q["messages"] for q in questions])
    files = {FOLDER / e["path"]: e["handle"] for e in MANIFEST["files"] if f"#{e['handle']}" in used}
    with Bench(tmp_path_factory.mktemp("library"), files, model=str(model_folder())) as made:
        yield made


@pytest.mark.parametrize("policy", ["full", MUST_BE_RIGHT])
def test_both_engines_give_its_sample_questions_the_same_right_answers(bench, native, policy):
    for id in ASKED:
        question = next(q for q in MANIFEST["questions"] if q["id"] == id)
        prompt = bench.prompt(question["messages"])
        ours, theirs = bench.ask(prompt, policy), bench.ask(prompt, policy, native)
        assert ours.token_ids == theirs.token_ids and same(ours.text, question["expected"])
        counts = [(a.usage.prompt_tokens, a.usage.reused, a.usage.recomputed) for a in (ours, theirs)]
        assert counts[0] == counts[1] and whole(ours.usage)
        assert (ours.usage.reused > 0) == (policy != "full")
