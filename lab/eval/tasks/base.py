"""Tasks of an evaluation: OpenAI-shaped samples with their reference answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mpic.errors import BadRequest


class TaskError(BadRequest):
    """A task that does not exist, or data that is not in its format."""

    code = "task_error"


@dataclass(frozen=True)
class Sample:
    """A question.

    Args:
        id: identifier that is stable across runs with the same options.
        messages: messages for ``/v1/chat/completions``; images are data URLs, documents ``document`` parts.
        expected: reference answers.
        max_tokens: maximum number of tokens of the answer.
        first_line: True if only the first line of the answer is scored, as the benchmark does.
        chunks: number of images, by which answers are grouped, for tasks whose samples differ in it.
        captions: what each image shows, for a judge who sees none.
    """

    id: str
    messages: list[dict[str, Any]]
    expected: tuple[str, ...]
    max_tokens: int = 32
    first_line: bool = False
    chunks: int = 0
    captions: tuple[str, ...] = ()

    def scored(self, answer: str) -> str:
        """Return the part of an answer that is scored."""
        return answer.lstrip("\n").split("\n")[0] if self.first_line else answer


@dataclass(frozen=True)
class Options:
    """A configuration's options of a task.

    Args:
        metric: metric that answers are scored by; None: the task's own.
        path: the data file or folder, for tasks that read one.
        chunks: number of images and documents in a sample, for tasks that can choose.
        questions: maximum number of samples.
        seed: seed of generated samples.
        split: mode in which long documents are cut into chunks: ``none``, ``passage``, or KVSplit's ``fixed``,
            ``sentence``, ``paragraph``, ``section``.
        tokens: number of tokens of a piece, for KVSplit.
        images: folder of the images, where the format names files only.
        splitter: KVSplit with the model's tokenizer, ``(text, mode, tokens) -> pieces``.
        fit: function ``(before, context, after, answer's tokens) -> context`` that leaves out the middle where the
            prompt would be too long for the model, or for the task's ``max_length``.
        count: function that counts the tokens of a text.
        lengths: lengths of generated haystacks, in tokens.
        depths: positions of needles in the haystacks, in percent.
        max_length: maximum number of tokens of a prompt that ``fit`` shortens; None: the model's context.
        generation: generation of the generated world, for its tasks: 1 has small images and short documents, 2 the
            papers' sizes.
    """

    path: Path | None = None
    metric: str | None = None
    chunks: int = 4
    questions: int = 50
    seed: int = 0
    split: str = "passage"
    tokens: int = 512
    images: Path | None = None
    splitter: Callable[[str, str, int], list[str]] | None = None
    fit: Callable[[str, str, str, int], str] | None = None
    max_length: int | None = None
    count: Callable[[str], int] | None = None
    lengths: tuple[int, ...] = (512, 1024)
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    generation: int = 2


@dataclass(frozen=True)
class Task:
    """A registered task. ``metric`` is the metric that its benchmark reports."""

    name: str
    summary: str
    metric: str
    reads_file: bool
    counts_chunks: bool
    load: Callable[[Options], Iterator[Sample]]


TASKS: dict[str, Task] = {}


def task(
    name: str, summary: str, metric: str, reads_file: bool = False, counts_chunks: bool = False
) -> Callable[[Callable[[Options], Iterator[Sample]]], Callable[[Options], Iterator[Sample]]]:
    """Register a loader. One that reads a file may yield more than ``questions`` samples; the rest is not read."""

    def register(load: Callable[[Options], Iterator[Sample]]) -> Callable[[Options], Iterator[Sample]]:
        def first(options: Options) -> Iterator[Sample]:
            return islice(load(options), options.questions)

        TASKS[name] = Task(name, summary, metric, reads_file, counts_chunks, first if reads_file else load)
        return load

    return register


def find(name: str) -> Task:
    """Return the task of that name. Raise a TaskError that lists the names."""
    try:
        return TASKS[name]
    except KeyError:
        raise TaskError(f"unknown task '{name}'; there are: {', '.join(sorted(TASKS))}") from None
