"""The demo command, on a tiny random model: what it counts, prints and returns."""

import io
import json
from contextlib import contextmanager

import pytest
from rich.console import Console
from server_helpers import png

from mpic.client import MPIC
from mpic.evals import demo

MESSAGES = [{"role": "user", "content": "What is in IMAGE#DEMO_A and FILE#DEMO_B?"}]
PARTS = [
    {"role": "user", "content": [{"type": "image", "handle": "DEMO_A"}, {"type": "text", "text": "And now?"}]}
]


@pytest.fixture
def samples(tmp_path, url, monkeypatch):
    """A folder of samples, and the running server in place of one the demo would start."""

    starts = []

    @contextmanager
    def already_running(data_dir, model=None, *flags):
        starts.append(data_dir)
        yield url, 0.1

    monkeypatch.setattr(demo, "running_server", already_running)
    monkeypatch.setattr(demo, "starts", starts, raising=False)
    (tmp_path / "a.png").write_bytes(png("blue"))
    (tmp_path / "b.txt").write_text("words of a document")
    files = [
        {"path": "a.png", "handle": "DEMO_A", "kind": "image"},
        {"path": "b.txt", "handle": "DEMO_B", "kind": "text"},
    ]
    questions = [
        {"id": "one", "kind": "mixed", "messages": MESSAGES, "expected": "?", "max_tokens": 4},
        {"id": "two", "kind": "image", "messages": PARTS, "expected": "?", "max_tokens": 4},
    ]
    with MPIC(url) as client:
        yield tmp_path, files, questions, client
        for file in client.files.list():
            client.files.delete(file.id)


def run(folder, files, questions, policies=("prefix", "mpic-32")):
    (folder / "manifest.json").write_text(json.dumps({"files": files, "questions": questions}))
    console = Console(width=80, record=True)
    status = demo.run(policies, None, folder, folder / "out.json", console)
    return status, console.export_text(), json.loads((folder / "out.json").read_text())


def test_a_missed_answer_fails_the_demo(samples):
    folder, files, questions, _ = samples
    status, text, body = run(folder, files, questions)
    assert status == 1
    assert "mpic-32 missed: one, two" in text
    assert "1. one: What is in IMAGE#DEMO_A and FILE#DEMO_B?" in text
    assert "2. two: IMAGE#DEMO_A And now?" in text
    assert len(body["answers"]) == 2 * 2 * 2
    assert len(demo.starts) == 2  # however many policies there are: starting takes most of the time
    heads = [line.split() for line in text.splitlines() if line.split()[:2] == ["policy", "answer"]]
    assert heads == [["policy", "answer", "first", "ms", "again", "reused", "of"]] * 2  # whole, at 80 columns
    by = {(a["question"], a["policy"], a["turn"]): a for a in body["answers"]}
    first = by["one", "mpic-32", "first"]
    assert (first["reused"], first["recomputed"]) == (0, 35)  # 16 image tokens and 19 text tokens
    assert by["one", "prefix", "first"]["reused"] == 0
    assert by["one", "prefix", "again"]["prefix_hit"] > 0
    assert [f["handle"] for f in body["files"]] == ["DEMO_A", "DEMO_B"]


def test_expected_answers_pass_it(samples):
    folder, files, questions, client = samples
    for entry in files:
        client.files.create(folder / entry["path"], entry["handle"])
    for question in questions:
        answer = client.chat.completions.create(question["messages"], max_tokens=4, policy="mpic-32")
        question["expected"] = answer.text
    for file in client.files.list():
        client.files.delete(file.id)
    status, text, _ = run(folder, files, questions, ["mpic-32"])
    assert status == 0, text
    assert "mpic-32 gave every expected answer." in text


def test_each_policy_is_reported_when_it_is_done_where_no_spinner_shows(samples, monkeypatch):
    folder, files, questions, _ = samples
    printed, seen = io.StringIO(), []
    console = Console(file=printed, width=100)

    def ask(client, question, policy, turn, plain=demo.ask):
        reported = [p for p in ("prefix", "mpic-32") if f"{p}: everything asked" in printed.getvalue()]
        seen.append((policy, reported))
        return plain(client, question, policy, turn)

    monkeypatch.setattr(demo, "ask", ask)
    (folder / "manifest.json").write_text(json.dumps({"files": files, "questions": questions}))
    demo.run(("prefix", "mpic-32"), None, folder, None, console)
    assert not console.is_terminal
    assert seen == [("prefix", [])] * 4 + [("mpic-32", ["prefix"])] * 4
    assert printed.getvalue().count("everything asked twice in") == 2
    assert "started again in 0.1 s" in printed.getvalue()


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        (" Red.", "red", True),
        ("red", "red circle", False),
        ("", "red", False),
        ("Hugo Reed", "hugo reed.", True),
    ],
)
def test_same(answer, expected, same):
    assert demo.same(answer, expected) is same


def test_a_server_that_does_not_start(tmp_path):
    with pytest.raises(demo.StartFailed, match=r"did not start(.|\n)*unknown policy 'best'") as caught:
        with demo.running_server(tmp_path, None, "--policy", "best"):
            pass
    assert caught.value.code == "server_failed"
