"""The judge's questions and valid replies; nothing is asked twice."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest
from typer.testing import CliRunner

from mpic.config import ConfigError
from mpic.errors import BadRequest
from mpic_lab.eval import cli
from mpic_lab.eval.answers import PolicyAnswer, lines_of
from mpic_lab.eval.compare import compare_policies
from mpic_lab.eval.config import EvalConfig, Judge, TaskEntry
from mpic_lab.eval.judge import Grader, JudgeFailed, judge_run, read_grades
from mpic_lab.eval.report import by_task, write_report
from mpic_lab.eval.tables import grade_table
from mpic_lab.eval.tasks import Options, Sample, find

JUDGE = Judge("http://judge/v1", "grader", "short")
MMDU_REPLY = """Creativity: {"a": 1} is plain. 4. ...
{'Creativity': 4, 'Richness': 5, 'Visual Perception': 6, 'Logical Coherence': 7, 'Answer Accuracy': 8,
 'Image Relationship Understanding': 9, 'Overall Score': 3}"""


def grader(replies, asked, rubric="short"):
    def respond(request: httpx.Request) -> httpx.Response:
        asked.append((request.headers.get("authorization"), json.loads(request.content)))
        reply = replies[min(len(asked), len(replies)) - 1]
        if isinstance(reply, int):
            return httpx.Response(reply)
        return httpx.Response(200, json={"choices": [{"message": {"content": reply}}]})

    return Grader(replace(JUDGE, rubric=rubric), transport=httpx.MockTransport(respond))


def grades(value):
    return {name: value for name in grader([], []).dimensions}


def sample():
    return next(find("world-image").load(Options(chunks=1, questions=1)))


def test_the_judge_sees_rubric_question_reference_and_answer(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    asked = []
    found = grader([f"Grades:\n```json\n{json.dumps(grades(7))}\n```"], asked).grade(sample(), "blue")
    assert found == grades(7.0)
    key, body = asked[0]
    assert key == "Bearer secret" and body["model"] == "grader"
    system, user = (message["content"] for message in body["messages"])
    assert "perception" in system and "blue" in user and sample().expected[0] in user


def test_the_papers_prompt_asks_for_an_overall_score_which_is_no_mean_of_the_others():
    asked = []
    found = grader([MMDU_REPLY], asked, None).grade(sample(), "blue")
    assert found["Overall Score"] == 3 and found["Creativity"] == 4 and len(found) == 7
    system = asked[0][1]["messages"][0]["content"]
    assert system.startswith("You are an assistant skilled at evaluating the quality of creative text.")
    assert all(f"{name}" in system for name in found) and system.endswith("'Overall Score': 7}.")
    answers = [PolicyAnswer("world-image", 1, "0", "full", scores={"em": 1.0})]
    grades = {answers[0].key: found}
    assert compare_policies(answers, grades)[0].judged == 3
    assert grade_table(answers, grades)[1][:2] == ["full", "4.00"]


def test_mmdus_judge_sees_the_images_and_the_last_question_alone():
    turns = [
        {
            "role": "user",
            "content": [{"type": "image", "image": "data:,x"}, {"type": "text", "text": "First?"}],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Second?"},
    ]
    asked = []
    dialogue = Sample("1", turns, ("Red.",), captions=("1: a red cat",))
    grader([MMDU_REPLY], asked, "mpic").grade(dialogue, "{Blue}.")
    text, image = asked[0][1]["messages"][1]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert text["text"].startswith("[Question]\nuser: Second?\n\n[The Start of Reference Answer]\nRed.\n")
    assert "{Blue}." in text["text"] and "First?" not in text["text"] and "cat" not in text["text"]
    blind = Grader(replace(JUDGE, rubric="mpic", images=False))
    assert "Second?" in blind._shown(dialogue, "Blue.")
    assert "Images:\n1: a red cat\n" in grader([], [], "sparkles")._shown(dialogue, "Blue.")
    assert "First?" in grader([], [], "sparkles")._shown(dialogue, "Blue.")


def test_with_grades_a_report_draws_them_too(tmp_path):
    answers = [
        PolicyAnswer(
            task,
            2,
            str(n),
            policy,
            scores={"em": 1.0},
            flops=1.0,
            chunk_tokens=1,
            prompt_tokens=9 + n,
            answer_tokens=3,
        )
        for task in ("world-image", "world-card")
        for policy in ("full", "reuse")
        for n in range(2)
    ]
    (tmp_path / "answers.jsonl").write_text(lines_of(answers))
    (tmp_path / "run.json").write_text('{"model": "m"}')
    assert {"judge-tasks.png", "judge-chunks.png"}.isdisjoint(path.name for path in write_report(tmp_path))
    lines = (
        json.dumps({"key": a.key, "grades": {"Overall Score": 4 + (a.policy == "full")}}) for a in answers
    )
    (tmp_path / "grades.jsonl").write_text("\n".join(lines) + "\n")
    assert {"judge-tasks.png", "judge-chunks.png"} <= {path.name for path in write_report(tmp_path)}
    assert by_task(answers, read_grades(tmp_path))["world-card"][1].judged == 4


def test_sparkles_own_score_is_the_mean_of_its_three_criteria():
    made = grader([], [], "sparkles")
    reply = json.dumps(dict(zip(made.dimensions, (6, 7, 9))))
    found = grader([reply], [], "sparkles").grade(sample(), "blue")
    assert len(made.dimensions) == 3 and found["Overall Score"] == pytest.approx(22 / 3)


def test_a_rubric_may_be_a_file_and_one_that_is_none_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_text('instruction = "Grade."\ndimensions = ["Overall Score"]\n')
    assert Grader(replace(JUDGE, rubric="mine.toml"), tmp_path).dimensions == ("Overall Score",)
    (tmp_path / "mine.toml").write_text('instruction = "Grade."')
    for name, said in (
        ("mine.toml", "needs an instruction and dimensions"),
        ("no.toml", "mpic, short, sparkles"),
    ):
        with pytest.raises(ConfigError, match=said):
            Grader(replace(JUDGE, rubric=name), tmp_path)


@pytest.mark.parametrize("reply", [503, "no grades", json.dumps(grades(11)), json.dumps({"accuracy": 3})])
def test_a_reply_without_grades_is_asked_again_and_then_reported(reply):
    asked = []
    assert grader([reply, json.dumps(grades(2))], asked).grade(sample(), "x") == grades(2.0)
    with pytest.raises(JudgeFailed, match="3 tries"):
        grader([reply], []).grade(sample(), "x")


def test_grades_are_kept_and_not_asked_for_again(tmp_path):
    config = EvalConfig((TaskEntry("world-image", chunks=(1,)),), questions=2)
    answers = [PolicyAnswer("world-image", 1, str(i), "full", answer="red") for i in range(2)]
    asked = []
    first = judge_run(config, tmp_path, answers, grader([json.dumps(grades(5))], asked))
    assert len(asked) == 2 and first == read_grades(tmp_path)
    assert judge_run(config, tmp_path, answers, grader([500], asked)) == first
    assert len(asked) == 2


def test_grades_of_another_judge_do_not_mix_into_a_run(tmp_path):
    config = EvalConfig((TaskEntry("world-image", chunks=(1,)),), questions=2)
    answers = [PolicyAnswer("world-image", 1, str(i), "full", answer="red") for i in range(2)]
    first = judge_run(config, tmp_path, answers[:1], grader([json.dumps(grades(5))], []))
    others = [replace(JUDGE, model="other"), replace(JUDGE, rubric="sparkles"), replace(JUDGE, images=True)]
    for other in others:
        with pytest.raises(BadRequest, match="another model or rubric"):
            judge_run(config, tmp_path, answers, Grader(other))
    assert read_grades(tmp_path) == first
    elsewhere = replace(JUDGE, base_url="http://elsewhere/v1", key_variable="KEY")
    assert Grader(elsewhere).digest == Grader(JUDGE).digest
    path = tmp_path / "grades.jsonl"  # as earlier versions wrote it
    path.write_text(json.dumps({"key": answers[0].key, "grades": grades(4)}) + "\n")
    found = judge_run(config, tmp_path, answers, grader([json.dumps(grades(5))], []))
    assert [one["Overall Score"] for one in found.values()] == [4, 5]


def test_another_judge_is_refused_before_anything_is_asked(tmp_path, monkeypatch):
    class Loaded(Exception):
        pass

    def load_engine(config):
        raise Loaded

    monkeypatch.setattr("mpic_lab.eval.run.load_engine", load_engine)
    config, out = tmp_path / "e.toml", tmp_path / "out"
    text = '[[task]]\nname = "world-image"\n[judge]\nbase_url = "http://judge/v1"\nmodel = "grader"\n'
    run = lambda: CliRunner().invoke(cli.app, ["run", str(config), "--out", str(out)]).exception
    config.write_text(text)
    assert isinstance(run(), Loaded)
    entry = {"key": ["world-image", 1, "0", "full"], "judge": "another", "grades": grades(4)}
    (out / "grades.jsonl").write_text(json.dumps(entry) + "\n")
    assert "another model or rubric" in str(run())
    (out / "grades.jsonl").unlink()
    config.write_text(f'{text}rubric = "none"\n')
    assert isinstance(run(), ConfigError)


def test_a_grade_cut_off_by_a_kill_is_asked_for_again_on_a_line_of_its_own(tmp_path):
    config = EvalConfig((TaskEntry("world-image", chunks=(1,)),), questions=3)
    answers = [PolicyAnswer("world-image", 1, str(i), "full", answer="red") for i in range(3)]
    whole = judge_run(config, tmp_path, answers, grader([json.dumps(grades(5))], []))
    path = tmp_path / "grades.jsonl"
    text = path.read_text()
    path.write_text(text[:-20])
    assert read_grades(tmp_path) == {answer.key: whole[answer.key] for answer in answers[:2]}
    asked = []
    assert judge_run(config, tmp_path, answers, grader([json.dumps(grades(5))], asked)) == whole
    assert len(asked) == 1 and path.read_text() == text
    path.write_text("{\n" + text)
    with pytest.raises(BadRequest, match=r"grades\.jsonl, line 1 is not JSON"):
        read_grades(tmp_path)
