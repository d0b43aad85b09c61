"""The training data of an adapter: prompts with chunks, from a file or from the demo models' generator.

The answers are the model's own (``lesson.py``), so no labels are needed (KV Packet, section 3.2).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mpic.data.bundled import generation_for
from mpic.errors import BadRequest
from mpic.prompt import ChatTemplate, Prompt, build_prompt
from mpic_lab.eval.resolve import LocalResolver
from mpic_lab.generator import Generator
from mpic_lab.generator.client import messages_of
from mpic_lab.generator.worlds import WORLDS

OWNER = "packet-training"
TASKS = (
    "image",
    "image named",
    "caption",
    "compare",
    "word level",
    "few-shot",
    "card",
    "card named",
    "needle",
)
TASKS += ("biography", "two-hop", "last person", "mixed")
CHUNKS = (1, 2, 3, 4)
"""Tasks of the generated world, and how many chunks a prompt of theirs has."""


class TrainingDataError(BadRequest):
    """A file of training prompts cannot be read, or has no usable prompt."""

    code = "training_data_error"


def chosen_tasks(text: str, data: Path | None) -> tuple[str, ...]:
    """Return the tasks that a comma-separated text names; all if it is empty.

    Raises:
        TrainingDataError: there is no such task, or prompts come from a file.
    """
    if not text:
        return TASKS
    chosen = tuple(name.strip() for name in text.split(","))
    if unknown := sorted({*chosen} - {*TASKS}):
        raise TrainingDataError(f"no tasks {', '.join(unknown)}; there are {', '.join(TASKS)}", param="tasks")
    if data is not None:
        raise TrainingDataError(
            "--tasks chooses among generated prompts; --data has prompts of its own", param="tasks"
        )
    return chosen


def generated(seed: int, context: int, tasks: tuple[str, ...] = TASKS) -> Iterator[list[dict[str, Any]]]:
    """Yield an endless stream of conversations from the demo models' world, with names, sprites and wordings of its
    training split. ``context`` tokens decide which generation of images and documents suits the model."""
    world = WORLDS[generation_for(context)]
    generator, rng = Generator(seed, "train", world=world), random.Random(f"packet-{seed}")
    while True:
        yield messages_of(generator.task(rng.choice(tasks), rng.choice(CHUNKS)))


def read(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the conversations of a JSONL file. A line is ``{"messages": [...]}`` as for ``/v1/chat/completions``, or
    ``{"documents": [text, ...], "question": text}``.

    Raises:
        TrainingDataError: the file cannot be read, or a line has neither form.
    """
    try:
        # str.splitlines would also cut at separators that may stand in a JSON text, such as U+2028
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingDataError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _messages(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingDataError(
                f'line {number} of {path} is neither {{"messages": [...]}} nor '
                f'{{"documents": [...], "question": ...}}: {error!r}'
            ) from error


def _messages(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" in entry:
        return list(entry["messages"])
    parts = [{"type": "document", "text": str(text)} for text in entry["documents"]]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": str(entry["question"])}]}]


def prompts(
    path: Path | None,
    template: ChatTemplate,
    count: int,
    seed: int,
    context: int,
    tasks: tuple[str, ...] = TASKS,
) -> list[Prompt]:
    """Return ``count`` prompts that link at least one chunk: those of a file, shuffled, or generated ones of these
    tasks, from the world that suits a context of this length.

    Raises:
        TrainingDataError: the file has fewer.
    """
    resolver = LocalResolver(template, OWNER)
    if path is None:
        conversations: Iterator[list[dict[str, Any]]] = generated(seed, context, tasks)
    else:
        shuffled = list(read(path))
        random.Random(seed).shuffle(shuffled)
        conversations = iter(shuffled)
    built = (build_prompt(messages, template, resolver, []) for messages in conversations)
    found = list(islice((prompt for prompt in built if prompt.chunks), count))
    if len(found) < count:
        raise TrainingDataError(
            f"{path} has {len(found)} prompts with documents or images; {count} are needed"
        )
    return found
