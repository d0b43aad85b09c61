"""Files that an evaluation reads: what counts as changed, and what as missing."""

from __future__ import annotations

import json

import pytest

from mpic.errors import BadRequest
from mpic_lab.eval import contents
from mpic_lab.eval.answers import PolicyAnswer, lines_of
from mpic_lab.eval.config import load_eval_config
from mpic_lab.eval.run import Evaluator
from mpic_lab.eval.tasks import TaskError


@pytest.fixture
def dialogues(tmp_path):
    """The configuration and the folder of a run over a file and a folder of images, with an answer in it."""
    (tmp_path / "e.toml").write_text('[[task]]\nname = "mmdu"\npath = "mmdu.json"\nimages = "pictures"')
    (tmp_path / "mmdu.json").write_text("[]")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.jpg").write_bytes(b"1")
    config, out = load_eval_config(tmp_path / "e.toml"), tmp_path / "out"
    Evaluator(config, out)
    (out / "answers.jsonl").write_text(lines_of([PolicyAnswer("mmdu", 2, "a", "full")]))
    return config, out


def test_a_file_that_has_changed_does_not_mix_into_a_run_and_runs_without_digests_go_on(tmp_path):
    (tmp_path / "e.toml").write_text('[[task]]\nname = "longbench-qa"\npath = "qa.jsonl"')
    config, out = load_eval_config(tmp_path / "e.toml"), tmp_path / "out"
    (tmp_path / "qa.jsonl").write_text("{}\n")
    Evaluator(config, out)
    (out / "answers.jsonl").write_text(lines_of([PolicyAnswer("longbench-qa", 0, "a", "full")]))
    Evaluator(config, out)
    (tmp_path / "qa.jsonl").write_text("{ }\n")
    with pytest.raises(BadRequest, match="longbench-qa over a file that has changed"):
        Evaluator(config, out)
    facts = json.loads((out / "run.json").read_text())
    del facts["contents"]
    (out / "run.json").write_text(json.dumps(facts))
    Evaluator(config, out)
    assert json.loads((out / "run.json").read_text())["contents"]["longbench-qa"]


@pytest.mark.parametrize("moved", ["mmdu.json", "pictures"])
def test_data_that_has_moved_is_missing_and_has_not_changed(dialogues, tmp_path, moved):
    config, out = dialogues
    before = (out / "run.json").read_text()
    (tmp_path / moved).rename(tmp_path / "elsewhere")
    with pytest.raises(TaskError, match=f"{moved} does not exist"):
        Evaluator(config, out)
    (tmp_path / "elsewhere").rename(tmp_path / moved)
    Evaluator(config, out)
    assert (out / "run.json").read_text() == before


def test_images_may_be_named_later_and_are_then_part_of_the_run(dialogues, tmp_path):
    config, out = dialogues
    facts = json.loads((out / "run.json").read_text())
    whole = facts["contents"]["mmdu"]
    facts["contents"]["mmdu"] = {"path": whole["path"]}
    (out / "run.json").write_text(json.dumps(facts))
    Evaluator(config, out)
    assert json.loads((out / "run.json").read_text())["contents"]["mmdu"] == whole
    (tmp_path / "pictures" / "1.jpg").write_bytes(b"another")
    with pytest.raises(BadRequest, match="mmdu over a file that has changed"):
        Evaluator(config, out)


def test_what_file_managers_leave_in_a_folder_is_no_change_of_it(dialogues, tmp_path):
    config, out = dialogues
    for name in (".DS_Store", "Thumbs.db", ".cache/1.jpg"):
        (tmp_path / "pictures" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "pictures" / name).touch()
        Evaluator(config, out)


def test_a_file_that_several_cells_read_is_read_for_its_digest_once(tmp_path, monkeypatch):
    (tmp_path / "e.toml").write_text('[[task]]\nname = "squad"\npath = "squad.json"\nchunks = [2, 4]')
    (tmp_path / "squad.json").write_text("{}")
    digest, read = contents.digest_of, []
    monkeypatch.setattr(contents, "digest_of", lambda file: read.append(file.name) or digest(file))
    found = contents.contents_of_cells(load_eval_config(tmp_path / "e.toml").cells())
    assert list(found) == ["squad, 2 chunks", "squad, 4 chunks"] and read == ["squad.json"]
