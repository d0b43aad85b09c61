"""Training of adapters: the student sees the same as a link in the engine, and only the adapter learns."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_kit import adapter, family, ids, image_chunk, logits_of, prompt_of, request_of, text_chunk
from families import random_image
from typer.testing import CliRunner

from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused
from mpic.model.identity import fingerprint
from mpic.model.load import load_model
from mpic.packet.adapter import load_adapter
from mpic.prompt import ChatTemplate
from mpic_lab.train.cli import app
from mpic_lab.train.packet import (
    ADAPTER,
    CHECKPOINT,
    RECORD,
    PacketTrainer,
    Settings,
    TrainingRefused,
    loss_of,
)
from mpic_lab.train.packet_data import TrainingDataError, prompts, read
from mpic_lab.train.packet_lesson import Classroom, Lesson

SAID = 6


def prompt_over(name: str):
    chunks = [text_chunk(ids(7, 21)), text_chunk(ids(8, 13))]
    if name in ("llava", "qwen2_vl", "qwen3_vl"):
        chunks[1] = image_chunk(random_image(3))
    return prompt_of(ids(1, 6), chunks[0], ids(2, 3), chunks[1], ids(4, 5))


def answered(name: str, policy: str):
    """The engine's greedy answer and its distributions."""
    with closing(NativeEngine(family(name).loaded, adapter=adapter(name), pages=256, page_size=8)) as engine:
        return logits_of(engine.submit(request_of(prompt_over(name), policy, SAID, logprobs=300)), SAID)


@pytest.mark.parametrize("name", ["llama", "phi3", "llava", "qwen2_vl", "qwen3_vl"])
def test_teacher_and_student_give_what_the_engine_gives_under_full_and_packet(name):
    room = Classroom(family(name).loaded)
    lesson = room.lesson(prompt_over(name), SAID)
    expected_ids, expected = answered(name, "full")
    assert lesson.answer.tolist() == expected_ids
    assert (lesson.teacher - expected).abs().max() < 1e-4
    said, expected = answered(name, "packet")
    theirs = Lesson(lesson.parts, torch.tensor(said), lesson.teacher)
    soft = adapter(name)
    with torch.no_grad():
        assert (room.student(theirs, soft.header, soft.trailer) - expected).abs().max() < 1e-4


def test_only_the_adapter_has_gradients_and_every_token_of_it():
    fam = family("qwen3_vl")
    room = Classroom(fam.loaded)
    lesson, soft = room.lesson(prompt_over("qwen3_vl"), SAID), adapter("qwen3_vl")
    header, trailer = soft.header.clone().requires_grad_(), soft.trailer.clone().requires_grad_()
    for objective in ("kl", "ce"):
        header.grad = trailer.grad = None
        loss_of(lesson, room.student(lesson, header, trailer), objective).backward()
        assert header.grad.abs().sum(1).min() > 0 and trailer.grad.abs().sum(1).min() > 0
    assert not [name for name, p in fam.loaded.model.named_parameters() if p.grad is not None]


def test_the_losses_are_means_over_the_answer():
    teacher = torch.log_softmax(torch.randn(5, 300), -1)
    student = torch.log_softmax(torch.randn(5, 300), -1)
    lesson = Lesson((), teacher.argmax(-1), teacher)
    kl = sum((t.exp() * (t - s)).sum() for t, s in zip(teacher, student, strict=True)) / 5
    ce = -sum(s[t] for t, s in zip(lesson.answer, student, strict=True)) / 5
    assert torch.allclose(loss_of(lesson, student, "kl"), kl)
    assert torch.allclose(loss_of(lesson, student, "ce"), ce)
    assert loss_of(lesson, teacher, "kl").abs() < 1e-6


@pytest.fixture(scope="module")
def tiny(tiny_model):
    return load_model(tiny_model)


@pytest.fixture
def data(tmp_path):
    lines = [
        {"documents": [f"note {i} says {i * 7}", "nothing here"], "question": f"which {i}?"}
        for i in range(40)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def settings(out, data, **changes):
    given = {"samples": 16, "epochs": 2, "batch": 8, "tokens": 2, "answer": 3} | changes
    return Settings(out, data, **given)


def test_a_run_that_is_resumed_ends_as_one_that_was_never_interrupted(tiny, data, tmp_path, monkeypatch):
    before = fingerprint(tiny.model)
    whole = PacketTrainer(tiny, settings(tmp_path / "whole", data), False, lambda line: None).run()
    assert fingerprint(tiny.model) == before == tiny.digest
    saved = PacketTrainer._save

    def interrupted(self):
        saved(self)
        if self.curve[-1]["epoch"] == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(PacketTrainer, "_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PacketTrainer(tiny, settings(tmp_path / "cut", data), False, lambda line: None).run()
    monkeypatch.setattr(PacketTrainer, "_save", saved)
    with pytest.raises(TrainingRefused, match="other settings: tokens"):
        PacketTrainer(tiny, settings(tmp_path / "cut", data, tokens=3), True)
    with pytest.raises(TrainingRefused, match="--resume"):
        PacketTrainer(tiny, settings(tmp_path / "cut", data), False)
    resumed = PacketTrainer(tiny, settings(tmp_path / "cut", data), True, lambda line: None).run()
    assert resumed.digest == whole.digest
    found = load_adapter(tmp_path / "cut" / ADAPTER, whole.model, tiny.text_config.hidden_size)
    assert found.digest == whole.digest
    record = json.loads((tmp_path / "cut" / RECORD).read_text())
    losses = [point["valid"] for point in record["curve"]]
    assert len(losses) == 3 and record["valid"] == min(losses)
    assert not (tmp_path / "cut" / CHECKPOINT).exists()
    with pytest.raises(TrainingRefused, match=r"adapter\.safetensors of an earlier run"):
        PacketTrainer(tiny, settings(tmp_path / "cut", data), False)


def test_the_answers_that_a_resumed_run_repeats_are_no_part_of_its_time(tiny, data, tmp_path, monkeypatch):
    ticks = [0.0]
    lessons = PacketTrainer._lessons

    def slow(self, *given):
        ticks[0] += 3600
        return lessons(self, *given)

    monkeypatch.setattr(PacketTrainer, "_lessons", slow)
    monkeypatch.setattr("mpic_lab.train.packet.time", SimpleNamespace(monotonic=lambda: ticks[0]))
    PacketTrainer(tiny, settings(tmp_path / "out", data, minutes=1.0), False, lambda line: None).run()
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["seconds"] == 0 and record["steps"] == 4  # the limit of a minute has cut nothing


@pytest.mark.parametrize("fitting", [16, 24])
def test_prompts_that_fit_are_divided_when_most_do_not(tiny, data, tmp_path, monkeypatch, fitting):
    data.write_text("\n".join(data.read_text().splitlines() * 8))
    answered, whole, said = [], Classroom.lesson, []

    def lesson(room, prompt, most):
        found = whole(room, prompt, most) if len(answered) < fitting else answered[0]
        answered.append(found)
        too_long = ((range(tiny.context_length), False),)
        return found if len(answered) <= fitting else replace(found, parts=too_long)

    monkeypatch.setattr(Classroom, "lesson", lesson)
    PacketTrainer(tiny, settings(tmp_path / "out", data, samples=256, epochs=1), False, said.append).run()
    assert f"{fitting - 8} prompts to train on, 8 held out, {(fitting - 8) // 8} steps an epoch" in said
    assert (tmp_path / "out" / ADAPTER).exists()


def test_prompts_come_from_a_file_or_the_generator_and_a_bad_file_is_named(tiny, data, tmp_path):
    template = ChatTemplate(tiny.processor)
    for path in (data, None):
        found = prompts(path, template, 5, 0, tiny.context_length)
        assert len(found) == 5 and all(prompt.chunks for prompt in found)
    found = prompts(None, template, 5, 0, tiny.context_length, ("card", "needle"))
    assert all(chunk.token_ids is not None for prompt in found for chunk in prompt.chunks)  # no images
    with pytest.raises(TrainingDataError, match="has 40 prompts with documents or images; 41 are needed"):
        prompts(data, template, 41, 0, tiny.context_length)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"documents": ["a"], "question": "b"}\n{"document": "a"}\n')
    with pytest.raises(TrainingDataError, match=r"line 2 of .*bad\.jsonl is neither"):
        list(read(bad))
    with pytest.raises(TrainingDataError, match="cannot read"):
        list(read(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"], ids=ascii)
def test_a_line_of_training_data_ends_at_a_line_feed_alone(separator, tmp_path):
    data = tmp_path / "data.jsonl"
    text = f"one{separator}two"
    line = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False)
    data.write_text(f"{line}\n\n{line}\r\n", encoding="utf-8")
    assert [messages[0]["content"] for messages in read(data)] == [text, text]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "card, poems"], "no tasks poems; there are image, "),
        (["--tasks", "card", "--data", "prompts.jsonl"], "--data has prompts of its own"),
    ],
)
def test_tasks_that_do_not_exist_or_do_not_apply_are_refused_before_the_model_is_loaded(mpic, options, said):
    status, _, err = mpic("train", "packet", "--model", "none", "--out", "never", *options)
    assert status and said in err


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_model_whose_layers_see_less_than_everything_is_not_trained(name):
    with pytest.raises(ModelRefused, match="packets cannot be trained"):
        Classroom(family(name).loaded)


@pytest.mark.parametrize("former", ["mllm", "clip", "score", "card"])
def test_a_trainer_that_went_is_refused_naming_where_it_is(former):
    done = CliRunner().invoke(app, [former, "--minutes", "2"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2 and f"mpic train {former}" in done.output and "demo-model.md" in done.output
