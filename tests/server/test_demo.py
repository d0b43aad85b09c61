"""The demo command on a tiny random model: its counts, output and exit status."""

import io
import json
from contextlib import contextmanager

import pytest
from rich.console import Console
from server_helpers import png

from mpic.client import MPIC
from mpic_lab import demo
from mpic_lab.demo_answers import PASSES, DemoAnswer, Headline, headline_of

MESSAGES = [{"role": "user", "content": "What is in IMAGE#DEMO_A and FILE#DEMO_B?"}]
PARTS = [
    {"role": "user", "content": [{"type": "image", "handle": "DEMO_A"}, {"type": "text", "text": "And now?"}]}
]


@pytest.fixture
def samples(tmp_path, url, monkeypatch):
    """A folder of samples, and the running server instead of one that the demo would start."""

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


def run(folder, files, questions, policies=("prefix", "mpic-16")):
    (folder / "manifest.json").write_text(json.dumps({"files": files, "questions": questions}))
    console = Console(width=80, record=True)
    status = demo.run(policies, None, folder, folder / "out.json", console)
    return status, console.export_text(), json.loads((folder / "out.json").read_text())


def test_a_missed_answer_fails_the_demo(samples):
    folder, files, questions, _ = samples
    status, text, body = run(folder, files, questions)
    assert status == 1
    assert "mpic-16 missed: one, two" in text
    assert "1. one: What is in IMAGE#DEMO_A and FILE#DEMO_B?" in text
    assert "2. two: IMAGE#DEMO_A And now?" in text
    assert len(body["answers"]) == 2 * 2 * 2
    assert len(demo.starts) == 2  # however many policies there are: starting takes most of the time
    heads = [line.split() for line in text.splitlines() if line.split()[:2] == ["policy", "answer"]]
    assert heads == [["policy", "answer", "first", "ms", "again", "reused", "of"]] * 2  # whole, at 80 columns
    by = {(a["question"], a["policy"], a["turn"]): a for a in body["answers"]}
    first = by["one", "mpic-16", "first"]
    assert (first["reused"], first["recomputed"]) == (3, 32)  # 16 of 16 image tokens and of 19 text tokens
    assert by["one", "prefix", "first"]["reused"] == 0
    assert by["one", "prefix", "again"]["prefix_hit"] > 0
    assert [f["handle"] for f in body["files"]] == ["DEMO_A", "DEMO_B"]


def test_the_headline_is_over_the_questions_with_eight_images_but_the_first(samples):
    folder, files, questions, _ = samples
    eight = [
        {"id": f"eight-{n}", "kind": "eight-images", "messages": PARTS, "expected": "?", "max_tokens": 2}
        for n in range(3)
    ]
    _, text, body = run(folder, files, [*questions, *eight])
    warm = [a for a in body["answers"] if a["turn"] == "warm"]
    assert [(a["question"], a["policy"]) for a in warm] == [
        (f"eight-{n}", policy) for n in (1, 2) for policy in ("prefix", "mpic-16")
    ]
    found = body["headline"]
    ratios = [one["ttft_ms"] / other["ttft_ms"] for one, other in zip(warm[::2], warm[1::2], strict=True)]
    assert found == {
        "prefix_over_mpic": pytest.approx(sum(ratios) / 2, abs=1e-3), "right_prefix": 0, "right_mpic": 0, "asked": 4,
    }  # fmt: skip
    assert (
        "Questions over eight images, asked by turns" in text and "Over eight images mpic-16 answers" in text
    )
    table = text.partition("Questions over eight images")[2]
    assert "3. eight" not in text and max(map(len, table.splitlines())) <= 80
    assert run(folder, files, [*questions, *eight], ["mpic-16"])[2]["headline"] is None
    assert run(folder, files, questions)[2]["headline"] is None


def test_right_is_who_is_right_each_time():
    def answer(question, policy, turn, right, ttft_ms=1.0):
        rest = {"prompt_tokens": 0, "reused": 0, "recomputed": 0, "prefix_hit": 0, "compiled": 0, "tiers": ()}
        return DemoAnswer(question, policy, turn, "", right, ttft_ms, 1.0, **rest)

    asked = [
        *(
            answer("a", p, turn, right)
            for p, right in (("prefix", True), ("mpic-16", False))
            for turn in PASSES
        ),
        *(answer("b", p, turn, turn == "first") for p in ("prefix", "mpic-16") for turn in PASSES),
        *(
            answer(q, p, "warm", True, ms)
            for q, ms in (("c", 8), ("d", 2), ("e", 3))
            for p, ms in (("prefix", ms), ("mpic-16", 1))
        ),
    ]
    assert headline_of(asked) == Headline(3, right_prefix=4, right_mpic=3, asked=5)


def test_expected_answers_pass_it(samples):
    folder, files, questions, client = samples
    for entry in files:
        client.files.create(folder / entry["path"], entry["handle"])
    for question in questions:
        answer = client.chat.completions.create(question["messages"], max_tokens=4, policy="mpic-16")
        question["expected"] = answer.text
    for file in client.files.list():
        client.files.delete(file.id)
    status, text, _ = run(folder, files, questions, ["mpic-16"])
    assert status == 0, text
    assert "mpic-16 gave every expected answer." in text


def test_each_policy_is_reported_when_it_is_done_where_no_spinner_shows(samples, monkeypatch):
    folder, files, questions, _ = samples
    printed, seen = io.StringIO(), []
    console = Console(file=printed, width=100)

    def ask(client, question, policy, turn, plain=demo.ask):
        reported = [p for p in ("prefix", "mpic-16") if f"{p}: everything asked" in printed.getvalue()]
        seen.append((policy, reported))
        return plain(client, question, policy, turn)

    monkeypatch.setattr(demo, "ask", ask)
    (folder / "manifest.json").write_text(json.dumps({"files": files, "questions": questions}))
    demo.run(("prefix", "mpic-16"), None, folder, None, console)
    assert not console.is_terminal
    assert seen == [("prefix", [])] * 4 + [("mpic-16", ["prefix"])] * 4
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


def test_a_server_that_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise RuntimeError('a stranger')")
    monkeypatch.chdir(tmp_path)  # its modules are not the server's
    with pytest.raises(demo.StartFailed, match=r"did not start(.|\n)*unknown policy 'best'") as caught:
        with demo.running_server(tmp_path, None, "--policy", "best"):
            pass
    assert caught.value.code == "server_failed"
