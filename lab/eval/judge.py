"""Grades by a judge: any OpenAI-compatible endpoint with a rubric. Off unless the configuration has a ``[judge]``."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from mpic.config import ConfigError
from mpic.errors import BadRequest, Unavailable
from mpic_lab.eval.answers import PolicyAnswer, end_at_a_whole_line, read_entries
from mpic_lab.eval.config import EvalConfig, Judge
from mpic_lab.eval.tasks import Sample, find

NAME = "grades.jsonl"
_TRIES = 3
_OBJECT = re.compile(r"\{[^{}]*\}")
_FORM = "Question:\n{question}\n\nReference answer:\n{reference}\n\nAnswer:\n{answer}"
OVERALL = "Overall Score"
"""The grade of an answer as a whole. Grades of dimensions are shown beside it and not averaged, unless the rubric's own
score is their mean."""


class JudgeFailed(Unavailable):
    """The judge could not be reached, or did not reply with grades."""

    code = "judge_failed"


class Grader:
    """Asks one endpoint for grades. The key, if it needs one, is read from the environment variable that the
    configuration names.

    Attributes:
        digest: identifies the judge: digest of the model, the rubric and how images are shown.

    Args:
        transport: a transport of httpx, for tests.
    """

    def __init__(
        self, judge: Judge, folder: Path = Path(), transport: httpx.BaseTransport | None = None
    ) -> None:
        rubric = read_rubric(judge.rubric, folder)
        self.dimensions = tuple(rubric["dimensions"])
        self._mean = rubric.get("overall") == "mean"
        self._sees = rubric.get("sees", "") if judge.images is None else "images" if judge.images else ""
        self._last = rubric.get("question") == "last"
        self._form = rubric.get("form", _FORM).strip()
        self._system = rubric["instruction"].strip()
        if isinstance(rubric["dimensions"], dict):
            lines = (f"- {name}: {meaning}" for name, meaning in rubric["dimensions"].items())
            self._system += "\n\n" + "\n".join(lines)
        key = os.environ.get(judge.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = judge.model
        decisive = [
            judge.model,
            self._system,
            self._form,
            self._sees,
            self._last,
            self._mean,
            *self.dimensions,
        ]
        self.digest = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]
        self._client = httpx.Client(
            base_url=judge.base_url.rstrip("/"), headers=headers, timeout=120, transport=transport
        )

    def grade(self, sample: Sample, answer: str) -> dict[str, float]:
        """Return a grade of 1 to 10 by dimension, ``OVERALL`` among them. Raise JudgeFailed."""
        messages = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": self._shown(sample, answer)},
        ]
        reason = ""
        for _ in range(_TRIES):
            try:
                reply = self._client.post(
                    "/chat/completions", json={"model": self._model, "messages": messages, "temperature": 0}
                )
                reply.raise_for_status()
                return self._grades(reply.json()["choices"][0]["message"]["content"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError, SyntaxError) as error:
                reason = f"{type(error).__name__}: {error}"
        raise JudgeFailed(f"the judge gave no grades in {_TRIES} tries; the last failed with {reason}")

    def _shown(self, sample: Sample, answer: str) -> str | list[dict[str, Any]]:
        """Return what the judge sees of an answer: question, reference and answer in the rubric's form, with the
        images of the dialogue or what they show, where the rubric has it so."""
        messages = sample.messages[-1:] if self._last else sample.messages
        question = "\n".join(_text(message) for message in messages)
        text = self._form.format(question=question, reference=sample.expected[0], answer=answer)
        if self._sees == "captions" and sample.captions:
            text = "Images:\n" + "\n".join(sample.captions) + f"\n\n{text}"
        images = [part["image"] for message in sample.messages for part in _images(message)]
        if self._sees != "images" or not images:
            return text
        return [
            {"type": "text", "text": text},
            *({"type": "image_url", "image_url": {"url": url}} for url in images),
        ]

    def _grades(self, text: str) -> dict[str, float]:
        """Return the grades in the last dictionary of a reply, which is JSON or, as MMDU's prompt asks for, Python."""
        matches = _OBJECT.findall(text)
        found = _dictionary(matches[-1]) if matches else {}
        grades = {name: float(found[name]) for name in self.dimensions}
        if not all(1 <= grade <= 10 for grade in grades.values()):
            raise ValueError(f"grades outside of 1..10: {grades}")
        if self._mean:
            grades[OVERALL] = sum(grades.values()) / len(grades)
        return grades

    def close(self) -> None:
        self._client.close()


def read_rubric(name: str | None, folder: Path = Path()) -> dict[str, Any]:
    """Return a rubric: the name of one of ours (``rubrics``), or a file from ``folder``; None: ``mpic``.

    Raises:
        ConfigError: there is no rubric of that name, or a part of it is missing.
    """
    ours = Path(str(files("mpic_lab.eval") / "rubrics"))
    source = ours / f"{name or 'mpic'}.toml"
    if not source.is_file():
        source = folder / str(name)
    try:
        rubric = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        known = ", ".join(sorted(path.stem for path in ours.glob("*.toml")))
        raise ConfigError(f"[judge] rubric is a file, or one of {known}: {error}", param="rubric") from None
    if not rubric.get("dimensions") or not isinstance(rubric.get("instruction"), str):
        raise ConfigError(f"{source} needs an instruction and dimensions", param="rubric")
    return rubric


def _dictionary(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = ast.literal_eval(text)
    return found if isinstance(found, dict) else {}


def _images(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return f"{message['role']}: {content}"
    shown = [part["text"] if "text" in part else f"[{part['type']}]" for part in content]
    return f"{message['role']}: {' '.join(shown)}"


def refuse_other_judge(out: Path, grader: Grader) -> None:
    """Refuse a run that another judge has graded: one judge's grades cannot be compared with another's.

    Raises:
        BadRequest: it has such grades.
    """
    path = out / NAME
    if any(entry.get("judge", grader.digest) != grader.digest for entry in read_entries(path)):
        raise BadRequest(
            f"{path} holds grades by another model or rubric, or with other images; move it away to have all answers "
            "graded anew"
        )


def judge_run(
    config: EvalConfig,
    out: Path,
    answers: list[PolicyAnswer],
    grader: Grader,
    progress: Progress | None = None,
) -> dict[tuple[str, int, str, str], dict[str, float]]:
    """Grade the answers that have not been graded yet. Grades are kept in ``grades.jsonl``, one line per answer with
    the judge's digest, which files of earlier versions lack.

    Raises:
        BadRequest: grades of another judge are in the run (``refuse_other_judge``).
        JudgeFailed: the judge gave no grades.
    """
    refuse_other_judge(out, grader)
    path = out / NAME
    grades = read_grades(out)
    end_at_a_whole_line(path)
    samples = {
        (name, options.chunks or sample.chunks, sample.id): sample
        for name, options in config.cells()
        for sample in find(name).load(replace(options, split="none"))
    }
    todo = [a for a in answers if a.skipped is None and a.key not in grades and a.key[:3] in samples]
    bar = progress.add_task("judge", total=len(todo)) if progress else None
    with path.open("a", encoding="utf-8") as lines:
        for answer in todo:
            grades[answer.key] = grader.grade(samples[answer.key[:3]], answer.answer)
            entry = {"key": answer.key, "judge": grader.digest, "grades": grades[answer.key]}
            lines.write(json.dumps(entry) + "\n")
            lines.flush()
            if progress is not None:
                progress.advance(bar)
    return grades


def read_grades(out: Path) -> dict[tuple[str, int, str, str], dict[str, float]]:
    """Return grades of a run by answer; a line cut off by an interruption is left out.

    Raises:
        BadRequest: the file holds something else.
    """
    return {tuple(entry["key"]): entry["grades"] for entry in read_entries(out / NAME)}
