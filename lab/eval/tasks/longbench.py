"""LongBench (Bai et al. 2023) from its JSONL files: ``{"input", "context", "answers", "dataset", ...}`` a line.

Which subset it is comes from the line's ``dataset``; a line without one, of your own data in this format, is asked as
hotpotqa, samsum or multi_news is. Prompts and lengths of answers are LongBench's own (``longbench.toml``). As there, a
prompt that is too long loses the middle of its context, and of SAMSum's answers the first line counts. Passages,
example dialogues or KVSplit's pieces of the context become chunks.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from mpic_lab.eval.tasks.base import TASKS, Options, Sample, TaskError, task
from mpic_lab.eval.tasks.documents import ask, data_file, field_of, json_lines, parts_of

_DIALOGUE = re.compile(r"(?=^Dialogue: )", re.MULTILINE)


@dataclass(frozen=True)
class Subset:
    """The form in which LongBench asks a subset.

    Args:
        task: name of our task that reads it.
        tokens: maximum number of tokens of an answer.
        prompt: template with ``{context}`` and ``{input}``.
        first_line: True if only the first line of an answer is scored.
    """

    task: str
    tokens: int
    prompt: str
    first_line: bool = False


@cache
def subsets() -> dict[str, Subset]:
    """Return the subsets by LongBench's names for them."""
    text = (files("mpic_lab.eval.tasks") / "longbench.toml").read_text(encoding="utf-8")
    return {name: Subset(**body) for name, body in tomllib.loads(text).items()}


@task("longbench-qa", "LongBench's question answering subsets, one JSONL file each", "f1", reads_file=True)
def question_answering(options: Options) -> Iterator[Sample]:
    """Read 2wikimqa, hotpotqa, musique, narrativeqa, qasper or multifieldqa_en: answers of a few words."""
    return _samples("longbench-qa", options)


@task("longbench-samsum", "LongBench's SAMSum: dialogues with summaries, then one without", "rouge-l", True)
def samsum(options: Options) -> Iterator[Sample]:
    """Make every example dialogue with its summary a chunk, unless ``split`` cuts otherwise; the last dialogue is the
    question."""
    return _samples("longbench-samsum", options)


@task("longbench-summary", "LongBench's MultiNews: several articles, one summary", "rouge-l", reads_file=True)
def summaries(options: Options) -> Iterator[Sample]:
    """Read multi_news, gov_report or qmsum."""
    return _samples("longbench-summary", options)


def _register_each() -> None:
    """Register every subset under its own name, too, so that one run can ask several of them."""
    for name, subset in subsets().items():
        if f"longbench-{name}" not in TASKS:
            summary = f"LongBench's {name}, as `{subset.task}`"
            load = partial(_samples, f"longbench-{name}")
            task(f"longbench-{name}", summary, TASKS[subset.task].metric, reads_file=True)(load)


def _samples(task: str, options: Options) -> Iterator[Sample]:
    path = data_file(options, (".jsonl",))
    for number, entry in enumerate(json_lines(path)):
        where = f"{path.name}, entry {number}"
        context = field_of(entry, "context", where)
        subset = _subset(task, entry, where)
        before, after = subset.prompt.split("{context}")
        after = after.replace("{input}", field_of(entry, "input", where))
        if options.fit is not None:
            context = options.fit(before, context, after, subset.tokens)
        messages = ask(_documents(task, context, options), before, after)
        answers = tuple(field_of(entry, "answers", where))
        yield Sample(str(entry.get("_id", number)), messages, answers, subset.tokens, subset.first_line)


def _subset(task: str, entry: dict[str, Any], where: str) -> Subset:
    known = {key: one for key, one in subsets().items() if task in (one.task, f"longbench-{key}")}
    name = entry.get("dataset", next(iter(known)))
    if name not in known:
        raise TaskError(f"{where}: {task} does not read the subset '{name}'; it reads {', '.join(known)}")
    return known[name]


def _documents(task: str, context: str, options: Options) -> list[dict[str, Any]]:
    if task == "longbench-samsum" and options.split == "passage":
        pieces = [piece for piece in _DIALOGUE.split(context) if piece]
        return [{"type": "document", "text": piece} for piece in pieces]
    found = parts_of(context, options)
    if len(found) == 1 and options.split == "passage" and options.splitter is not None:
        return parts_of(context, replace(options, split="paragraph"))  # a text without passages
    return found


_register_each()
