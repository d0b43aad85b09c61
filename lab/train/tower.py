"""Training of a vision tower for a published language model, all of whose weights stay as they are.

Four stages, each with a checkpoint of its own, from which a run goes on by itself:

1. *words*: the language model answers questions about pictures whose patches are given as words. Their vectors are
   trained, so that it reads them well. No tower yet.
2. *sight*: the tower learns what each patch shows, and the words. No language model yet.
3. *join*: the projector turns the tower's states into the vectors of the first stage.
4. *answers*: tower and projector are trained through the language model.

The samples of a step follow from the seed and the step's number alone, so an interrupted run ends as one that was not.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpic.errors import IntegrityError
from mpic.model.identity import fingerprint
from mpic_lab.generator.scenes import SPOKEN, WORDS, Picture, draw_picture, render
from mpic_lab.train.packet_data import TrainingDataError
from mpic_lab.train.tower_model import (
    Caption,
    Tower,
    numbers,
    sight_loss,
    sight_scores,
    to_pixels,
    vision_config,
)
from mpic_lab.train.tower_prompts import IMAGE, Batch, Writer, collate

LOG = "log.jsonl"
STEPS = {"words": 300, "sight": 800, "join": 200, "answers": 1000}
"""Stage -> number of steps."""
EVALUATE = {"words": 50, "sight": 100, "join": 100, "answers": 50}
"""Stage -> steps between two evaluations."""
_HELD_OUT = 10_000_000
"""Seeds from here on are of pictures that nothing is trained on."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Options of ``mpic train tower``.

    Args:
        out: folder of checkpoints and log.
        language: folder of the language model.
        minutes: stop after so long, with a checkpoint; 0: run to the end.
        stages: those to run, in order.
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

    def recorded(self) -> dict[str, int]:
        """Return the options that a resumed run must share with the one before."""
        return {"seed": self.seed, "width": self.width, "layers": self.layers, "heads": self.heads}


class TowerRefused(TrainingDataError):
    """A stage cannot begin or go on in its folder."""

    code = "training_refused"


class Reader:
    """The language model, which answers and never changes."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").requires_grad_(False).eval()
        self.writer = Writer(AutoTokenizer.from_pretrained(folder))
        self.embeddings = self.model.get_input_embeddings().weight
        self.before = fingerprint(self.model)

    def table(self) -> torch.Tensor:
        """Return the embeddings of `WORDS`, `[words, width]`."""
        ids = [self.writer.ids(word if word == "\n" else f" {word}")[0] for word in WORDS]
        return self.embeddings[torch.tensor(ids)].float()

    def logits(self, batch: Batch, images: torch.Tensor) -> torch.Tensor:
        """Return logits before each token of the answers, `[n, vocabulary]`.

        Args:
            images: the image tokens of all pictures, `[pictures, 196, width]`.
        """
        embedded = F.embedding(batch.ids.clamp(min=0), self.embeddings)
        image = (batch.ids == IMAGE)[..., None]
        embedded = embedded.masked_scatter(image, images.to(embedded.dtype))
        states = self.model.model(
            inputs_embeds=embedded,
            attention_mask=batch.mask.to(embedded.dtype),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        return self.model.lm_head(states[batch.where[:, 0], batch.where[:, 1]]).float()

    def loss(self, batch: Batch, images: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over tokens of answers, by their weights."""
        losses = F.cross_entropy(self.logits(batch, images), batch.answers, reduction="none")
        return (losses * batch.weights).sum() / batch.weights.sum()

    @torch.no_grad()
    def scores(self, batches: Iterator[Batch], images: Callable[[Batch], torch.Tensor]) -> dict[str, float]:
        """Return the share of questions by kind whose deciding word is right, and of all of them (`key`)."""
        hits = defaultdict(list)
        for batch in batches:
            right = self.logits(batch, images(batch)).argmax(-1) == batch.answers
            for kind, key in batch.asked:
                if kind != "describe":
                    hits[kind].append(bool(right[key.start : key.stop].all()))
        found = {kind: sum(hit) / len(hit) for kind, hit in sorted(hits.items())}
        return {"key": sum(map(sum, hits.values())) / sum(map(len, hits.values())), **found}


class Stage:
    """A stage: its parameters, and what a step does.

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

    def loss(self, rng: random.Random) -> torch.Tensor:
        """Return the loss of a new batch."""
        raise NotImplementedError

    def scores(self) -> dict[str, float]:
        """Return what is held out, measured."""
        raise NotImplementedError

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
        torch.manual_seed(rng.getrandbits(32))
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
        facts = {"step": self.step, "seconds": self.seconds, "tower": self.settings.recorded()}
        partial = self.file.with_suffix(".partial")
        save_file(tensors, partial, metadata={"facts": json.dumps(facts)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(self.file)

    def _resume(self) -> None:
        if not self.file.exists():
            return
        facts, tensors = checkpoint(self.settings.out, self.name)
        if facts["tower"] != self.settings.recorded():
            raise TowerRefused(
                f"{self.file} is of a run with another seed or another tower; give another --out"
            )
        self.step, self.seconds = facts["step"], facts["seconds"]
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(tensors[name])
        for name, p in self.parameters.items():
            if f"adam.step.{name}" in tensors:  # what the loss does not depend on has no state
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[p] = {key: tensors[f"adam.{key}.{name}"] for key in keys}


def checkpoint(out: Path, stage: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the facts of a stage's checkpoint (step, seconds, tower), and its tensors.

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


def draw_batch(writer: Writer, rng: random.Random, count: int) -> Batch:
    """Return two samples of one picture or one of more: about a thousand tokens."""
    questions = {1: 12, 2: 8}.get(count, 6)
    return collate([writer.sample(rng, count, questions) for _ in range(max(1, 2 // count))])


def held_out(writer: Writer, count: int, batches: int) -> Iterator[Batch]:
    """Return the same batches every time; nothing is trained on them."""
    for i in range(batches):
        yield draw_batch(writer, random.Random(_HELD_OUT + 100 * count + i), count)


def pictures_of(
    rng: random.Random, count: int, most: int | None = None
) -> tuple[list[Picture], torch.Tensor]:
    """Return drawn pictures and their pixels `[count, 3, 224, 224]`."""
    pictures = [draw_picture(rng, most or rng.choice((4, 9))) for _ in range(count)]
    return pictures, pixels_of(pictures, rng)


def pixels_of(pictures: list[Picture], rng: random.Random) -> torch.Tensor:
    """Return the pixels of pictures, `[n, 3, 224, 224]`."""
    return to_pixels([render(picture, rng) for picture in pictures])


def how_many(rng: random.Random, progress: float) -> int:
    """Return the number of pictures of a step: one at first, then up to four."""
    return 1 if progress < 0.3 else rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]


def under(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by name, below a name."""
    return {f"{name}.{key}": p for key, p in module.named_parameters()}


class Words(Stage):
    """Stage 1: vectors of words that the language model reads."""

    def __init__(self, settings: Settings, reader: Reader) -> None:
        self.reader, self.caption = reader, Caption(reader.table())
        mix = {"mix.weight", "mix.bias"}
        named = dict(self.caption.named_parameters())
        super().__init__(
            settings,
            "words",
            [
                ({name: p for name, p in named.items() if name not in mix}, 4e-3),
                ({name: named[name] for name in sorted(mix)}, 2e-3),
            ],
        )

    def loss(self, rng: random.Random) -> torch.Tensor:
        batch = draw_batch(self.reader.writer, rng, how_many(rng, self.step / self.steps))
        return self.reader.loss(batch, self.caption(numbers(batch.pictures)))

    def scores(self) -> dict[str, float]:
        return scores_by_count(self.reader, lambda batch: self.caption(numbers(batch.pictures)))


def scores_by_count(
    reader: Reader, images: Callable[[Batch], torch.Tensor], batches: int = 4
) -> dict[str, float]:
    """Return scores by kind about one picture, and over all kinds about two and four."""
    found = reader.scores(held_out(reader.writer, 1, batches), images)
    for count in (2, 4):
        found[f"key_{count}"] = reader.scores(held_out(reader.writer, count, batches), images)["key"]
    return found


class Sight(Stage):
    """Stage 2: what patches show."""

    def __init__(self, settings: Settings, tower: Tower, pictures: int = 32) -> None:
        self.tower, self.pictures = tower, pictures
        learnt = {**under("vision", tower.vision), **under("covering", tower.covering)}
        super().__init__(settings, "sight", [(learnt | under("saying", tower.saying), 8e-4)])

    def loss(self, rng: random.Random) -> torch.Tensor:
        pictures, pixels = pictures_of(rng, self.pictures)
        with torch.autocast("cpu", torch.bfloat16):
            return sight_loss(self.tower, pixels, pictures)[0]

    def scores(self) -> dict[str, float]:
        pictures, pixels = pictures_of(random.Random(_HELD_OUT), 64, 4)
        with torch.autocast("cpu", torch.bfloat16):
            return sight_scores(self.tower, pixels, pictures)


class Join(Stage):
    """Stage 3: the tower says the vectors of the first stage."""

    def __init__(
        self, settings: Settings, tower: Tower, caption: Caption, reader: Reader, pictures: int = 24
    ) -> None:
        self.tower, self.caption, self.reader, self.pictures = tower, caption, reader, pictures
        rest = {**under("vision", tower.vision), **under("covering", tower.covering)}
        super().__init__(
            settings,
            "join",
            [(rest | under("saying", tower.saying), 4e-4), (under("projector", tower.projector), 1e-3)],
        )
        with torch.no_grad():
            target = self._targets(pictures_of(random.Random(_HELD_OUT), 64, 4)[0])
            self.variance = target.var()
            tower.projector.linear_2.weight.mul_(self.variance.sqrt())
            tower.projector.linear_2.bias.copy_(target.mean((0, 1)))

    @torch.no_grad()
    def _targets(self, pictures: list[Picture]) -> torch.Tensor:
        return self.caption(numbers(pictures))

    def loss(self, rng: random.Random) -> torch.Tensor:
        pictures, pixels = pictures_of(rng, self.pictures)
        target = self._targets(pictures)
        with torch.autocast("cpu", torch.bfloat16):
            sight, last = sight_loss(self.tower, pixels, pictures)
            made = self.tower.projector(last).float()
        error = (made - target).square().mean(-1) / self.variance
        spoken = torch.full(error.shape[1:], 0.2)
        spoken[list(SPOKEN)] = 1.0
        return sight + 3 * (error * spoken).mean()

    def scores(self) -> dict[str, float]:
        return tower_scores(self.reader, self.tower, 2)


class Answers(Stage):
    """Stage 4: tower and projector through the language model."""

    def __init__(self, settings: Settings, tower: Tower, reader: Reader, pictures: int = 8) -> None:
        self.tower, self.reader, self.pictures = tower, reader, pictures
        rest = {**under("vision", tower.vision), **under("covering", tower.covering)}
        super().__init__(
            settings,
            "answers",
            [(rest | under("saying", tower.saying), 2e-4), (under("projector", tower.projector), 4e-4)],
        )

    def loss(self, rng: random.Random) -> torch.Tensor:
        batch = draw_batch(self.reader.writer, rng, how_many(rng, self.step / self.steps))
        more, more_pixels = pictures_of(rng, self.pictures)
        pixels = torch.cat([pixels_of(batch.pictures, rng), more_pixels])
        with torch.autocast("cpu", torch.bfloat16):
            sight, last = sight_loss(self.tower, pixels, batch.pictures + more)
            images = self.tower.projector(last[: len(batch.pictures)])
        return self.reader.loss(batch, images) + 0.3 * sight

    def scores(self) -> dict[str, float]:
        return tower_scores(self.reader, self.tower, 4)


def tower_scores(reader: Reader, tower: Tower, batches: int) -> dict[str, float]:
    """Return scores by kind through the language model, and those of sight as `see_KIND`."""

    def images(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tower(pixels_of(batch.pictures, random.Random(0)))

    found = scores_by_count(reader, images, batches)
    pictures, pixels = pictures_of(random.Random(_HELD_OUT), 32, 4)
    with torch.autocast("cpu", torch.bfloat16):
        seen = sight_scores(tower, pixels, pictures)
    return found | {f"see_{name}": value for name, value in seen.items()}


class TowerTrainer:
    """A run of some stages in a folder."""

    def __init__(self, settings: Settings, say: Say = print) -> None:
        self.settings, self.say = settings, say
        settings.out.mkdir(parents=True, exist_ok=True)
        self.reader = None if settings.stages == ("sight",) else Reader(settings.language)

    def run(self) -> bool:
        """Stage the stages that are left; return whether all are done.

        Raises:
            TowerRefused: a stage needs one that is not finished, or its folder holds another run.
            IntegrityError: the language model's weights have changed.
        """
        minutes = self.settings.minutes
        until = time.monotonic() + 60 * minutes if minutes else float("inf")
        done = True
        for name in self.settings.stages:
            stage = self._stage(name)
            done = stage.run(until, self.say)
            self.say(f"{name}: step {stage.step} of {stage.steps}")
            if not done:
                break
        if self.reader and fingerprint(self.reader.model) != self.reader.before:
            raise IntegrityError("training a tower has changed the language model's weights")
        return done

    def _stage(self, name: str) -> Stage:
        settings, reader = self.settings, self.reader
        if name == "words":
            return Words(settings, reader)
        tower = self._tower()
        if name == "sight":
            return Sight(settings, tower)
        if name == "join":
            tower.load_state_dict(weights_of(settings, "sight"), strict=False)
            caption = Caption(reader.table())
            caption.load_state_dict(weights_of(settings, "words"))
            return Join(settings, tower, caption, reader)
        tower.load_state_dict(weights_of(settings, "join"))
        return Answers(settings, tower, reader)

    def _tower(self) -> Tower:
        torch.manual_seed(self.settings.seed)
        settings = self.settings
        to = json.loads((Path(settings.language) / "config.json").read_text())["hidden_size"]
        return Tower(vision_config(settings.width, settings.layers, settings.heads), to)
