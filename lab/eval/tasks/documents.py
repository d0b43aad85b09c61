"""Long texts as chunks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from mpic_lab.eval.tasks.base import Options, TaskError

_PASSAGE = re.compile(r"(?=^Passage \d+:)", re.MULTILINE)


def parts_of(text: str, options: Options) -> list[dict[str, Any]]:
    """Return the document parts whose texts, joined, are ``text``."""
    return [{"type": "document", "text": piece} for piece in pieces(text, options)]


def pieces(text: str, options: Options) -> list[str]:
    """Cut a text according to the options, without losing any of it."""
    if options.split == "none":
        found = [text]
    elif options.split == "passage":
        found = [piece for piece in _PASSAGE.split(text) if piece]
    elif options.splitter is None:
        raise TaskError(f"split '{options.split}' needs a tokenizer")
    else:
        found = options.splitter(text, options.split, options.tokens)
    return found or [text]


def in_pieces(options: Options) -> Options:
    """Return options that cut a haystack into pieces of ``tokens`` unless they say otherwise; it has no passages."""
    return replace(options, split="fixed") if options.split == "passage" else options


def needle_cells(options: Options) -> Iterator[tuple[int, int, str, random.Random]]:
    """Yield length, depth, id (``LENGTH@DEPTH#NUMBER``) and a generator of its own for every question of a grid."""
    for length, depth, number in product(options.lengths, options.depths, range(options.questions)):
        rng = random.Random(f"{options.seed} {length} {depth} {number}")
        yield length, depth, f"{length}@{depth}#{number}", rng


def ask(documents: list[dict[str, Any]], before: str, after: str) -> list[dict[str, Any]]:
    """Return one user message: an instruction, the documents, the question."""
    head = [{"type": "text", "text": before}] if before else []
    return [{"role": "user", "content": [*head, *documents, {"type": "text", "text": after}]}]


def data_file(options: Options, suffixes: tuple[str, ...]) -> Path:
    """Return the path of the data file. Raise TaskError if it does not exist or has another suffix."""
    path = options.path
    if path is None or not path.is_file() or path.suffix not in suffixes:
        raise TaskError(f"this task reads a local file ending in {' or '.join(suffixes)}; got {path}")
    return path


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file. Raise a TaskError that names a line without one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(f"{path.name}, line {number}: not JSON ({error})") from None


def whole_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise TaskError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path.name}: not JSON ({error})") from None


def field_of(entry: Any, name: str, where: str) -> Any:
    """Return a required field. Raise a TaskError that says which field is missing, and where."""
    if not isinstance(entry, dict) or name not in entry:
        raise TaskError(f"{where}: no field '{name}'")
    return entry[name]
