"""The papers' configurations: they load, say what is missing and where it is published, and run on small files in the
same formats."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from mpic_lab.eval.config import load_eval_config
from mpic_lab.eval.report import write_report
from mpic_lab.eval.run import Evaluator, _Session
from mpic_lab.eval.tables import needle_tables
from mpic_lab.eval.tasks import TaskError, find

PAPERS = sorted((Path(__file__).resolve().parents[2] / "lab" / "papers").glob("*.toml"))
PEOPLE = [
    {"context": f"{name} lives in {city}.", "qas": [{"id": name, "question": "Where?", "answers": [{"text": city}]}]}
    for name, city in (("Ana", "Rome"), ("Bob", "Oslo"))
]  # fmt: skip
QA = {"data": [{"title": "T", "paragraphs": PEOPLE}]}
NEWS = {"data": [
    {"storyId": str(n), "text": f"Mayor {n} resigned.", "questions": [{"q": "Who?", "consensus": {"s": 0, "e": 7}}]}
    for n in range(2)
]}  # fmt: skip
MMDU = [{"id": 1, "image": ["1.jpg", "2.jpg"], "conversations": [
    {"from": "user", "value": "Compare <ImageHere> with <ImageHere>."}, {"from": "assistant", "value": "Both are red."},
]}]  # fmt: skip
SPARKLES = [{"evaluation_id": 1, "dialogue": [
    {"role": "user", "content": "Link IMAGE#1<Img><ImageHere></Img>?", "images": [{"image_id": 1}]},
    {"role": "assistant", "content": "It is red.", "images": []},
]}]  # fmt: skip
FACTS = ("birth_date", "birth_place", "current_location", "university", "major", "company")
RULER = {
    "index": 1,
    "input": "hay\nThe number of fox is 512.\nhay\nWhat is the number of fox?",
    "outputs": ["512"],
}


def longbench(name):
    context = (
        "Dialogue: A: hi\nSummary: A greets.\n"
        if name == "samsum"
        else "Passage 1:\nAna, Rome.\nPassage 2:\nBob."
    )
    return {"input": "Who?", "context": context, "answers": ["Ana"], "dataset": name, "_id": "1"}


def write(task, path):
    """Write a small file in the format of a task to the place where a configuration expects it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if task == "biographies":
        path.mkdir(parents=True)
        facts = {fact: [f"Ana Reed's {fact} is", f"The {fact} of Ana Reed is"] for fact in FACTS}
        told = {fact: [f"{beginning} {fact}7." for beginning in facts[fact]] for fact in FACTS}
        ends = {fact: f"{fact}7" for fact in FACTS}
        (path / "train.jsonl").write_text(json.dumps({"name": "Ana Reed"} | told) + "\n")
        (path / "test.jsonl").write_text(json.dumps({"name": "Ana Reed", "labels": ends} | facts) + "\n")
        return
    if task == "narrativeqa":
        (path / "third_party/wikipedia").mkdir(parents=True)
        (path / "third_party/wikipedia/summaries.csv").write_text(
            "document_id,summary\nd,A knight is lost.\n"
        )
        (path / "qaps.csv").write_text("document_id,question,answer1,answer2\nd,Who?,a knight,the knight\n")
        return
    content = {
        "squad": QA,
        "emrqa": QA,
        "newsqa": NEWS,
        "mmdu": MMDU,
        "sparkles": SPARKLES,
        "ruler-niah": RULER,
    }
    body = content.get(task) or longbench(task.removeprefix("longbench-"))
    path.write_text(json.dumps(body) + "\n")


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
def test_it_runs_on_small_files_in_the_same_formats(paper, tmp_path, tiny_model, monkeypatch):
    submit = _Session._submit  # the tiny model seldom ends an answer by itself

    def submit_briefly(self, prompt, policy, salt="", **sampling):
        return submit(
            self, prompt, policy, salt, **{**sampling, "max_tokens": min(4, sampling["max_tokens"])}
        )

    monkeypatch.setattr(_Session, "_submit", submit_briefly)
    text = paper.read_text()
    changes = {
        r"^model = .*": f'model = "{tiny_model}"',
        r"^dtype = .*": 'dtype = "float32"\nfidelity = false',
        r"^policies = \[[^]]*\]": 'policies = ["mpic-8"]',
        r"^(packet = .*|(pressed|presses) = \[[^]]*\])\n": "",
        r"^questions = .*": "questions = 1",
        r"^lengths = .*": "lengths = [300, 500]",
        r"^depths = .*": "depths = [0, 100]",
    }
    for old, new in changes.items():
        text = re.sub(old, new, text, flags=re.MULTILINE)
    copy = tmp_path / "lab" / "papers" / paper.name
    copy.parent.mkdir(parents=True)
    copy.write_text(text)
    config = load_eval_config(copy)
    for entry in config.tasks:
        if entry.path is not None:
            write(entry.name, (copy.parent / entry.path).resolve())
        if entry.images is not None:
            (folder := (copy.parent / entry.images).resolve()).mkdir(parents=True, exist_ok=True)
            for name in ("1.jpg", "2.jpg"):
                Image.new("RGB", (8, 8), "red").save(folder / name)
    answers = Evaluator(config, tmp_path / "out").run()
    assert {(a.task, a.policy) for a in answers} == {
        (e.name, p) for e in config.tasks for p in ("full", "mpic-8")
    }
    assert [a.skipped for a in answers if a.skipped] == [] and all(a.answer_tokens for a in answers)
    if paper.stem == "mpic":
        assert {(a.task, a.chunks) for a in answers} == {("mmdu", 2), ("sparkles", 1)}
    if paper.stem == "epic":
        assert needle_tables(answers)["niah", "mpic-8"][0] == ["depth", "300", "500"]
    write_report(tmp_path / "out")
    assert "tasks.png" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "tasks.png").exists()
    assert (tmp_path / "out" / "needles.png").exists() == bool(needle_tables(answers))
    assert "answer tokens" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "lengths.png").exists()


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
