"""Building blocks for tests of faults inside vLLM: an engine, its reports, and a check that it serves on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, text_chunk
from families import random_image
from vllm_links import Linker, assert_close, engine, random_adapter

PATIENCE = 0.3
"""Seconds that a link waits for a disk that a test makes slow; elsewhere it waits a minute."""
IMAGE, DOCUMENT = image_chunk(random_image(1)), text_chunk(ids(7, 41))
TEXT = prompt_of([1, *ids(1, 26)], DOCUMENT, ids(2, 9))
BOTH = prompt_of([1, *ids(1, 26)], IMAGE, ids(2, 3), DOCUMENT, ids(3, 9))


_linkers: list[Linker] = []  # the one that stays


def small_linker(files: Path) -> Linker:
    """Return an engine with host memory for one request's chunks at a time. It stays for the next file that wants it.

    Args:
        files: the folder for chunk files, if it has to be started.
    """
    if not _linkers:
        with ExitStack() as made:
            adapter = random_adapter("llava")
            adapter.save(files / "packet" / "adapter.safetensors")
            settings = {
                "patience": 60.0,
                "host_bytes": 1,
                "packet": str(files / "packet" / "adapter.safetensors"),
            }
            llm = made.enter_context(engine(kit.checkpoint("llava"), files, settings))
            linker = Linker(llm, "llava", files, adapter)
            linker.file(IMAGE), linker.file(DOCUMENT)
            kit.staying.push(made.pop_all())
        _linkers.append(linker)
        kit.staying.callback(_linkers.clear)
    return _linkers[0]


def serves_the_next(linker: Linker) -> None:
    """Check that the engine answers the next request and holds nothing of earlier ones."""
    (answer,) = linker.run(*zip(linker.link(BOTH, "mpic-4")))
    assert_close(answer, linker.expected(BOTH, "mpic-4"))
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
