"""Building blocks for tests of retrieval while decoding: look-ups with given results, and the oracle."""

from __future__ import annotations

import threading

from engine_kit import expected_of, family, ids, image_chunk, logits_of, prompt_of, text_chunk
from families import VISION_FAMILIES, random_image

from mpic.engine.base import GenerationRequest, Hit, Retrieval, Sampling, SearchResult
from mpic.kv.chunk import Chunk
from mpic.link import parse_policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment

NAMES = ["llama", "phi3", "llava", "qwen2_vl", "qwen3_vl"]
POLICIES = ["full", "prefix", "reuse", "mpic-5", "mpic-64", "legolink-4", "legolink-0"]
POLICIES += ["attnlink-6", "random-30"]
SAID = 3
"""Tokens of the call: the answer's first three. The last of them closes it."""


class Words:
    """A tokenizer that spells every id in brackets; the id ``newline`` ends a line as well."""

    newline = -1

    def decode(self, ids, **options) -> str:
        return "".join(f"[{i}]" + "\n" * (i == self.newline) for i in ids)


def spell(monkeypatch) -> None:
    for name in NAMES:
        monkeypatch.setattr(family(name).loaded, "tokenizer", Words())


class Lookup(Retrieval):
    """Finds the given chunks and puts text around each; ``gate`` holds the search until it is set."""

    def __init__(self, call: list[int], *chunks: Chunk, rounds: int = 1, error: Exception | None = None):
        self.opens = "".join(f"[{i}]" for i in call[:-1])
        self.closes = f"[{call[-1]}]"
        self.chunks, self.rounds, self.error = chunks, rounds, error
        self.gate, self.searching = threading.Event(), threading.Event()
        self.gate.set()
        self.calls: list[str] = []

    def search(self, call: str) -> SearchResult:
        self.calls.append(call)
        self.searching.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return SearchResult("what?", tuple(Hit(c, {"id": c.label}) for c in self.chunks))

    def insert(self, hits, number):
        parts: list = []
        for i, hit in enumerate(hits):
            parts += [TextSegment((20 + number + i, 21)), ChunkSegment(hit.chunk)]
        return (*parts, TextSegment((40, 41, 42) if hits else (50, 51)))


def ask(engine, prompt, policy: str, tokens: int, retrieval=None, **sampling):
    settings = Sampling(max_tokens=tokens, ignore_eos=True, logprobs=300, **sampling)
    return engine.submit(GenerationRequest("r", prompt, parse_policy(policy), settings, retrieval=retrieval))


def begun(engine, policy: str = "reuse", name: str = "llama"):
    """Return a prompt with one chunk, the beginning of its answer (the call), and the family's chunks."""
    chunks = chunks_of(name)
    prompt = prompt_of(ids(1, 6), chunks[0], ids(4, 4))
    return prompt, logits_of(ask(engine, prompt, policy, SAID), SAID)[0], chunks


def extended(name: str, prompt: Prompt, policy: str, call: list[int], lookup: Lookup, *found: Chunk):
    """Return the oracle's answer to a prompt that has the call and its result from the start."""
    return expected_of(
        name, from_the_start(prompt, call, lookup.insert([Hit(c, {}) for c in found], 1)), policy
    )


def searching(engine, policy: str, tokens: int):
    """Return the prompt, the look-up (released by ``gate.set()``) and the stream of a request that waits for its
    search."""
    prompt, call, (_, _, b) = begun(engine, policy)
    lookup = Lookup(call, b)
    lookup.gate.clear()
    stream = ask(engine, prompt, policy, tokens, lookup)
    assert lookup.searching.wait(60)
    return prompt, lookup, stream


def from_the_start(prompt: Prompt, said: list[int], inserted) -> Prompt:
    return Prompt((*prompt.segments, TextSegment(tuple(said)), *inserted))


def chunks_of(name: str):
    image = image_chunk(random_image(1)) if name in VISION_FAMILIES else text_chunk(ids(8, 17))
    other = image_chunk(random_image(2, 32, 48)) if name in VISION_FAMILIES else text_chunk(ids(9, 12))
    return image, text_chunk(ids(7, 21)), other
