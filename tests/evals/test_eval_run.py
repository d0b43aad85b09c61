"""``mpic eval run`` on the demo model: every answer kept, resumable, reported."""

from __future__ import annotations

import json

import pytest

from mpic.config import ConfigError
from mpic.errors import BadRequest, UnknownPolicy
from mpic.evals.config import load_eval_config
from mpic.evals.report import lines, write_report
from mpic.evals.run import Answer, Evaluator, read_answers
from mpic.evals.tasks import TaskError

CONFIG = """
policies = ["mpic-16", "reuse", "nocache"]
questions = 2
seed = 5
[[task]]
name = "world-image"
chunks = [2]
[[task]]
name = "world-biography"
chunks = [1]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    (folder / "eval.toml").write_text(CONFIG)
    evaluator = Evaluator(load_eval_config(folder / "eval.toml"), folder / "out")
    return folder, evaluator.run()


def test_every_policy_answers_every_sample_and_full_is_always_there(finished):
    _, answers = finished
    assert len(answers) == 4 * 4
    assert {a.policy for a in answers} == {"full", "mpic-16", "reuse", "nocache"}
    for answer in answers:
        assert answer.skipped is None and answer.ttft_ms > 0 and answer.flops > 0
        assert answer.kl == 0 if answer.policy == "full" else answer.kl >= 0
    reused = {a.policy: a.reused for a in answers if a.task == "world-image"}
    assert reused["full"] == reused["nocache"] == 0 < reused["mpic-16"] < reused["reuse"] == 128
    flops = {a.policy: a.flops for a in answers if a.task == "world-image"}
    assert flops["reuse"] < flops["mpic-16"] < flops["full"]


def test_a_run_goes_on_where_it_was_interrupted_and_asks_nothing_twice(finished):
    folder, answers = finished
    path = folder / "out" / "answers.jsonl"
    whole = path.read_text()
    kept = whole.splitlines(keepends=True)
    path.write_text("".join(kept[:5]) + kept[5][:20])
    assert len(read_answers(folder / "out")) == 5
    Evaluator(load_eval_config(folder / "eval.toml"), folder / "out").run()
    again = read_answers(folder / "out")
    assert path.read_text().startswith("".join(kept[:5]))
    assert {a.key: a.answer for a in again} == {a.key: a.answer for a in answers}
    assert len(again) == len(answers)


def test_another_seed_does_not_mix_into_a_run(finished):
    folder, _ = finished
    (folder / "other.toml").write_text(CONFIG.replace("seed = 5", "seed = 6"))
    with pytest.raises(BadRequest, match="another"):
        Evaluator(load_eval_config(folder / "other.toml"), folder / "out")


def test_another_file_or_split_does_not_mix_into_a_run(tmp_path):
    text = '[[task]]\nname = "longbench-qa"\npath = "{}.jsonl"\nsplit = "{}"'
    configs = {}
    for file, split in (("hotpotqa", "passage"), ("hotpotqa", "fixed"), ("musique", "passage")):
        (tmp_path / "e.toml").write_text(text.format(file, split))
        configs[file, split] = load_eval_config(tmp_path / "e.toml")
    for _ in range(2):
        Evaluator(configs["hotpotqa", "passage"], tmp_path / "out")
    for other in (("hotpotqa", "fixed"), ("musique", "passage")):
        with pytest.raises(BadRequest, match="longbench-qa over another file or split"):
            Evaluator(configs[other], tmp_path / "out")
    (tmp_path / "e.toml").write_text('[[task]]\nname = "world-image"')
    Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out")  # a task may be added
    with pytest.raises(BadRequest, match="longbench-qa"):
        Evaluator(configs["musique", "passage"], tmp_path / "out")


def test_the_report_has_tables_plots_and_advice(finished):
    folder, _ = finished
    for path in write_report(folder / "out"):
        assert path.stat().st_size > 500
    text = (folder / "out" / "report.md").read_text()
    assert "| mpic-16 |" in text and "world-image" in text
    assert "data:image/png" in (folder / "out" / "report.html").read_text()


def test_a_policy_counts_as_near_only_if_no_task_loses_more_than_five_points():
    def answers(policy, right):
        return [
            Answer(task, 2, str(i), policy, scores={"em": float(i < n)}, ttft_ms=1, flops=1, chunk_tokens=9)
            for task, n in right.items()
            for i in range(100)
        ]

    full = answers("full", {"world-image": 90, "world-card": 90})
    close = answers("mpic-16", {"world-image": 87, "world-card": 91})
    uneven = answers("mpic-8", {"world-image": 84, "world-card": 96})
    found = {line.policy: line for line in lines([*full, *close, *uneven])}
    assert found["mpic-16"].near and found["mpic-16"].lost == pytest.approx(1)
    assert found["mpic-8"].lost == pytest.approx(0) and not found["mpic-8"].near


@pytest.mark.parametrize(
    "text, error",
    [
        ("", ConfigError),
        ('[[task]]\nname = "nothing"', TaskError),
        ('policies = ["best"]\n[[task]]\nname = "world-image"', UnknownPolicy),
        ('question = 4\n[[task]]\nname = "world-image"', ConfigError),
        ('[[task]]\nnames = "world-image"', ConfigError),
        ('[[task]]\nname = "squad"\npath = "a.json"\n[[task]]\nname = "squad"\npath = "b.json"', ConfigError),
    ],
)
def test_mistakes_in_a_configuration_are_refused_by_name(tmp_path, text, error):
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(error):
        load_eval_config(tmp_path / "e.toml")


@pytest.mark.parametrize("mode", ["fixed", "sentence", "paragraph", "section"])
def test_documents_are_cut_by_kvsplit_in_the_models_tokens(tmp_path, mode):
    text = "The code of the lamp is 123. " * 12
    entry = {"input": "What is the code of the lamp?", "context": text, "answers": ["123"]}
    (tmp_path / "cut.jsonl").write_text(json.dumps(entry) + "\n")
    (tmp_path / "e.toml").write_text(
        'policies = ["reuse"]\nfidelity = false\n[[task]]\nname = "longbench-qa"\n'
        f'path = "cut.jsonl"\nsplit = "{mode}"\ntokens = 40'
    )
    full, reuse = Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out").run()
    assert full.skipped is None and reuse.reused == reuse.chunk_tokens > 80


def test_a_prompt_the_model_cannot_take_is_kept_as_skipped_with_the_reason(tmp_path):
    entry = {"input": "Who?", "context": "word " * 4000, "answers": ["x"]}
    (tmp_path / "long.jsonl").write_text(json.dumps(entry) + "\n")
    (tmp_path / "e.toml").write_text(
        'policies = []\n[[task]]\nname = "longbench-qa"\npath = "long.jsonl"\nsplit = "none"'
    )
    (answer,) = Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out").run()
    assert "context_length" in answer.skipped
    with pytest.raises(BadRequest, match="no answers"):
        write_report(tmp_path / "out")
