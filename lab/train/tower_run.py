"""A stage of a tower's training: its steps, its log, and the checkpoint from which it resumes.

The samples of a step follow from the seed and the step's number alone, so an interrupted run ends like an uninterrupted
one.
"""

from __future__ import annotations

import json
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from mpic_lab.train.packet_data import TrainingDataError

LOG = "log.jsonl"
STEPS = {"words": 200, "sight": 800, "join": 200, "answers": 1000}
"""Stage -> number of steps."""
EVALUATE = {"words": 50, "sight": 100, "join": 100, "answers": 50}
"""Stage -> steps between two evaluations."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Options of ``mpic train tower``.

    Args:
        out: folder of checkpoints and log.
        language: folder of the language model.
        minutes: stop after so long, with a checkpoint; 0: run to the end.
        stages: the stages to run, in order.
        steps: number of steps of each; a resumed run may have more.
        save: minutes between two checkpoints.
        evaluate: steps between two evaluations of each.
        seed: of weights and samples.
        width, layers, heads: of the tower.
    """

    out: Path
    language: str
    minutes: float = 0.0
    stages: tuple[str, ...] = tuple(STEPS)
    steps: dict[str, int] = field(default_factory=lambda: dict(STEPS))
    save: float = 4.0
    evaluate: dict[str, int] = field(default_factory=lambda: dict(EVALUATE))
    seed: int = 0
    width: int = 256
    layers: int = 7
    heads: int = 4

    @property
    def tower(self) -> dict[str, int]:
        """Return the options by which the tower is made."""
        return {"seed": self.seed, "width": self.width, "layers": self.layers, "heads": self.heads}


class TowerRefused(TrainingDataError):
    """A stage cannot begin or go on in its folder."""

    code = "training_refused"


class Stage(ABC):
    """A stage: its parameters and its step.

    Args:
        groups: (parameters by name, learning rate).
    """

    def __init__(
        self, settings: Settings, name: str, groups: list[tuple[dict[str, nn.Parameter], float]]
    ) -> None:
        self.settings, self.name, self.step, self.seconds = settings, name, 0, 0.0
        self.parameters = {key: p for group, _ in groups for key, p in group.items()}
        self.optimizer = torch.optim.AdamW(
            [{"params": list(group.values()), "base": rate} for group, rate in groups],
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self.steps = settings.steps[name]
        self.file = settings.out / f"{name}.safetensors"

    @abstractmethod
    def loss(self, rng: random.Random) -> torch.Tensor:
        """Return the loss of a new batch, a scalar."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """Return the shares of held-out questions that are answered right, by kind."""

    def run(self, until: float, say: Say) -> bool:
        """Take steps until all are done, or until a time; return whether they are done."""
        self._resume()
        saved, losses = time.monotonic(), []
        while self.step < self.steps and time.monotonic() < until:
            began = time.monotonic()
            losses.append(self._learn())
            now = time.monotonic()
            self.seconds += now - began
            last = self.step == self.steps
            if self.step % self.settings.evaluate[self.name] == 0 or last:
                self._log(sum(losses) / len(losses), say)
                losses = []
            if now - saved > 60 * self.settings.save or last:
                self._save()
                saved = now
        if self.step < self.steps:
            self._save()
        return self.step >= self.steps

    def _learn(self) -> float:
        rng = random.Random(f"{self.settings.seed} {self.name} {self.step}")
        warm = min(1.0, (self.step + 1) / 50)
        left = min(1.0, (self.steps - self.step) / (0.3 * self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * warm * max(left, 0.03)
        self.optimizer.zero_grad()
        loss = self.loss(rng)
        loss.backward()
        nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def _log(self, loss: float, say: Say) -> None:
        line = {"stage": self.name, "step": self.step, "seconds": round(self.seconds), "loss": round(loss, 4)}
        line |= {name: round(value, 3) for name, value in self.scores().items()}
        with open(self.settings.out / LOG, "a") as file:
            file.write(json.dumps(line) + "\n")
        say(" ".join(f"{name} {value}" for name, value in line.items()))

    def _save(self) -> None:
        tensors = {name: p.detach().contiguous() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            for key, value in self.optimizer.state[p].items():
                tensors[f"adam.{key}.{name}"] = value.contiguous()
        facts = {"step": self.step, "seconds": self.seconds, **self._kind()}
        partial = self.file.with_suffix(".partial")
        save_file(tensors, partial, metadata={"facts": json.dumps(facts)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(self.file)

    def _kind(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one before."""
        return {"tower": self.settings.tower, "language": Path(self.settings.language).name}

    def _resume(self) -> None:
        if not self.file.exists():
            return
        facts, tensors = checkpoint(self.settings.out, self.name)
        if any(facts[name] != value for name, value in self._kind().items()):
            raise TowerRefused(
                f"{self.file} is of a run with another seed, tower or language model; give another --out"
            )
        self.step, self.seconds = facts["step"], facts["seconds"]
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(tensors[name])
        for name, p in self.parameters.items():
            if f"adam.step.{name}" in tensors:  # parameters without a gradient have no state
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[p] = {key: tensors[f"adam.{key}.{name}"] for key in keys}


def checkpoint(out: Path, stage: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the facts of a stage's checkpoint (step, seconds, tower, language), and its tensors.

    Raises:
        TowerRefused: there is none.
    """
    path = out / f"{stage}.safetensors"
    if not path.exists():
        raise TowerRefused(f"the stage {stage} in {out} has not begun")
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    return facts, load_file(path)


def weights_of(settings: Settings, stage: str) -> dict[str, torch.Tensor]:
    """Return the weights that a finished stage left.

    Raises:
        TowerRefused: it is not finished.
    """
    facts, tensors = checkpoint(settings.out, stage)
    if facts["step"] < settings.steps[stage]:
        raise TowerRefused(
            f"the stage {stage} in {settings.out} has {facts['step']} of {settings.steps[stage]} steps"
        )
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("adam.")}
