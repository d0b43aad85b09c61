"""Asks the questions of a calibration: an evaluation in which a policy ends as soon as it cannot meet the bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpic.config import EngineConfig
from mpic.engine.base import Engine
from mpic.errors import BadRequest
from mpic.link import parse_policy
from mpic.model.info import ModelInfo
from mpic.server.auto import Calibration, MeasuredPolicy, kv_dtype_of, unfit
from mpic_lab.calibrate.decide import LEAST_RIGHT, Paired, kind_of, measured, paired, right
from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.config import EvalConfig, TaskEntry
from mpic_lab.eval.run import Evaluator

TASKS = {
    "text": TaskEntry("prose-codes", chunks=(6,)),
    "image": TaskEntry("world-image", chunks=(4,), metric="contains"),
}
"""Questions about each kind of chunk."""


class Verdict(NamedTuple):
    """A policy's figures for a kind of chunk, and the verdict."""

    kind: str
    figures: MeasuredPolicy
    words: str


class Calibrator(Evaluator):
    """Measures a model.

    Args:
        config: the tasks, the model and the policies.
        out: folder of the answers; an unfinished run in it goes on.
        bound: maximum points of 100 that a policy may lose, at the upper end of its 95 % interval.

    Raises:
        BadRequest: ``auto`` may not choose one of the policies; and as ``Evaluator``.
    """

    def __init__(self, config: EvalConfig, out: Path, bound: float) -> None:
        for name in config.policies:
            if name != "full" and (why := unfit(parse_policy(name))):
                raise BadRequest(why, param="policies")
        if not 0 < bound <= 100:
            raise BadRequest(f"the bound is a number of points of 100, not {bound}", param="bound")
        super().__init__(config, out)
        self.bound = bound
        self.info: ModelInfo | None = None
        self._hopeless: set[tuple[str, str]] = set()

    def settings(self) -> EngineConfig:
        """Return the engine's configuration: that of a server, so that the calibration matches what is served."""
        return replace(super().settings(), dtype=self.config.dtype)

    def loaded(self, engine: Engine) -> None:
        self.info = engine.info
        if "image" not in engine.info.modalities:
            tasks = tuple(entry for entry in self.config.tasks if kind_of(entry.name) == "text")
            if not tasks:
                raise BadRequest(f"model {engine.info.name} sees no images, and all tasks are about images")
            self.config = replace(self.config, tasks=tasks)

    def policies_of(self, task: str) -> Sequence[str]:
        """Return ``full`` and the policies that may still meet the bound; none if no other is left, or the task is
        about both kinds at once."""
        if (kind := kind_of(task)) is None:
            return ()
        mine = self.answers_by_kind().get(kind, [])
        for policy in self.config.policies:
            found = paired(mine, policy)
            if found.n and policy != "full" and found.cannot_meet(self.bound, self.questions(kind)):
                self._hopeless.add((kind, policy))
        left = [p for p in self.config.policies if (kind, p) not in self._hopeless]
        return left if left != ["full"] else ()

    def questions(self, kind: str) -> int:
        """Return how many questions are asked about a kind of chunk."""
        cells = self.config.cells()
        return sum(options.questions for name, options in cells if kind_of(name) == kind)

    def answers_by_kind(self) -> dict[str, list[PolicyAnswer]]:
        """Return the answers so far, without those to prompts with both kinds."""
        found: dict[str, list[PolicyAnswer]] = defaultdict(list)
        tasks = {entry.name for entry in self.config.tasks}
        for answer in self.done.values():
            if answer.task in tasks and (kind := kind_of(answer.task)):
                found[kind].append(answer)
        return dict(found)

    def result(self) -> tuple[Calibration, list[Verdict], list[str]]:
        """Return the calibration, what it says of every policy and kind, and the kinds that could not be measured,
        with the reason."""
        assert self.info is not None, "asked before the model was loaded"
        kinds, verdicts, notes = {}, [], []
        for kind, answers in self.answers_by_kind().items():
            score = right(answers)
            if score is None:
                skipped = next(one.skipped for one in answers if one.skipped)
                notes.append(f"{kind}: no question was answered ({skipped})")
                continue
            tried = [measured(answers, policy) for policy in self.config.policies if policy != "full"]
            order = sorted(filter(None, tried), key=lambda one: -one.saved)
            if score < LEAST_RIGHT:
                notes.append(
                    f"{kind}: full answers {score:.0f} % of these questions, so they cannot show what reuse costs; ask "
                    "others, which the model can answer (a file of tasks)"
                )
            else:
                kinds[kind] = tuple(order)
            chosen = next((one for one in kinds.get(kind, ()) if one.high <= self.bound), None)
            for one in order:
                words = self._words(one, paired(answers, one.policy), chosen) if kind in kinds else ""
                verdicts.append(Verdict(kind, one, words))
        calibration = Calibration(
            model=self.info.digest,
            kv_dtype=kv_dtype_of(self.info),
            name=self.info.name,
            bound=self.bound,
            kinds=kinds,
        )
        return calibration, verdicts, notes

    def _words(self, figures: MeasuredPolicy, found: Paired, chosen: MeasuredPolicy | None) -> str:
        if figures == chosen:
            return "chosen"
        if figures.high <= self.bound:
            return "within the bound"
        needed = found.questions_for(self.bound)
        if figures.low > self.bound or needed is None:
            return "loses too much"
        return f"undecided: about {math.ceil(needed / 10) * 10:,} questions would tell"
