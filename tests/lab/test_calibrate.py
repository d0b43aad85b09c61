"""``mpic calibrate``: what is asked, what is decided, and the file by which ``auto`` chooses."""

import json
import math
import re
from dataclasses import replace

import pytest
from server_helpers import chat_template
from small_models import SMALL

from mpic.errors import BadRequest
from mpic.model.load import load_model
from mpic.server.auto import Auto
from mpic_lab.calibrate.decide import Paired, kind_of, measured, paired, right
from mpic_lab.calibrate.run import Calibrator
from mpic_lab.eval.answers import PolicyAnswer, read_answers
from mpic_lab.eval.config import EvalConfig, TaskEntry
from mpic_lab.eval.resolve import counter_of
from mpic_lab.eval.tasks import Options, TaskError, find

TASKS = """
[[task]]
name = "world-card"
chunks = [2]
[[task]]
name = "world-image"
chunks = [2]
"""


def answers(policy, scores, flops=1.0, task="prose-codes"):
    return [
        PolicyAnswer(task, 6, str(i), policy, scores={"contains": float(s)}, flops=flops, kl=0.5)
        for i, s in enumerate(scores)
    ]


def statistic(found, difference):
    """Tango's statistic, with the likeliest shares of discordant pairs of this difference looked for one by one."""

    def likelihood(better):
        worse, same = better + difference, 1 - 2 * better - difference
        parts = ((found.worse, worse), (found.better, better), (found.n - found.worse - found.better, same))
        if min(worse, same) < 0:
            return -math.inf
        return sum(n * math.log(max(share, 1e-300)) for n, share in parts if n)

    better = max((i / 100_000 for i in range(100_001)), key=likelihood)
    variance = found.n * (2 * better + difference - difference**2)
    return (found.worse - found.better - found.n * difference) / math.sqrt(variance)


@pytest.mark.parametrize(
    "found", [Paired(43, 7, 2), Paired(16, 6, 0), Paired(108, 12, 9), Paired(300, 2, 11)]
)
def test_the_interval_is_tangos_score_interval(found):
    low, high = found.interval()
    assert statistic(found, low / 100) == pytest.approx(1.96, abs=0.01)
    assert statistic(found, high / 100) == pytest.approx(-1.96, abs=0.01)


def test_a_policy_that_changed_no_answer_needs_many_questions_to_be_believed():
    few = Paired(20, 0, 0)
    assert few.interval()[1] > 15 and 180 <= few.questions_for(2) <= 200
    assert Paired(200, 0, 0).interval()[1] < 2
    assert Paired(100, 10, 0).questions_for(2) is None


def test_a_policy_is_given_up_when_no_more_difference_would_save_it():
    assert not Paired(5, 1, 0).cannot_meet(2, 300)
    assert Paired(5, 4, 0).cannot_meet(2, 300)
    assert not Paired(5, 0, 0).cannot_meet(1, 20), "too few questions speak against no policy"
    assert Paired(20, 15, 0).cannot_meet(1, 20)


def test_a_policy_is_compared_on_the_questions_that_full_answered_too():
    skipped = answers("full", [1] * 4, 4)
    skipped[3].skipped = "out_of_memory: no room"
    both = [*skipped, *answers("reuse", [1, 0, 1, 0]), *answers("mpic-8", [1])]
    assert paired(both, "reuse") == Paired(3, 1, 0) and paired(both, "mpic-8") == Paired(1, 0, 0)
    found = measured(both, "reuse")
    assert (found.questions, found.kl, found.saved) == (3, 0.5, 4) and found.lost == pytest.approx(33.333)
    assert measured(both, "mpic-16") is None and right(both) == 100


def test_tasks_are_about_images_or_documents_and_mixed_ones_about_neither():
    names = ("prose-codes", "longbench-qa", "world-image", "mmdu", "world-mixed")
    assert list(map(kind_of, names)) == ["text", "text", "image", "image", None]


def test_codes_stand_in_documents_of_real_prose_of_the_size_asked_for():
    count = counter_of(chat_template())
    options = Options(chunks=6, questions=3, count=count, tokens=600)
    sizes = []
    for sample in find("prose-codes").load(options):
        *documents, question = sample.messages[0]["content"]
        texts = [part["text"] for part in documents]
        assert len(set(texts)) == 6
        sizes += map(count, texts)
        (code,) = sample.expected
        (holds,) = (text for text in texts if code in text)
        name = question["text"].split("project ")[1].split("?")[0]
        assert f"project {name} is {code}." in holds
    assert 200 < max(sizes) <= 271
    (small,) = find("prose-codes").load(replace(options, questions=1, tokens=150))
    assert max(count(part["text"]) for part in small.messages[0]["content"][:-1]) <= 151
    with pytest.raises(TaskError, match="at most 12"):
        next(find("prose-codes").load(Options(chunks=13)))


def test_two_codes_and_a_sentence_are_asked_of_the_documents_that_have_them():
    options = Options(chunks=3, questions=4, count=counter_of(chat_template()))
    for sample in find("prose-two-codes").load(options):
        *documents, question = sample.messages[0]["content"]
        holds = [next(part["text"] for part in documents if code in part["text"]) for code in sample.expected]
        assert len(set(holds)) == 2
        names = re.findall(r"project (\w+)", question["text"])
        assert all(f"project {n} is {c}." in h for n, c, h in zip(names, sample.expected, holds))
    with pytest.raises(TaskError, match="at least 2 documents"):
        next(find("prose-two-codes").load(Options(chunks=1)))
    for sample in find("prose-copy").load(options):
        *documents, question = sample.messages[0]["content"]
        (sentence,), (where, name) = (
            sample.expected,
            re.findall(r"directly (\w+) .* project (\w+)", question["text"])[0],
        )
        (text,) = (part["text"] for part in documents if f"project {name} is" in part["text"])
        before, after = re.split(rf"The access code of project {name} is \d{{5}}\. ?", text)
        assert (after if where == "after" else before.rstrip()).find(sentence) == (
            0 if where == "after" else len(before.rstrip()) - len(sentence)
        )
    with pytest.raises(TaskError, match="two sentences"):
        list(find("prose-copy").load(replace(options, tokens=15)))


class Asked(Calibrator):
    """Records the policies of each question, and counts every answer of one of them as wrong."""

    wrong = "reuse"

    def policies_of(self, task):
        for answer in self.done.values():
            right = answer.policy != self.wrong
            answer.scores = dict.fromkeys(answer.scores, float(right))
        self.asked = super().policies_of(task)
        return self.asked


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    config = EvalConfig(
        (TaskEntry("world-card", chunks=(2,)), TaskEntry("world-image", chunks=(2,))),
        str(SMALL),
        ("full", "mpic-16", "reuse"),
        questions=6,
        dtype="float32",
    )
    calibrator = Asked(config, tmp_path_factory.mktemp("calibrated") / "out", 50.0)
    calibrator.run()
    calibrator.policies_of("world-card")
    return calibrator


def test_a_policy_that_cannot_meet_the_bound_is_asked_no_further(calibrated):
    given = calibrated.answers_by_kind()["text"]
    count = {p: sum(a.policy == p for a in given) for p in ("full", "mpic-16", "reuse")}
    assert count["full"] == count["mpic-16"] == 6 and 0 < count["reuse"] < 6
    assert "reuse" not in calibrated.asked


def test_the_cheapest_policy_within_the_bound_is_what_auto_then_serves(calibrated, tmp_path):
    found, verdicts, notes = calibrated.result()
    assert [(v.kind, v.figures.policy, v.words) for v in verdicts if v.words == "chosen"] == [
        ("text", "mpic-16", "chosen"),
        ("image", "mpic-16", "chosen"),
    ]
    assert notes == [] and all(one.kl is not None for ones in found.kinds.values() for one in ones)
    path = found.path(tmp_path)
    path.parent.mkdir()
    path.write_text(found.model_dump_json())
    auto = Auto.of_model(load_model(str(SMALL), device="cpu", dtype="float32").info, tmp_path)
    assert auto.calibration == found and auto.policies == {"image": "mpic-16", "text": "mpic-16"}


def test_a_model_that_cannot_answer_is_left_exact_whatever_little_it_loses(mpic, tmp_path, tiny_model):
    out, data = tmp_path / "out", tmp_path / "data"
    words = ["calibrate", "--model", tiny_model, "--questions", "2", "--policies", "reuse,mpic-16"]
    status, said, err = mpic(*words, "--out", out, "--data-dir", data, "--bound", "100")
    assert status == 1 and "auto stays prefix" in err and "Traceback" not in err
    assert "full answers 0 % of these questions" in " ".join(said.split())
    assert {a.policy for a in read_answers(out)} == {"full", "reuse", "mpic-16"}
    assert not list(tmp_path.rglob("calibrations"))


def test_a_calibration_of_the_users_own_tasks_is_written_for_the_server_and_says_what_it_lacks(
    mpic, tmp_path
):
    (tmp_path / "my.toml").write_text(f'model = "{SMALL.as_posix()}"\n{TASKS}')
    words = ["calibrate", tmp_path / "my.toml", "--questions", "4", "--policies", "mpic-16"]
    words += ["--out", tmp_path / "out", "--data-dir", tmp_path / "data", "--dtype", "float32"]
    status, said, err = mpic(*words)
    assert status == 0, err
    asked = read_answers(tmp_path / "out")
    assert {p: sum(a.policy == p for a in asked) for p in ("full", "mpic-16")} == {"full": 8, "mpic-16": 8}
    assert "questions would tell" in " ".join(said.split())
    (written,) = (tmp_path / "data" / "calibrations").iterdir()
    assert str(written) in "".join(said.split())
    assert set(json.loads(written.read_text())["kinds"]) == {"image", "text"}
    auto = Auto.of_model(load_model(str(SMALL), device="cpu", dtype="float32").info, tmp_path / "data")
    assert auto.default.name == "prefix" and "at most 2 points" in auto.explanation


@pytest.mark.parametrize("policy", ["cacheblend-15", "legolink-0", "packet", "reuse-2step", "nocache"])
def test_policies_that_auto_may_not_choose_are_refused_before_anything_is_asked(tmp_path, policy):
    config = EvalConfig((TaskEntry("prose-codes"),), str(SMALL), ("full", policy))
    with pytest.raises(BadRequest, match="cannot be chosen by auto"):
        Calibrator(config, tmp_path / "out", 2.0)
    assert list(tmp_path.iterdir()) == []
