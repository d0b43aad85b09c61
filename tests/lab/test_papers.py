"""The papers' configurations: they load, say what is missing and where it is published, and run on stand-ins."""

from dataclasses import replace
from pathlib import Path

import pytest

from mpic_lab.eval.config import load_eval_config
from mpic_lab.eval.report import write_report
from mpic_lab.eval.run import Evaluator, _Session
from mpic_lab.eval.run_facts import record_fact
from mpic_lab.eval.stand_in import with_stand_ins
from mpic_lab.eval.tables import needle_tables
from mpic_lab.eval.tasks import TaskError, find

PAPERS = sorted((Path(__file__).resolve().parents[2] / "lab" / "papers").glob("*.toml"))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.stem)
def test_what_is_missing_is_named_with_where_it_is_published(paper, tmp_path):
    copy = tmp_path / "lab" / "papers" / paper.name
    copy.parent.mkdir(parents=True)
    copy.write_text(paper.read_text())
    config = load_eval_config(copy)
    reads = [entry for entry in config.tasks if find(entry.name).reads_file]
    assert reads and all(entry.source for entry in reads)
    with pytest.raises(TaskError) as refused:
        Evaluator(config, tmp_path / "out").run()
    for entry in reads:
        assert f"{entry.path} does not exist; published at {entry.source}" in str(refused.value)
    assert f"model {config.model} is not here yet; published at huggingface.co/" in str(refused.value)
    assert ("`mpic train packet --model" in str(refused.value)) == bool(config.packet)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.stem)
def test_it_runs_to_its_end_on_stand_ins_and_says_what_differs(paper, tmp_path, tiny_model, monkeypatch):
    submit = _Session._submit  # the tiny model seldom ends an answer by itself

    def submit_briefly(self, prompt, policy, salt="", **sampling):
        return submit(
            self, prompt, policy, salt, **{**sampling, "max_tokens": min(4, sampling["max_tokens"])}
        )

    monkeypatch.setattr(_Session, "_submit", submit_briefly)
    named = load_eval_config(paper)
    config = load_eval_config(paper, tiny_model, questions=1)
    short = [replace(entry, lengths=(300, 500), depths=(0, 100)) for entry in config.tasks]
    policies = ("full", "mpic-8", "packet") if config.packet else ("full", "mpic-8")
    config = replace(config, tasks=tuple(short), policies=policies, fidelity=False)
    out = tmp_path / "out"
    config, notes = with_stand_ins(config, out, named.model, words=40)
    evaluator = Evaluator(replace(config, dtype="float32"), out)
    record_fact(out, "stand_in", notes, "over other data")
    answers = evaluator.run()
    expected = {(e.name, policy) for e in config.tasks for policy in ("full", "mpic-8")}
    assert {(a.task, a.policy) for a in answers} == expected  # and no packet, for which there is no adapter
    assert [a.skipped for a in answers if a.skipped] == [] and all(a.answer_tokens for a in answers)
    if paper.stem == "epic":
        assert needle_tables(answers)["niah", "mpic-8"][0] == ["depth", "300", "500"]
    write_report(out)
    report = (out / "report.md").read_text()
    assert all(note in report for note in notes) and named.model in report
    assert ("float16" in report) == (paper.stem == "mpic") and ("packet" in report) == bool(named.packet)
    assert "tasks.png" in report and (out / "tasks.png").exists() and (out / "lengths.png").exists()
    assert (out / "needles.png").exists() == bool(needle_tables(answers))
    assert "answer tokens" in report


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.stem)
def test_an_answer_of_a_stand_in_stands_in_what_is_shown(paper, tmp_path):
    config, _ = with_stand_ins(load_eval_config(paper, questions=3), tmp_path, "another")
    for name, options in config.cells():
        for sample in find(name).load(
            replace(options, lengths=(300,), depths=(50,), splitter=lambda text, *_: [text])
        ):
            parts = [part for message in sample.messages for part in message["content"]]
            shown = " ".join(part.get("text", "") for part in parts if isinstance(part, dict))
            assert sample.expected[0]
            if name in ("mmdu", "sparkles"):
                assert sample.chunks == sum(isinstance(p, dict) and p["type"] == "image" for p in parts) > 0
            elif name == "longbench-samsum":
                assert "Dialogue: " in shown and sample.expected[0] not in shown
            else:
                assert all(word in shown for word in sample.expected[0].split()), name


def test_every_policy_press_and_metric_that_a_paper_compares_exists():
    loaded = {paper.stem: load_eval_config(paper) for paper in PAPERS}
    assert set(loaded) == {"epic", "epic-v1", "kvpacket", "mepic", "mpic"}
    assert {"attnlink-20", "cacheblend-15"} <= set(loaded["epic-v1"].policies)
    assert {"legolink-2", "cacheblend-15"} <= set(loaded["epic"].policies)
    kvpacket = {"packet", "a3-30", "single", "packet+tova-50-0", "packet+tova-10-8-8", "single+tova-50-0"}
    assert kvpacket <= set(loaded["kvpacket"].policies)
    assert {"mpic-32", "reuse-2step", "prefix"} <= set(loaded["mpic"].policies)
    samsum = next(e for e in loaded["epic"].tasks if e.name == "longbench-samsum")
    assert (samsum.split, samsum.tokens) == ("fixed", 512)
    needles = [e for c in ("epic", "kvpacket") for e in loaded[c].tasks if "niah" in e.name]
    assert {entry.metric for entry in needles} == {"f1"}
