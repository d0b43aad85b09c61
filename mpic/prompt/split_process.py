"""Splitting a long text in a process of its own.

``semantic-text-splitter`` reads a whole text before it asks for the first number of tokens, and lets no other thread
run meanwhile: a second for a book in Markdown. A separate process blocks nobody and can be ended at any time. It
imports little, and starts in a fifth of a second.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import BinaryIO

from mpic import memory
from mpic.cancel import checkpoint
from mpic.errors import Unavailable
from mpic.prompt.bounds import utf8_length
from mpic.prompt.sliced_tokenizer import SlicedTokenizer
from mpic.prompt.split import Split, SplitPiece, TooManyPieces, split_text

SHORT = 1 << 16
"""Texts of fewer characters are split in this process."""
POLL_SECONDS = 0.05
"""Interval of checking whether the result is still wanted."""
NICE = 10
"""Niceness of the other process, relative to this one."""
PROCESS, TIMES = 48 << 20, 10
"""Bytes of memory that the other process takes, and how many more for each byte of the text."""


def split_in_process(text: str, split: Split, tokenizer: SlicedTokenizer, most: int) -> list[SplitPiece]:
    """Split a text as ``split_text`` does, in a process of its own if it is long.

    Raises:
        TooManyPieces: there are more than ``most`` pieces.
        Unavailable: the process ended unexpectedly.
        OutOfMemory: there is not enough memory for it now.
        Cancelled: nobody waits for the result any more; the process has been ended.
    """
    if len(text) < SHORT or split.mode in ("none", "fixed"):
        return split_text(text, split, tokenizer.spans, tokenizer.counter(), most)
    order = {
        "split": asdict(split),
        "most": most,
        "longest": tokenizer.longest,
        "joins": tokenizer.joins,
    }
    with (
        memory.set_aside(PROCESS + TIMES * utf8_length(text), "cutting the text"),
        tempfile.TemporaryFile() as order_file,
    ):
        for part in (json.dumps(order), tokenizer.source, text):
            data = part.encode()
            order_file.write(struct.pack("<Q", len(data)))
            order_file.write(data)
        order_file.seek(0)
        answer = json.loads(_run(order_file))
    if answer is None:
        raise TooManyPieces(f"more than {most} pieces")
    return [SplitPiece(start, end) for start, end in answer]


def _run(order_file: BinaryIO) -> bytes:
    """Run the process on an order and return its output."""
    # -P: otherwise -m looks for modules in the working folder first, where anybody may have put some
    command = [sys.executable, "-P", "-m", "mpic.prompt.split_process"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        command, stdin=order_file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=POLL_SECONDS)
                break
            checkpoint()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        why = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"status {process.returncode}"
        raise Unavailable(f"the text could not be split, because the process that did it has ended: {why}")
    return output


def main() -> None:
    """Split the text of an order on standard input, and write the pieces to standard output, or null if they are too
    many."""
    with suppress(OSError):
        os.nice(NICE)
    order, source, text = (_read(sys.stdin.buffer).decode() for _ in range(3))
    settings = json.loads(order)
    tokenizer = SlicedTokenizer(source, settings["longest"], settings["joins"])
    split = Split(**settings["split"])
    try:
        pieces = split_text(
            text, split, tokenizer.spans, _while_wanted(tokenizer.counter()), settings["most"]
        )
    except TooManyPieces:
        pieces = None
    json.dump(pieces, sys.stdout)


def _read(file: BinaryIO) -> bytes:
    (size,) = struct.unpack("<Q", file.read(8))
    return file.read(size)


def _while_wanted(count: Callable[[str, int], int]) -> Callable[[str, int], int]:
    """Return a ``count`` that ends this process once its parent is gone."""
    parent = os.getppid()

    def counting(text: str, most: int) -> int:
        if os.getppid() != parent:
            sys.exit("nobody waits for the pieces any more")
        return count(text, most)

    return counting


if __name__ == "__main__":
    main()
