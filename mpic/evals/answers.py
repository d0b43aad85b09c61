"""Answers of a run and the file they are kept in: ``answers.jsonl``, one answer a line.

A finished run may be packed (``gzip answers.jsonl``): it is read as it is, and unpacked when it goes on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpic.errors import BadRequest

NAME = "answers.jsonl"


@dataclass
class Answer:
    """One answer of one policy. Times in milliseconds; ``chunks`` is what the cell asked for, ``pieces`` how many the
    prompt links; ``skipped`` says why there is no answer. Times are None where several questions were asked at once."""

    task: str
    chunks: int
    sample: str
    policy: str
    answer: str = ""
    expected: tuple[str, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    ttft_ms: float | None = None
    total_ms: float | None = None
    pieces: int = 0
    prompt_tokens: int = 0
    chunk_tokens: int = 0
    reused: int = 0
    computed: int = 0
    flops: float = 0.0
    kl: float | None = None
    top1: bool | None = None
    skipped: str | None = None

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.task, self.chunks, self.sample, self.policy


def read_answers(out: Path) -> list[Answer]:
    """What a run has written so far; a line cut off by an interruption is left out.

    Raises:
        BadRequest: the file holds something else.
    """
    path, packed = out / NAME, out / f"{NAME}.gz"
    if path.exists():
        text = path.read_text(encoding="utf-8")
    elif packed.exists():
        text = _unpacked(packed)
    else:
        return []
    found = []
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:
                continue
            raise BadRequest(f"{path}, line {number + 1} is not JSON") from None
        entry["expected"] = tuple(entry["expected"])
        found.append(Answer(**entry))
    return found


def ready(out: Path) -> list[Answer]:
    """What a run has written so far, its file unpacked and ended at a whole line, so that more can be appended."""
    path, packed = out / NAME, out / f"{NAME}.gz"
    answers = read_answers(out)
    if not path.exists() and packed.exists():
        temporary = path.with_suffix(".part")
        temporary.write_text(_unpacked(packed), encoding="utf-8")
        temporary.replace(path)
        packed.unlink()
    elif path.exists() and not path.read_bytes().endswith(b"\n"):
        path.write_text(lines_of(answers), encoding="utf-8")
    return answers


def lines_of(answers: Iterable[Answer]) -> str:
    """Answers as lines of the file."""
    return "".join(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers)


def _unpacked(packed: Path) -> str:
    try:
        return gzip.decompress(packed.read_bytes()).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadRequest(f"{packed} cannot be unpacked: {error}") from None
