"""Building blocks for tests of faults inside vLLM: an engine, its reports, and a check that it serves on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, text_chunk
from families import random_image
from vllm_links import Linker, engine

PATIENCE = 0.3
"""Seconds that a link waits for a disk that a test makes slow; elsewhere it waits a minute."""
IMAGE, DOCUMENT = image_chunk(random_image(1)), text_chunk(ids(7, 41))
TEXT = prompt_of([1, *ids(1, 26)], DOCUMENT, ids(2, 9))
BOTH = prompt_of([1, *ids(1, 26)], IMAGE, ids(2, 3), DOCUMENT, ids(3, 9))


@contextmanager
def small_linker(files: Path) -> Iterator[Linker]:
    """Yields an engine with host memory for one request's chunks at a time."""
    with engine(kit.checkpoint("llava"), files, {"patience": 60.0, "host_bytes": 1}) as llm:
        linker = Linker(llm, "llava", files)
        linker.file(IMAGE), linker.file(DOCUMENT)
        yield linker


def serves_the_next(linker: Linker) -> None:
    """Checks that the engine answers the next request and holds nothing of earlier ones."""
    (answer,) = linker.run(*zip(linker.link(BOTH, "mpic-4")))
    expected, logprobs = linker.expected(BOTH, "mpic-4")
    assert answer.ids == expected and (answer.logprobs - logprobs).abs().max() < 1e-4
    scheduler = kit.settle(linker.llm)
    admission, host = scheduler.connector._admission, scheduler.connector._host
    assert not admission._tracked and not host._held and not scheduler.requests


def answer_to(linker, prompt, params, **settings):
    (answer,) = linker.reported([prompt], [params], **settings)
    return answer


def refused(linker, prompt, params, word: str, code: str = "bad_link_order", **settings) -> None:
    answer = answer_to(linker, prompt, params, **settings)
    assert answer.reason == "error" and not answer.ids
    assert answer.report["error"] == code and word in answer.report["message"], answer.report
