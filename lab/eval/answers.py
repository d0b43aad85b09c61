"""The answers of a run, and the file that keeps them: ``answers.jsonl``, one answer per line.

A finished run may be packed (``gzip answers.jsonl``): it is read as it is, and unpacked when it is resumed.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpic.errors import (
    AnimatedImage,
    BadRequest,
    ContextLengthExceeded,
    DocumentTooLong,
    EmptyPrompt,
    ImageTooLarge,
    InvalidImage,
    InvalidText,
    InvalidUpload,
    InvalidVideo,
    UnsupportedModality,
    UnsupportedParameter,
    UnsupportedType,
    VideoTooLarge,
)

NAME = "answers.jsonl"
REFUSALS = frozenset(
    error.code
    for error in (
        ContextLengthExceeded, UnsupportedParameter, UnsupportedModality, UnsupportedType, DocumentTooLong,
        BadRequest, EmptyPrompt, InvalidUpload, InvalidText, InvalidImage, AnimatedImage, ImageTooLarge, InvalidVideo,
        VideoTooLarge,
    )
)  # fmt: skip
"""Codes of errors that depend only on the question, the model and the policy, not on memory, the device or installed
packages."""


@dataclass
class PolicyAnswer:
    """An answer under one policy. ``chunks`` is the number that the cell asked for, ``pieces`` the number that the
    prompt links, and ``skipped`` the reason if there is no answer. ``answer_tokens`` is the answer's length (EPIC,
    "Discussion of lengthy outputs": a policy may lose because it says too much), and ``kv_bytes`` the bytes of the
    compiled chunks that the prompt maps, each counted once; both are None in runs of earlier versions. ``metric`` is
    the metric that the configuration asked for, None: the task's own. Times are in milliseconds, None where several
    questions were asked at once."""

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
    kv_bytes: int | None = None
    answer_tokens: int | None = None
    kl: float | None = None
    top1: bool | None = None
    skipped: str | None = None
    metric: str | None = None

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.task, self.chunks, self.sample, self.policy

    @property
    def lasting(self) -> bool:
        """True if asking again would change nothing: there is an answer, or the same request is always refused."""
        return self.skipped is None or self.skipped.partition(":")[0] in REFUSALS


def read_answers(out: Path) -> list[PolicyAnswer]:
    """Return the answers a run has written so far, without a line cut off by an interruption. Of a question that was
    asked again, the last answer counts.

    Raises:
        BadRequest: the file holds something else.
    """
    path, packed = out / NAME, out / f"{NAME}.gz"
    if not path.exists() and packed.exists():
        entries = entries_of(packed, _unpacked(packed))
    else:
        entries = read_entries(path)
    answers = (PolicyAnswer(**{**entry, "expected": tuple(entry["expected"])}) for entry in entries)
    return list({answer.key: answer for answer in answers}.values())


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of lines, none if it does not exist, without a line cut off by an interruption.

    Raises:
        BadRequest: a line is not JSON.
    """
    return entries_of(path, path.read_bytes()) if path.exists() else []


def entries_of(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Return the objects in ``data``, which was read from ``path``."""
    found = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except ValueError:  # the line is not JSON, or was cut off within a character
            if number < len(lines):
                raise BadRequest(f"{path}, line {number} is not JSON") from None
    return found


def end_at_a_whole_line(path: Path) -> None:
    """Prepare a file for appending: remove an incomplete last line, or add the line break that a complete one
    lacks."""
    data = path.read_bytes() if path.exists() else b""
    last = data.rpartition(b"\n")[2]
    if not last:
        return
    if entries_of(path, last):
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, len(data) - len(last))


def ready(out: Path) -> list[PolicyAnswer]:
    """Prepare a run's file for appending, and return the answers in it."""
    path, packed = out / NAME, out / f"{NAME}.gz"
    answers = read_answers(out)
    if not path.exists() and packed.exists():
        temporary = path.with_suffix(".part")
        temporary.write_bytes(_unpacked(packed))
        temporary.replace(path)
        packed.unlink()
    end_at_a_whole_line(path)
    return answers


def lines_of(answers: Iterable[PolicyAnswer]) -> str:
    """Return answers as lines of the file."""
    return "".join(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers)


def _unpacked(packed: Path) -> bytes:
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise BadRequest(f"{packed} cannot be unpacked: {error}") from None
