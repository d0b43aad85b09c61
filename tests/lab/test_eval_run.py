"""``mpic eval run`` on the demo model: every answer kept, resumable, reported."""

from __future__ import annotations

import gzip
import json
import shutil
from contextlib import closing
from dataclasses import replace

import pytest
from small_models import SMALL
from typer.testing import CliRunner

from mpic.config import ConfigError, EngineConfig
from mpic.engine import load_engine
from mpic.errors import BadRequest, EngineStopped, OutOfMemory, UnsupportedParameter
from mpic.model import dtype_choice
from mpic.prompt import ChatTemplate, build_prompt
from mpic_lab.eval import cli, methods
from mpic_lab.eval.answers import PolicyAnswer, lines_of, read_answers, ready
from mpic_lab.eval.compare import compare_policies
from mpic_lab.eval.config import EvalConfig, load_eval_config
from mpic_lab.eval.evidence import fill
from mpic_lab.eval.report import write_report
from mpic_lab.eval.resolve import LocalResolver
from mpic_lab.eval.run import LISTED, Evaluator, _Session
from mpic_lab.eval.tasks import TaskError

CONFIG = f"""
model = "{SMALL.as_posix()}"
policies = ["mpic-16", "reuse", "nocache"]
pressed = ["mpic-16"]
presses = ["snapkv-50"]
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
    assert len(answers) == 4 * 5
    assert {a.policy for a in answers} == {"full", "mpic-16", "reuse", "nocache", "mpic-16+snapkv-50"}
    for answer in answers:
        assert answer.skipped is None and answer.ttft_ms > 0 and answer.flops > 0
        assert answer.kl == 0 if answer.policy == "full" else answer.kl >= 0
    reused = {a.policy: a.reused for a in answers if a.task == "world-image"}
    assert reused["full"] == reused["nocache"] == 0 < reused["mpic-16"] < reused["reuse"] == 128
    token = 5 * 2 * 8 * 64 * 4  # bytes: layers, keys and values, heads, dimensions, float32
    size = {a.policy: a.kv_bytes for a in answers if a.task == "world-image"}
    assert size["full"] == size["nocache"] == 0 and size["reuse"] == size["mpic-16"] == 128 * token
    assert size["mpic-16+snapkv-50"] == 64 * token
    flops = {a.policy: a.flops for a in answers if a.task == "world-image"}
    assert flops["mpic-16+snapkv-50"] < flops["mpic-16"]
    assert flops["reuse"] < flops["mpic-16"] < flops["full"]


def test_the_table_of_methods_has_a_row_a_policy_and_press(finished, tmp_path):
    folder, answers = finished
    done = CliRunner().invoke(cli.app, ["table", str(folder / "out"), str(tmp_path / "methods.json")])
    assert done.exit_code == 0, done.output
    table = json.loads((tmp_path / "methods.json").read_text())
    rows = {row["policy"]: row for row in table["rows"]}
    assert table["model"] == "demo" and table["questions"] == 4
    assert set(rows) == {a.policy for a in answers}
    for row in rows.values():
        assert tuple(row) == methods.COLUMNS and row["ttft_ms"] > 0 and row["gflop"] > 0
        assert 0 <= row["low"] <= row["score"] <= row["high"] <= 100
    assert rows["mpic-16+snapkv-50"]["bytes"] < rows["mpic-16"]["bytes"] == rows["reuse"]["bytes"]
    page = tmp_path / "page.md"
    page.write_text("<!-- made: methods methods.json -->\n<!-- end -->\n")
    assert fill(page) == 1 and "| `mpic-16+snapkv-50` |" in page.read_text()
    page.write_text("<!-- made: methods none.json -->\n<!-- end -->\n")
    assert fill(page) == 1 and "Not measured yet" in page.read_text()


def test_a_run_resumes_where_it_was_interrupted_and_asks_nothing_twice(finished):
    folder, answers = finished
    path = folder / "out" / "answers.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    kept = "".join(lines[:-4])
    path.write_text(kept + lines[-4][:20])
    assert len(read_answers(folder / "out")) == len(answers) - 4
    Evaluator(load_eval_config(folder / "eval.toml"), folder / "out").run()
    again = read_answers(folder / "out")
    assert path.read_text().startswith(kept)
    assert {a.key: a.answer for a in again} == {a.key: a.answer for a in answers}
    assert len(again) == len(answers)


def test_several_questions_at_once_get_the_same_answers_in_the_same_order_and_no_times(finished, tmp_path):
    folder, answers = finished
    config = replace(load_eval_config(folder / "eval.toml"), at_once=3)
    again = Evaluator(config, tmp_path / "out").run()
    same = ("answer", "scores", "pieces", "chunk_tokens", "top1")
    assert [a.key[:3] for a in again] == [a.key[:3] for a in answers]
    before = {a.key: [getattr(a, name) for name in same] for a in answers}
    assert {a.key: [getattr(a, name) for name in same] for a in again} == before
    assert all(a.ttft_ms is None and a.skipped is None for a in again)
    write_report(tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "fewer operations" in text or "No policy" in text
    assert "TTFT" not in text.split("| policy")[1].split("\n")[0]


def broken(monkeypatch, error):
    """Has every request of ``reuse`` end with an error."""
    submit = _Session._submit

    def failing(self, prompt, policy, salt="", **sampling):
        if policy == "reuse":
            raise error
        return submit(self, prompt, policy, salt, **sampling)

    monkeypatch.setattr(_Session, "_submit", failing)


def test_what_was_skipped_for_want_of_memory_is_asked_again_and_the_later_line_counts(
    finished, tmp_path, monkeypatch
):
    folder, answers = finished
    config = load_eval_config(folder / "eval.toml")
    with monkeypatch.context() as patched:
        broken(patched, OutOfMemory("the pool has no page"))
        Evaluator(config, tmp_path / "out").run()
    skipped = [answer for answer in read_answers(tmp_path / "out") if answer.skipped]
    assert {answer.policy for answer in skipped} == {"reuse"} and len(skipped) == 4
    Evaluator(config, tmp_path / "out").run()
    again = read_answers(tmp_path / "out")
    assert not any(answer.skipped for answer in again)
    assert {a.key: a.answer for a in again} == {a.key: a.answer for a in answers}
    assert len(again) == len(answers)
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == len(answers) + 4


def test_what_is_refused_whenever_it_is_asked_is_not_asked_again(finished, tmp_path, monkeypatch):
    config = load_eval_config(finished[0] / "eval.toml")
    broken(monkeypatch, UnsupportedParameter("not with this model"))
    Evaluator(config, tmp_path / "out").run()
    before = (tmp_path / "out" / "answers.jsonl").read_text()
    Evaluator(config, tmp_path / "out").run()
    assert (tmp_path / "out" / "answers.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("code", "lasting"),
    [
        ("invalid_upload", True),
        ("invalid_text", True),
        ("invalid_image", True),
        ("invalid_video", True),
        ("video_too_large", True),
        ("video_too_costly", False),  # on a faster machine it may not be
        ("no_video_decoder", False),  # the package may be installed
        ("out_of_memory", False),
    ],
)
def test_what_was_refused_is_asked_again_only_if_the_answer_may_be_another(code, lasting):
    assert PolicyAnswer("t", 1, "0", "full", skipped=f"{code}: it was refused").lasting == lasting


def test_a_run_ends_when_its_engine_has_stopped(finished, tmp_path, monkeypatch):
    config = load_eval_config(finished[0] / "eval.toml")
    broken(monkeypatch, EngineStopped("the device has failed"))
    with pytest.raises(EngineStopped):
        Evaluator(config, tmp_path / "out").run()
    assert not any(answer.skipped for answer in read_answers(tmp_path / "out"))


def test_a_packed_run_is_read_and_resumed(finished, tmp_path):
    folder, answers = finished
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out)
    text = (out / "answers.jsonl").read_text()
    kept = "".join(text.splitlines(keepends=True)[:-4])
    (out / "answers.jsonl.gz").write_bytes(gzip.compress(kept.encode()))
    (out / "answers.jsonl").unlink()
    assert [a.key for a in read_answers(out)] == [a.key for a in read_answers(folder / "out")[:-4]]
    Evaluator(load_eval_config(folder / "eval.toml"), out).run()
    assert not (out / "answers.jsonl.gz").exists()
    assert (out / "answers.jsonl").read_text().startswith(kept)
    assert {a.key for a in read_answers(out)} == {a.key for a in answers}
    (out / "answers.jsonl").unlink()
    (out / "answers.jsonl.gz").write_bytes(gzip.compress(kept.encode())[:-9])
    with pytest.raises(BadRequest, match="unpacked"):
        read_answers(out)


def test_a_line_that_is_whole_but_for_its_end_is_kept(finished, tmp_path):
    folder, answers = finished
    shutil.copytree(folder / "out", tmp_path / "out")
    path = tmp_path / "out" / "answers.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    evaluator = Evaluator(load_eval_config(folder / "eval.toml"), tmp_path / "out")
    assert len(evaluator.done) == len(answers) == len(path.read_text().splitlines())


def test_an_answer_cut_off_within_a_letter_is_left_out(tmp_path):
    line = lambda id, text: lines_of([PolicyAnswer("world-image", 1, id, "full", answer=text)]).encode()
    whole, cut = line("0", "rot"), line("1", "grün").split("ü".encode()[1:])[0]
    (tmp_path / "answers.jsonl").write_bytes(whole + cut)
    assert [answer.answer for answer in ready(tmp_path)] == ["rot"]
    assert (tmp_path / "answers.jsonl").read_bytes() == whole


def test_more_questions_may_be_asked_for_on_the_command_line(finished):
    folder, _ = finished
    config = load_eval_config(folder / "eval.toml", questions=7)
    assert {options.questions for _, options in config.cells()} == {7}


def test_the_generated_world_is_that_of_the_model_unless_it_is_said(tmp_path):
    def found(text):
        (tmp_path / "e.toml").write_text(text)
        config = load_eval_config(tmp_path / "e.toml")
        return {options.generation for _, options in config.cells()}, next(iter(config.data().values()))

    assert found(CONFIG) == ({1}, [None, "passage", 512])
    second = ({2}, [None, "passage", 512, "generation 2"])
    assert found(f"generation = 2\n{CONFIG}") == second
    assert found(CONFIG.replace(SMALL.as_posix(), "some/hub-id")) == second
    with pytest.raises(ConfigError, match="generation is 1 or 2, not 3"):
        found(f"generation = 3\n{CONFIG}")


def test_a_run_resumes_after_the_models_folder_has_moved(finished, tmp_path):
    folder, _ = finished
    config = load_eval_config(folder / "eval.toml")
    shutil.copytree(SMALL, tmp_path / SMALL.name)
    moved = replace(config, model=str(tmp_path / SMALL.name))
    assert moved.fingerprint() == config.fingerprint()
    (tmp_path / SMALL.name / "config.json").write_text("{}")
    assert moved.fingerprint() != config.fingerprint()


def test_one_changed_byte_of_the_weights_is_another_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = EvalConfig((), model=str(folder))
    weights = bytearray(3 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    before = config.fingerprint()
    weights[2 << 20] = 1
    (folder / "model.safetensors").write_bytes(weights)
    assert config.fingerprint() != before


def test_a_run_that_answered_nothing_stands_in_nobodys_way(tmp_path):
    (tmp_path / "e.toml").write_text(CONFIG)
    config = load_eval_config(tmp_path / "e.toml")
    Evaluator(replace(config, model="no/model"), tmp_path / "out")
    Evaluator(config, tmp_path / "out")


def test_another_seed_does_not_mix_into_a_run(finished):
    folder, _ = finished
    (folder / "other.toml").write_text(CONFIG.replace("seed = 5", "seed = 6"))
    with pytest.raises(BadRequest, match="another"):
        Evaluator(load_eval_config(folder / "other.toml"), folder / "out")


def test_another_file_or_split_does_not_mix_into_a_run(tmp_path):
    text = '[[task]]\nname = "longbench-qa"\npath = "{}.jsonl"\nsplit = "{}"'
    configs = {}
    for file in ("hotpotqa", "musique"):
        (tmp_path / f"{file}.jsonl").touch()
    for file, split in (("hotpotqa", "passage"), ("hotpotqa", "fixed"), ("musique", "passage")):
        (tmp_path / "e.toml").write_text(text.format(file, split))
        configs[file, split] = load_eval_config(tmp_path / "e.toml")
    for _ in range(2):
        Evaluator(configs["hotpotqa", "passage"], tmp_path / "out")
        line = lines_of([PolicyAnswer("longbench-qa", 0, "a", "full")])
        (tmp_path / "out" / "answers.jsonl").write_text(line)
    for other in (("hotpotqa", "fixed"), ("musique", "passage")):
        with pytest.raises(BadRequest, match="longbench-qa over another file or split"):
            Evaluator(configs[other], tmp_path / "out")
    (tmp_path / "e.toml").write_text('[[task]]\nname = "world-image"')
    Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out")  # a task may be added
    with pytest.raises(BadRequest, match="longbench-qa"):
        Evaluator(configs["musique", "passage"], tmp_path / "out")


def test_answers_in_another_dtype_or_from_another_device_do_not_mix_into_a_run(finished, tmp_path):
    folder, answers = finished
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out)
    config = load_eval_config(folder / "eval.toml")
    facts = json.loads((out / "run.json").read_text())
    assert facts["computed"] == ["float32", "cpu"]
    (out / "run.json").write_text(json.dumps(facts | {"computed": ["bfloat16", "cuda"]}))
    assert len(Evaluator(config, out).run()) == len(answers)  # a finished run may be graded elsewhere
    assert json.loads((out / "run.json").read_text())["computed"] == ["bfloat16", "cuda"]
    whole = (out / "answers.jsonl").read_text()
    (out / "answers.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    for at_once in (1, 3):
        with pytest.raises(BadRequest, match="another dtype or on another kind of device"):
            Evaluator(replace(config, at_once=at_once), out).run()
    del facts["computed"]  # as a run of an earlier version
    (out / "run.json").write_text(json.dumps(facts))
    assert len(Evaluator(config, out).run()) == len(answers)
    assert json.loads((out / "run.json").read_text())["computed"] == ["float32", "cpu"]


def test_the_report_has_tables_plots_and_advice(finished):
    folder, _ = finished
    for path in write_report(folder / "out"):
        assert path.stat().st_size > 500
    text = (folder / "out" / "report.md").read_text()
    assert "| mpic-16 |" in text and "world-image" in text
    assert "data:image/png" in (folder / "out" / "report.html").read_text()


@pytest.fixture(scope="module")
def session(finished):
    """A session, and the prompt of the first question."""
    config = load_eval_config(finished[0] / "eval.toml")
    engine, processor = load_engine(EngineConfig(model=config.model))
    with closing(engine):
        template = ChatTemplate(processor)
        session = _Session(engine, template, config)
        sample = next(session.samples(*config.cells()[0]))
        yield session, build_prompt(sample.messages, template, LocalResolver(template))


@pytest.mark.parametrize(
    "policy", ["prefix", "reuse", "reuse-2step", "mpic-16", "legolink-0", "cacheblend-15", "nocache"]
)
def test_the_first_token_is_compared_as_if_nothing_of_the_prompt_had_been_computed(session, policy):
    """Asked after the answer, it finds the prompt's own prefix; the distribution is that of a request that does not."""
    session, prompt = session
    session._compile(prompt, [policy])
    list(session._submit(prompt, policy, max_tokens=4))
    warm = session._first_token(prompt, policy)
    asked = {"max_tokens": 1, "logprobs": LISTED, "ignore_eos": True}
    (fresh, *_) = [d.logprobs[0] for d in session._submit(prompt, policy, "new", **asked) if d.logprobs]
    fresh = dict(fresh.top)
    likely = sorted(fresh, key=fresh.__getitem__)[-50:]
    assert [warm[t] for t in likely] == pytest.approx([fresh[t] for t in likely], abs=1e-3)


@pytest.mark.parametrize("asked, loaded", [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_answers_are_compared_in_float32_even_where_the_processor_is_faster_in_another_dtype(
    finished, tmp_path, monkeypatch, asked, loaded
):
    class Loaded(Exception):
        pass

    def load_engine(config):
        raise Loaded(config.dtype)

    monkeypatch.setattr(dtype_choice, "why_no_unit", lambda: "")
    monkeypatch.setattr("mpic_lab.eval.run.load_engine", load_engine)
    config = replace(load_eval_config(finished[0] / "eval.toml"), dtype=asked)
    with pytest.raises(Loaded, match=loaded):
        Evaluator(config, tmp_path / "out").run()


def test_a_question_finds_nothing_that_another_task_has_left(tmp_path):
    """People are the same in both tasks, so a prefix of one would serve the other."""
    (tmp_path / "my.toml").write_text(
        f'model = "{SMALL.as_posix()}"\npolicies = ["prefix", "reuse"]\nquestions = 2\nfidelity = false\n'
        '[[task]]\nname = "world-biography"\nchunks = [2]\n[[task]]\nname = "world-two-hop"\nchunks = [2]\n'
    )
    config = load_eval_config(tmp_path / "my.toml")
    found = {}
    for name, tasks in (("both", config.tasks), ("one", config.tasks[1:])):
        answers = Evaluator(replace(config, tasks=tasks), tmp_path / name).run()
        found[name] = {a.key: (a.computed, a.flops) for a in answers if a.task == "world-two-hop"}
    assert found["both"] == found["one"]


def test_a_stranger_measures_policies_on_a_longbench_file_and_a_model_folder(tmp_path, monkeypatch):
    """The README's way: a file in the public format, a model by its path, one command."""
    other = "Passage 1:\nAbout Bob Hill. Bob Hill lives in Oslo.\n\nPassage 2:\n"
    format = {"length": 20, "dataset": "hotpotqa", "language": "en", "all_classes": None}
    entries = [
        {"input": f"Where does {name} live?", "context": f"{other}{name} lives in {city}.", "answers": [city]}
        | {**format, "_id": f"q{number}"}
        for number, (name, city) in enumerate((("Ana Reed", "Rome"), ("Zoe Nash", "Dublin")))
    ]
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "my.toml").write_text(
        f'model = "{SMALL.as_posix()}"\npolicies = ["reuse", "mpic-16"]\n'
        '[[task]]\nname = "longbench-qa"\npath = "hotpotqa.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["run", "my.toml", "--out", "my-run"])
    assert done.exit_code == 0, done.output
    answers = read_answers(tmp_path / "my-run")
    assert [a.sample for a in answers if a.policy == "mpic-16"] == ["q0", "q1"]
    assert all(a.skipped is None and a.pieces == 2 for a in answers) and len(answers) == 6
    assert "longbench-qa" in (tmp_path / "my-run" / "report.html").read_text()
    (tmp_path / "hotpotqa.jsonl").unlink()
    with pytest.raises(TaskError, match="hotpotqa"):
        Evaluator(load_eval_config(tmp_path / "my.toml"), tmp_path / "other").run()


def test_a_task_may_be_scored_by_another_metric_than_its_own(tmp_path):
    entry = {"index": 0, "input": "The number of fox is 12.\nWhat is the number of fox?", "outputs": ["12"]}
    (tmp_path / "hay.jsonl").write_text(json.dumps(entry) + "\n")
    text = f'model = "{SMALL.as_posix()}"\npolicies = []\nfidelity = false\n'
    text += '[[task]]\nname = "ruler-niah"\npath = "hay.jsonl"\n'
    (tmp_path / "e.toml").write_text(f'{text}metric = "f1"\n')
    (answer,) = Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out").run()
    assert answer.metric == "f1" and set(answer.scores) == {"em", "f1"}
    answer.scores = {"em": 0.0, "f1": 0.25}
    (result,) = compare_policies([answer])
    assert result.score == 25
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(BadRequest, match="over another file"):
        Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out")
    (tmp_path / "e.toml").write_text(f'{text}metric = "best"\n')
    with pytest.raises(ConfigError, match="metric is one of em, f1, contains, rouge-l, not 'best'"):
        load_eval_config(tmp_path / "e.toml")


def test_a_policy_counts_as_near_only_if_no_task_loses_more_than_five_points():
    def answers(policy, right):
        more = {"ttft_ms": 1, "flops": 1, "chunk_tokens": 9}
        return [
            PolicyAnswer(task, 2, str(i), policy, scores={"em": float(i < n)}, **more)
            for task, n in right.items()
            for i in range(100)
        ]

    full = answers("full", {"world-image": 90, "world-card": 90})
    close = answers("mpic-16", {"world-image": 87, "world-card": 91})
    uneven = answers("mpic-8", {"world-image": 84, "world-card": 96})
    found = {result.policy: result for result in compare_policies([*full, *close, *uneven])}
    assert found["mpic-16"].within_two_points and found["mpic-16"].lost.points == pytest.approx(1)
    assert found["mpic-8"].lost.points == pytest.approx(0) and not found["mpic-8"].within_two_points


@pytest.mark.parametrize("mode", ["fixed", "sentence", "paragraph", "section"])
def test_documents_are_cut_by_kvsplit_in_the_models_tokens(tmp_path, mode):
    text = "The code of the lamp is 123. " * 12
    entry = {"input": "What is the code of the lamp?", "context": text, "answers": ["123"]}
    (tmp_path / "cut.jsonl").write_text(json.dumps(entry) + "\n")
    (tmp_path / "e.toml").write_text(
        f'model = "{SMALL.as_posix()}"\npolicies = ["reuse"]\nfidelity = false\n[[task]]\nname = "longbench-qa"\n'
        f'path = "cut.jsonl"\nsplit = "{mode}"\ntokens = 40'
    )
    full, reuse = Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out").run()
    assert full.skipped is None and reuse.reused == reuse.chunk_tokens > 80


def test_a_prompt_the_model_cannot_take_is_kept_as_skipped_with_the_reason(tmp_path):
    entry = {"input": "Who?", "context": "word " * 4000, "answers": ["x"]}
    (tmp_path / "long.jsonl").write_text(json.dumps(entry) + "\n")
    (tmp_path / "e.toml").write_text(
        f'model = "{SMALL.as_posix()}"\npolicies = []\n'
        '[[task]]\nname = "longbench-qa"\npath = "long.jsonl"\nsplit = "none"\n'
        "max_length = 100000"  # otherwise its middle is left out, and it fits
    )
    (answer,) = Evaluator(load_eval_config(tmp_path / "e.toml"), tmp_path / "out").run()
    assert "context_length" in answer.skipped
    with pytest.raises(BadRequest, match="no answers"):
        write_report(tmp_path / "out")
