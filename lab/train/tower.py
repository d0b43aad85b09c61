"""Training of a vision tower for a published language model, all of whose weights stay as they are.

Four stages, each with a checkpoint of its own, from which a run goes on by itself:

1. *words*: the language model answers questions about pictures whose patches are given as words. Their vectors are
   trained, so that it reads them well. No tower yet.
2. *sight*: the tower learns what each patch shows, and the words. No language model yet.
3. *join*: the projector turns the tower's states into the vectors of the first stage.
4. *answers*: tower and projector are trained through the language model.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from mpic.errors import IntegrityError
from mpic.model.identity import fingerprint
from mpic_lab.train.tower_model import Caption, Tower, vision_config
from mpic_lab.train.tower_run import Say, Settings, Stage, weights_of
from mpic_lab.train.tower_stages import Answers, Join, Reader, Sight, WordStage


class TowerTrainer:
    """A run of some stages in a folder."""

    def __init__(self, settings: Settings, say: Say = print) -> None:
        self.settings, self.say = settings, say
        settings.out.mkdir(parents=True, exist_ok=True)
        self.reader = None if settings.stages == ("sight",) else Reader(settings.language)

    def run(self) -> bool:
        """Run the stages that are left; return whether all are done.

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
            return WordStage(settings, reader)
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
