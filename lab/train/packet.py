"""Training of a model's adapter by distillation from the model itself (KV Packet, section 3.2).

The model is frozen. For every prompt it answers greedily under full attention; the adapter is trained so that the same
answer gets the same probabilities when the chunks are packets. The loss is the mean over the tokens of an answer, as
the paper writes it (its code sums), and the mean over the prompts of a batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mpic.errors import IntegrityError
from mpic.model.identity import fingerprint, weights_digest
from mpic.model.loaded import LoadedModel
from mpic.packet.adapter import Adapter
from mpic.prompt import ChatTemplate
from mpic_lab.figure import save_png
from mpic_lab.train.packet_data import TASKS, TrainingDataError, prompts
from mpic_lab.train.packet_lesson import Classroom, Lesson

ADAPTER, CHECKPOINT, RECORD, CURVE = "adapter.safetensors", "checkpoint.pt", "training.json", "curve.png"
FEWEST = 16
"""Prompts that must fit the model's context, half of them to train on."""
Say = Callable[[str], None]


class TrainingRefused(TrainingDataError):
    """A run cannot begin or continue in its folder."""

    code = "training_refused"


@dataclass(frozen=True)
class Settings:
    """Options of ``mpic train packet``. Its defaults suit models as small as the bundled ones; not all of them are the
    paper's.

    Args:
        out: folder for adapter, curve and checkpoint.
        data: JSONL of prompts; None draws them from the demo models' world.
        samples: number of prompts to train on; an eighth of that number is held out in addition to choose the best
            checkpoint. If some do not fit the model's context, the rest is divided in the same way.
        epochs: number of times that every prompt is seen.
        batch: prompts per step.
        tokens: number of tokens of the header, and of the trailer.
        lr: first learning rate, in standard deviations of the embedding table; it falls to 0 linearly.
        objective: kl (to the model's own distribution) or ce (cross entropy of its greedy answer).
        answer: maximum number of tokens of an answer.
        minutes: time limit that shortens the run and its learning rate schedule; 0: no limit. The time in which the
            model answers the prompts does not count.
        seed: seed for the adapter, the prompts and their order.
        tasks: tasks of the demo models' world that prompts are drawn from, without ``data``.
    """

    out: Path
    data: Path | None = None
    samples: int = 256
    epochs: int = 10
    batch: int = 16
    tokens: int = 8
    lr: float = 0.015
    objective: Literal["kl", "ce"] = "kl"
    answer: int = 48
    minutes: float = 0.0
    seed: int = 0
    tasks: tuple[str, ...] = TASKS

    def recorded(self) -> dict[str, Any]:
        """Return the options that a resumed run must share with the original one."""
        fields = asdict(self) | {"data": str(self.data), "tasks": list(self.tasks)}
        return {k: v for k, v in fields.items() if k not in ("out", "minutes")}


def initial(model: nn.Module, tokens: int, seed: int) -> Adapter:
    """Return an untrained adapter: drawn from a normal with the mean and deviation of the embedding table."""
    table = model.get_input_embeddings().weight.detach().float().cpu()
    generator = torch.Generator().manual_seed(seed)
    soft = torch.randn(2 * tokens, table.shape[1], generator=generator) * table.std() + table.mean()
    return Adapter(soft[:tokens].clone(), soft[tokens:].clone(), weights_digest(model))


def loss_of(lesson: Lesson, student: torch.Tensor, objective: str) -> torch.Tensor:
    """Return the mean over the answer's tokens of KL(teacher || student), or of the cross entropy.

    Args:
        student: log-probabilities ``[g, vocabulary]``.
    """
    if objective == "ce":
        return torch.nn.functional.nll_loss(student, lesson.answer.to(student.device))
    teacher = lesson.teacher.to(student.device)
    return torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean()


class PacketTrainer:
    """A training run.

    Raises:
        TrainingRefused: the folder holds another run.
        TrainingDataError: there are too few prompts.
    """

    def __init__(self, model: LoadedModel, settings: Settings, resume: bool, say: Say = print) -> None:
        self.model, self.settings, self.say = model, settings, say
        self.before = fingerprint(model.model)
        start = initial(model.model, settings.tokens, settings.seed)
        self.weights = start.model
        self.header = start.header.clone().requires_grad_()
        self.trailer = start.trailer.clone().requires_grad_()
        deviation = float(model.model.get_input_embeddings().weight.detach().float().std())
        self.rate = settings.lr * deviation
        self.optimizer = torch.optim.AdamW([self.header, self.trailer], lr=self.rate, weight_decay=0.0)
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self.best: tuple[float, torch.Tensor, torch.Tensor] | None = None
        self._begin(resume)

    # ---- the folder of a run

    def _begin(self, resume: bool) -> None:
        out = self.settings.out
        if resume:
            if not (out / CHECKPOINT).exists():
                raise TrainingRefused(f"nothing to resume in {out}: there is no {CHECKPOINT}")
            self._restore(torch.load(out / CHECKPOINT, weights_only=True))
            return
        for name in (CHECKPOINT, ADAPTER):
            if (out / name).exists():
                raise TrainingRefused(
                    f"{out} holds the {name} of an earlier run; --resume continues an unfinished one, another --out "
                    "starts anew"
                )
        out.mkdir(parents=True, exist_ok=True)

    def _restore(self, state: dict[str, Any]) -> None:
        mine = self.settings.recorded() | {"model": self.weights}
        differs = [k for k, v in mine.items() if state["settings"].get(k) != v]
        if differs:
            raise TrainingRefused(f"the run in {self.settings.out} had other settings: {', '.join(differs)}")
        with torch.no_grad():
            self.header.copy_(state["header"])
            self.trailer.copy_(state["trailer"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve, self.best = state["curve"], tuple(state["best"])

    def _save(self) -> None:
        state = {
            "settings": self.settings.recorded() | {"model": self.weights},
            "header": self.header.detach(),
            "trailer": self.trailer.detach(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "best": list(self.best),
        }
        partial = self.settings.out / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.replace(self.settings.out / CHECKPOINT)

    # ---- the run

    def run(self) -> Adapter:
        """Train, and write the adapter of the best epoch with its curve.

        Raises:
            IntegrityError: the model's weights have changed.
            TrainingDataError: there are too few prompts, or too few of them fit the model's context.
        """
        options = self.settings
        template = ChatTemplate(self.model.processor)
        wanted = options.samples + max(FEWEST // 2, options.samples // 8)
        found = prompts(
            options.data, template, wanted, options.seed, self.model.context_length, options.tasks
        )
        room = Classroom(self.model)
        lessons = self._lessons(room, found)
        began = time.monotonic() - self.seconds  # answers are no training, and a resumed run repeats them
        held = max(FEWEST // 2, len(lessons) // 9)  # an eighth of the others
        train, valid = lessons[held:], lessons[:held]
        steps = -(-len(train) // options.batch)
        self.say(f"{len(train)} prompts to train on, {len(valid)} held out, {steps} steps an epoch")
        if self.best is None:
            self._validate(room, valid, 0, None, began)
        for epoch in range(self.step // steps, options.epochs):
            order = torch.randperm(
                len(train), generator=torch.Generator().manual_seed(options.seed + epoch)
            ).tolist()
            losses = []
            for at in range(0, len(order), options.batch):
                self.seconds = time.monotonic() - began
                left = 1 - self._progress(steps * options.epochs)
                if left <= 0:
                    break
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate * left
                losses.append(self._learn(room, [train[i] for i in order[at : at + options.batch]]))
            if losses:
                self._validate(room, valid, epoch + 1, sum(losses) / len(losses), began)
            if self._progress(steps * options.epochs) >= 1:
                break
        return self._finish()

    def _progress(self, steps: int) -> float:
        """Return the share of the run that is done, by steps or, where that is more, by minutes."""
        minutes = self.settings.minutes
        return max(self.step / steps, self.seconds / 60 / minutes if minutes else 0.0)

    def _lessons(self, room: Classroom, found: Sequence[Any]) -> list[Lesson]:
        """Let the model answer all prompts; leave out those that do not fit its context with their packets."""
        lessons, extra = [], 2 * self.settings.tokens
        for number, prompt in enumerate(found):
            lesson = room.lesson(prompt, self.settings.answer)
            length = sum(len(inputs) + extra * chunk for inputs, chunk in lesson.parts) + len(lesson.answer)
            if length <= self.model.context_length:
                lessons.append(lesson)
            if (number + 1) % 64 == 0:
                self.say(f"answered {number + 1} of {len(found)} prompts under full attention")
        if len(lessons) < len(found):
            self.say(f"{len(found) - len(lessons)} prompts do not fit the model's context and are left out")
        if len(lessons) < FEWEST:
            raise TrainingDataError(
                f"only {len(lessons)} prompts fit the model's context; {FEWEST} are needed"
            )
        return lessons

    def _learn(self, room: Classroom, lessons: Sequence[Lesson]) -> float:
        """Take one step, and return its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for lesson in lessons:
            student = room.student(lesson, self.header, self.trailer)
            loss = loss_of(lesson, student, self.settings.objective) / len(lessons)
            if loss.requires_grad:  # an adapter without tokens has no parameters
                loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.step += 1
        return total

    @torch.no_grad()
    def _validate(
        self, room: Classroom, lessons: Sequence[Lesson], epoch: int, loss: float | None, began: float
    ) -> None:
        """Measure the held-out prompts, keep the adapter if it is the best, and save the run."""
        total = exact = 0.0
        for lesson in lessons:
            student = room.student(lesson, self.header, self.trailer)
            total += float(loss_of(lesson, student, self.settings.objective))
            exact += float((student.argmax(-1).cpu() == lesson.answer).all())
        valid, agrees = total / len(lessons), exact / len(lessons)
        self.seconds = time.monotonic() - began
        point = {
            "epoch": epoch,
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "valid": valid,
            "agrees": agrees,
        }
        self.curve.append(point if loss is None else point | {"train": loss})
        if self.best is None or valid < self.best[0]:
            self.best = (valid, self.header.detach().clone(), self.trailer.detach().clone())
        self._save()
        shown = "" if loss is None else f" train {loss:.4f}"
        self.say(f"epoch {epoch}:{shown} held out {valid:.4f}, same answer {100 * agrees:.0f} %")

    def _finish(self) -> Adapter:
        if fingerprint(self.model.model) != self.before:
            raise IntegrityError("training an adapter has changed the model's weights")
        out, (valid, header, trailer) = self.settings.out, self.best
        options = self.settings.recorded()
        options["data"] = self.settings.data.name if self.settings.data else "generated"
        notes = {"settings": options, "valid": valid, "steps": self.step, "seconds": round(self.seconds)}
        adapter = Adapter(header, trailer, self.weights, notes)
        adapter.save(out / ADAPTER)
        record = {"digest": adapter.digest, "model": self.weights, **notes, "curve": self.curve}
        (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        save_png(out / CURVE, self._draw, (6, 4))
        (out / CHECKPOINT).unlink(missing_ok=True)
        return adapter

    def _draw(self, figure: Any) -> None:
        axes = figure.subplots()
        for name in ("train", "valid"):
            points = [(one["step"], one[name]) for one in self.curve if name in one]
            axes.plot(*zip(*points, strict=True), marker=".", label={"valid": "held out"}.get(name, name))
        axes.set(xlabel="steps", ylabel=f"{self.settings.objective} of an answer's token", yscale="log")
        axes.legend()
