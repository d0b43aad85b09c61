"""A training run that was killed continues from its last checkpoint, which is never incomplete."""

import dataclasses
import inspect
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from unittest.mock import Mock

import psutil
import pytest
import torch

from mpic.config import ConfigError
from mpic_lab.train import checkpoint, curriculum, generations, mllm
from mpic_lab.train.mllm import Settings, train_mllm
from mpic_lab.train.model import save_model

torch.set_num_threads(1)


@pytest.fixture
def settings(tmp_path, monkeypatch, few_conversations):
    quick = dataclasses.replace(generations.FIRST, watched=(("image", 1, None),), images=4)
    monkeypatch.setitem(generations.GENERATIONS, 1, quick)
    monkeypatch.setattr(mllm, "plot_stages", Mock())
    return Settings(tmp_path, steps=6, workers=1, tokens=256, quiet=True, device="cpu", watched=1)


def killed_after(saves, settings, monkeypatch):
    """A run that is killed after writing as many checkpoints."""
    whole, written = checkpoint.save, []

    def save(*args):
        whole(*args)
        written.append(args)
        if len(written) == saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(checkpoint, "save", save)
        train_mllm(dataclasses.replace(settings, evaluate_every=0.0))


@pytest.mark.parametrize("at", [1, 4])
def test_a_killed_run_takes_every_step_once_draws_as_for_where_it_was_and_leaves_both_models(
    settings, monkeypatch, at
):
    killed_after(at, settings, monkeypatch)
    saved = checkpoint.load(settings.out, 0, torch.device("cpu"))
    taken, drawn, stepping, draw = [], [], mllm.Optimizers.step, curriculum.draw_group
    monkeypatch.setattr(mllm.Optimizers, "step", lambda self, s: (taken.append(s), stepping(self, s)))
    monkeypatch.setattr(curriculum, "draw_group", lambda *args: (drawn.append(args[2]), draw(*args))[1])
    train_mllm(dataclasses.replace(settings, resume=True))
    assert {"vision": 0, "base": 1}[saved["stage"]] + saved["step"] + len(taken) == 6
    if at == 4:
        assert saved["stage"] == "base" and saved["step"] > 0
        assert drawn[0] == saved["step"] / 4
    assert drawn[-1] == 1.0
    for name in ("plain", "pic"):
        assert (settings.out / name / "model.safetensors").exists()
    assert torch.tensor([1e-40]).mul(1.0).item() != 0.0, "subnormal numbers are kept again"


def test_workers_of_a_run_in_the_background_end_when_it_is_killed(tmp_path):
    command = [sys.executable, "-m", "mpic.cli", "train", "mllm", "--workers", "2", "--device", "cpu"]
    command += ["--steps", "39", "--out", tmp_path]  # so few that the bar shows every step
    shown = tmp_path / "stderr"
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in the background
    try:
        with shown.open("w") as stderr:
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    finally:
        signal.signal(signal.SIGINT, ignored)
    try:
        while "step=1" not in shown.read_text():
            assert run.poll() is None
            time.sleep(0.2)
        children = psutil.Process(run.pid).children()
        workers = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        assert len(workers) == 2
    finally:
        run.kill()
        run.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    left = []
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            if worker.status() != psutil.STATUS_ZOMBIE:  # whoever adopted it may not look after it
                worker.kill()
                left.append(worker)
    assert not left
    assert not (tmp_path / "plain").exists(), "they have trained to the end"


def test_a_worker_whose_run_was_killed_before_it_could_hear_of_it_computes_nothing(settings, monkeypatch):
    monkeypatch.setattr(signal, "signal", hear := Mock())
    monkeypatch.setattr(mllm, "build_tokenizer", compute := Mock())
    with pytest.raises(KeyboardInterrupt):
        mllm._run(1, 2, settings, "", False, parent=os.getppid() + 1)
    hear.assert_called_once_with(signal.SIGINT, signal.SIG_DFL)
    compute.assert_not_called()


def test_workers_are_told_which_process_is_their_run(settings, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn := Mock())
    train_mllm(dataclasses.replace(settings, workers=2))
    (worker, arguments), options = spawn.call_args
    assert inspect.signature(worker).bind(0, *arguments).arguments["parent"] == os.getpid()
    assert options == {"nprocs": 2}


def test_a_checkpoint_that_was_not_finished_is_not_seen(tmp_path, monkeypatch):
    def state(step):
        return {"stage": "base", "step": step, "finished": ["vision"], "model": {"w": torch.tensor([step])}}

    checkpoint.save(tmp_path, 0, {}, state(1))
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk"):
        broken.setattr(checkpoint, "_meet", Mock(side_effect=OSError("disk")))
        checkpoint.save(tmp_path, 0, {}, state(2))
    assert checkpoint.load(tmp_path, 0, torch.device("cpu"))["step"] == 1
    checkpoint.save(tmp_path, 0, {}, state(3))
    assert checkpoint.load(tmp_path, 0, torch.device("cpu"))["step"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-base-3-mid-0.pt", "checkpoint.json"]


def test_saving_deletes_its_own_older_files_only(tmp_path):
    (tmp_path / "checkpoint-500").mkdir()  # as other trainers call theirs
    for name in ("checkpoint-best.pt", "checkpoint-base-1-mid-0.pt.bak", "checkpoint-500/model.pt"):
        (tmp_path / name).write_text("another program's")
    for name in ("checkpoint-base-1-mid-1.pt", "checkpoint-vision-1-end-0.tmp"):
        (tmp_path / name).write_text("left by a run that was killed")
    for step in (1, 2):
        checkpoint.save(tmp_path, 0, {}, {"stage": "base", "step": step, "finished": ["vision"]})
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "checkpoint-500/model.pt",
        "checkpoint-base-1-mid-0.pt.bak",
        "checkpoint-base-2-mid-0.pt",
        "checkpoint-best.pt",
        "checkpoint.json",
    ]


def test_a_run_is_not_resumed_as_another_one_nor_overwritten(tmp_path):
    stored = {"start": None, "init": "structured", "seed": 0, "tokens": 256, "generation": 1}
    with pytest.raises(ConfigError, match="nothing to resume"):
        checkpoint.check(tmp_path, stored, 1, resume=True)
    checkpoint.check(tmp_path, stored, 1, resume=False)
    state = {"stage": "base", "step": 1, "finished": []}
    checkpoint.save(tmp_path, 0, stored, state)
    checkpoint.check(tmp_path, stored, 1, resume=True)
    with pytest.raises(ConfigError, match="earlier run"):
        checkpoint.check(tmp_path, stored, 1, resume=False)
    with pytest.raises(ConfigError, match="seed, workers"):
        checkpoint.check(tmp_path, {**stored, "seed": 1}, 2, resume=True)


def test_a_run_from_a_finished_model_resumes_from_its_own_weights(settings, tmp_path, monkeypatch):
    tokenizer = mllm.build_tokenizer()
    save_model(mllm.build_model(tokenizer), tokenizer, tmp_path / "start")
    own = dataclasses.replace(settings, out=tmp_path / "run", start=tmp_path / "start")
    killed_after(4, own, monkeypatch)
    saved = checkpoint.load(own.out, 0, torch.device("cpu"))
    seen = []
    running = mllm._run_stage

    def run_stage(worker, stage, resumed):
        seen.append((stage.name, resumed and resumed["step"], worker.model.lm_head.weight.detach().clone()))
        return running(worker, stage, resumed)

    monkeypatch.setattr(mllm, "_run_stage", run_stage)
    train_mllm(dataclasses.replace(own, resume=True))
    (stage, step, weights), (last, fresh, _) = seen
    assert (stage, step, last, fresh) == ("base", saved["step"], "pic", None)
    assert torch.equal(weights, saved["model"]["lm_head.weight"])


def test_a_run_from_before_there_were_generations_resumes_as_the_first(tmp_path):
    older = {"start": None, "init": "structured", "seed": 0, "tokens": 256}
    checkpoint.save(tmp_path, 0, older, {"stage": "base", "step": 1, "finished": []})
    checkpoint.check(tmp_path, {**older, "generation": 1}, 1, resume=True)
    with pytest.raises(ConfigError, match="generation"):
        checkpoint.check(tmp_path, {**older, "generation": 2}, 1, resume=True)
