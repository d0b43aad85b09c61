"""`mpic train mllm`: vision alignment, then answers under causal attention, then the short PIC-aware phase.

The recipe in one place. Two checkpoints come out: `plain` after the second stage and `pic` after the third.
A run is resumable, spreads over worker processes on a CPU (they share its cores evenly and meet once a step, so a busy
machine slows it gracefully), and is bounded by minutes or by steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.train import checkpoint
from mpic_lab.train.batch import Encoder, answer_loss
from mpic_lab.train.curves import plot_stages
from mpic_lab.train.generations import GENERATIONS, Generation, Stage, generation_at
from mpic_lab.train.held import HeldWeights
from mpic_lab.train.loader import Draw, default_processes, drawn_beside
from mpic_lab.train.model import autocast, build_model, load_model, save_model
from mpic_lab.train.optim import Optimizers
from mpic_lab.train.watch import watch


@dataclass(frozen=True)
class Settings:
    """Options of `mpic train mllm`."""

    out: Path
    minutes: float = 90.0
    steps: int | None = None  # instead of minutes: steps of all stages together
    device: str = "auto"
    workers: int = 0  # 0: one a core on a CPU, at most four; one on a GPU
    tokens: int = 2048  # a step and worker
    init: str = "structured"
    tower: Path | None = None  # a finished model whose vision tower the run begins with
    start: Path | None = None  # a finished `plain` model to go on from, instead of `init`
    seed: int = 0
    generation: int = 1  # generation of the demo model (`mpic_lab.train.generations`)
    resume: bool = False
    evaluate_every: float = 300.0  # seconds
    watched: int = 16  # held-out questions a cell of the quick evaluation
    quiet: bool = False
    loaders: int | None = None  # processes that draw batches beside a worker; none: as the device needs


@dataclass
class TrainingProcess:
    """A process of the run."""

    settings: Settings
    rank: int
    world: int
    device: torch.device
    model: LlavaForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    encoder: Encoder
    log: list[dict[str, Any]]
    generation: Generation
    looked: float = field(default_factory=time.monotonic)  # when it last saw how the model does

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def train_mllm(settings: Settings) -> Path:
    """Trains both checkpoints into `settings.out` (`plain/`, `pic/`, `curves.json`, `curves.png`)."""
    settings.out.mkdir(parents=True, exist_ok=True)
    cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    world = settings.workers or (1 if cuda else max(1, min(4, os.cpu_count() or 1)))
    checkpoint.check(settings.out, _stored(settings), world, settings.resume)
    if world == 1:
        try:
            _run(0, 1, settings, "", cuda, os.getppid())
        finally:
            torch.set_flush_denormal(False)  # as the caller had it
    else:
        with tempfile.TemporaryDirectory() as folder:
            args = (world, settings, f"file://{folder}/rendezvous", cuda, os.getpid())
            torch.multiprocessing.spawn(_run, args, nprocs=world)
    return settings.out


def _run(rank: int, world: int, settings: Settings, rendezvous: str, cuda: bool, parent: int) -> None:
    torch.manual_seed(settings.seed)
    if world > 1:
        # Torch interrupts workers whose parent dies; those of a run in the background have inherited not to hear it.
        # The signal ends them at once: one that waits for another in C++ would not come to a handler in Python.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.getppid() != parent:  # it died before anybody could hear of it
            raise KeyboardInterrupt
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=rendezvous, rank=rank, world_size=world
        )
    torch.set_flush_denormal(True)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    tokenizer = build_tokenizer()
    generation = GENERATIONS[settings.generation]
    model = initial_model(settings, tokenizer)
    model.to(device)
    worker = TrainingProcess(
        settings, rank, world, device, model, tokenizer, generation.encoder(tokenizer), [], generation
    )
    state = _load_checkpoint(worker)
    for stage in generation.continued if settings.start else generation.stages:
        if state and stage.name in state["finished"]:
            continue
        resumed = state if state and state["stage"] == stage.name else None
        _run_stage(worker, stage, resumed)
        state = None
    if world > 1:
        dist.destroy_process_group()


def initial_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Returns the model that a run begins with.

    Raises:
        ValueError: `start` or `tower` is a model of another kind.
    """
    generation = GENERATIONS[settings.generation]
    for folder in filter(None, (settings.start, settings.tower)):
        if generation_at(folder) is not generation:
            raise ValueError(f"{folder} is not a model of generation {settings.generation}")
    model = build_model(tokenizer, design=generation.design).train()
    if settings.start is not None:
        finished, its_tokenizer = load_model(settings.start)
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{settings.start} was trained with another vocabulary")
        model.load_state_dict(finished.state_dict())
    elif settings.init == "structured":
        generation.init(model, tokenizer, settings.seed)
    if settings.tower is not None:
        model.model.vision_tower.load_state_dict(
            load_model(settings.tower)[0].model.vision_tower.state_dict()
        )
    return model


class Clock:
    """Progress of a stage in [0, 1], the same on every worker.

    Attributes:
        progress: the result of the last ``tick``.
    """

    def __init__(self, worker: TrainingProcess, stage: Stage, spent: float, step: int) -> None:
        self.worker, self.spent, self.step, self.progress = worker, spent, step, 0.0
        settings = worker.settings
        self.seconds = settings.minutes * 60 * stage.share
        self.steps = max(1, round(settings.steps * stage.share)) if settings.steps else None

    def tick(self, due: bool) -> tuple[float, bool]:
        """Returns how far the stage is, of its steps or of its time, and whether a checkpoint is due, as the main
        process sees both.

        Workers that each looked at their own clock would now and then part, and wait for each other for ever.
        """
        self.progress = self.step / self.steps if self.steps else self.spent / self.seconds
        if self.worker.world > 1:
            shared = torch.tensor([self.progress, due], dtype=torch.float64, device=self.worker.device)
            dist.broadcast(shared, 0)
            self.progress, due = float(shared[0]), bool(shared[1])
        return self.progress, due


def _batches(worker: TrainingProcess, stage: Stage, clock: Clock) -> Iterator[Any]:
    settings = worker.settings
    common_seed = settings.seed * 1_000_003 + clock.step * 101
    seed = common_seed + worker.rank
    begun = worker.generation.continued_from if settings.start else 0.0
    draw = Draw(settings.generation, stage, settings.tokens, begun, settings.tower is not None)
    processes = (
        default_processes(worker.device, worker.world) if settings.loaders is None else settings.loaders
    )
    if processes:
        return drawn_beside(draw, seed, common_seed, processes, lambda: clock.progress)
    return draw.batches(worker.encoder, seed, common_seed, lambda: clock.progress)


def _loss(worker: TrainingProcess, stage: Stage, drawn: Any) -> torch.Tensor:
    with autocast(worker.device):
        if stage.name == "vision":
            return worker.generation.vision.alignment_loss(
                worker.model, *(t.to(worker.device) for t in drawn)
            )
        return answer_loss(worker.model, drawn.to(worker.device))


def _run_stage(worker: TrainingProcess, stage: Stage, resumed: dict[str, Any] | None) -> None:
    settings = worker.settings
    vision = stage.name == "vision"
    optimizers = (
        Optimizers.of_vision(worker.model, stage.muon_lr, stage.adam_lr)
        if vision
        else Optimizers.of_language(worker.model, stage.muon_lr, stage.adam_lr)
    )
    if not vision and settings.init == "structured":
        optimizers.held = HeldWeights(worker.generation.held(worker.model))
    clock = Clock(worker, stage, 0.0, 0)
    if resumed:
        optimizers.load_state_dict(resumed["optimizers"])
        clock = Clock(worker, stage, resumed["spent"], resumed["step"])
    clock.tick(due=False)
    drawn = _batches(worker, stage, clock)
    drawn = chain([next(drawn)], drawn)  # until it comes, processes that draw start, and nothing is trained
    bar = tqdm(total=100, desc=stage.name, disable=settings.quiet or not worker.is_main, unit="%")
    interval = 20 if settings.steps is None else max(1, min(20, settings.steps // 20))
    warm, losses, tokens, answered = 30, [], 0, 0
    marked = saved = time.monotonic()
    while True:
        progress, due = clock.tick(time.monotonic() - saved > settings.evaluate_every)
        if progress >= 1:
            break
        if due:
            _evaluate(worker, stage, clock)
            _save_checkpoint(worker, stage, clock, optimizers)
            saved = marked = time.monotonic()
            losses, tokens, answered = [], 0, 0
        began = time.monotonic()
        batch = next(drawn)
        loss = _loss(worker, stage, batch)
        loss.backward()
        decay = max(0.02, (1 - progress) / stage.decay) if progress > 1 - stage.decay else 1.0
        optimizers.step(min(1.0, (clock.step + 1) / warm) * decay)
        clock.step += 1
        losses.append(loss.item())
        if not vision:
            tokens, answered = tokens + batch.tokens, answered + int(batch.target.sum())
        if worker.is_main and clock.step % interval == 0:
            passed = (time.monotonic() - marked) / worker.world
            entry = {
                "stage": stage.name,
                "step": clock.step,
                "seconds": round(clock.spent),
                "tokens_per_s": round(tokens / passed),
                "answer_tokens_per_s": round(answered / passed),
            }
            worker.log.append({**entry, "loss": round(sum(losses) / len(losses), 4)})
            bar.set_postfix(loss=worker.log[-1]["loss"], step=clock.step, tokens_per_s=entry["tokens_per_s"])
            bar.update(round(progress * 100) - bar.n)
            losses, tokens, answered, marked = [], 0, 0, time.monotonic()
        clock.spent += time.monotonic() - began
    _evaluate(worker, stage, clock, finished=True)
    if worker.is_main and not vision:  # first: a resumed run passes a finished stage over
        name = {"base": "plain"}.get(stage.name, stage.name)
        save_model(worker.model, worker.tokenizer, settings.out / name, worker.generation.world.labels)
    _save_checkpoint(worker, stage, clock, optimizers, finished=True)
    bar.close()


@torch.no_grad()
def _evaluate(worker: TrainingProcess, stage: Stage, clock: Clock, finished: bool = False) -> None:
    """Looks at a few held-out questions; the real evaluation is `mpic_lab.train.evaluate`."""
    if worker.is_main and (finished or time.monotonic() - worker.looked >= worker.generation.watch_every):
        worker.model.eval()
        scores: dict[str, float] = {}
        with autocast(worker.device):
            if stage.name == "vision":
                targets = worker.generation.vision.Targets(worker.generation.encoder(worker.tokenizer))
                drawn = worker.generation.vision.draw_batch(
                    targets, random.Random(1), 2 * worker.generation.images, "eval"
                )
                tensors = (t.to(worker.device) for t in drawn)
                scores["image tokens"] = worker.generation.vision.alignment_accuracy(worker.model, *tensors)
            else:
                scores |= watch(worker.model, worker.tokenizer, worker.generation, worker.settings.watched)
        entry = {"stage": stage.name, "step": clock.step, "seconds": round(clock.spent), "scores": scores}
        worker.log.append(entry)
        (worker.settings.out / "curves.json").write_text(json.dumps(worker.log))
        plot_stages(worker.log, worker.settings.out / "curves.png")
        if not worker.settings.quiet:
            tqdm.write(json.dumps(entry))
        worker.model.train()
        worker.looked = time.monotonic()
    if worker.world > 1:
        dist.barrier()


def _save_checkpoint(
    worker: TrainingProcess, stage: Stage, clock: Clock, optimizers: Optimizers, finished: bool = False
) -> None:
    names = [s.name for s in worker.generation.stages]
    state = {
        "stage": stage.name,
        "finished": names[: names.index(stage.name) + finished],
        "spent": clock.spent,
        "step": clock.step,
        "model": worker.model.state_dict(),
        "optimizers": optimizers.state_dict(),
        "log": json.dumps(worker.log),
    }
    checkpoint.save(worker.settings.out, worker.rank, _stored(worker.settings), state)


def _load_checkpoint(worker: TrainingProcess) -> dict[str, Any] | None:
    if not worker.settings.resume:
        return None
    state = checkpoint.load(worker.settings.out, worker.rank, worker.device)
    worker.model.load_state_dict(state["model"])
    worker.log.extend(json.loads(state["log"]))
    return state


def _stored(settings: Settings) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))
