"""Building blocks for tests of faults inside vLLM: an engine, what it says, and that it serves the next request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, text_chunk
from families import random_image
from vllm_links import Linker, engine

PATIENCE = 0.3
IMAGE, DOCUMENT = image_chunk(random_image(1)), text_chunk(ids(7, 41))
TEXT = prompt_of([1, *ids(1, 26)], DOCUMENT, ids(2, 9))
BOTH = prompt_of([1, *ids(1, 26)], IMAGE, ids(2, 3), DOCUMENT, ids(3, 9))


@contextmanager
def small_linker(files: Path) -> Iterator[Linker]:
    """An engine with room in host memory for one request's chunks at a time."""
    with engine(kit.checkpoint("llava"), files, {"patience": PATIENCE, "host_bytes": 1}) as llm:
        linker = Linker(llm, "llava", files)
        linker.file(IMAGE), linker.file(DOCUMENT)
        yield linker


def serves_the_next(linker: Linker) -> None:
    """Whatever a test did, the engine goes on and holds nothing of it."""
    (answer,) = linker.run(*zip(linker.link(BOTH, "mpic-4")))
    expected, logprobs = linker.expected(BOTH, "mpic-4")
    assert answer.ids == expected and (answer.logprobs - logprobs).abs().max() < 1e-4
    scheduler = linker.llm.llm_engine.engine_core.engine_core.scheduler
    admission, host = scheduler.connector._admission, scheduler.connector._host
    assert not admission._tickets and not host._held and not scheduler.requests


def told(linker, prompt, params):
    (answer,) = linker.reported([prompt], [params])
    return answer


def refused(linker, prompt, params, word: str, code: str = "bad_link_order") -> None:
    answer = told(linker, prompt, params)
    assert answer.reason == "error" and not answer.ids
    assert answer.report["error"] == code and word in answer.report["message"], answer.report
