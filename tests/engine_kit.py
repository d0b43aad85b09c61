"""Building blocks for tests of the native engine: families made once, chunks, prompts, requests."""

from __future__ import annotations

import functools
import itertools

from families import Family, make_family

from mpic.engine.base import GenerationRequest, Sampling
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.link import parse_policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment

_ids = itertools.count()


@functools.cache
def family(name: str) -> Family:
    return make_family(name)


def text_chunk(token_ids: list[int] | tuple[int, ...], owner: str = "local") -> Chunk:
    key = ChunkKey.of_text(" ".join(map(str, token_ids)))
    return Chunk(key, owner, tuple(token_ids), label=f"doc{len(token_ids)}")


def image_chunk(image, owner: str = "local") -> Chunk:
    return Chunk(ChunkKey.of_image(image), owner, load_image=lambda: image, label="image")


def prompt_of(*parts) -> Prompt:
    """Lists of ids become text, chunks become links."""
    return Prompt(tuple(ChunkSegment(p) if isinstance(p, Chunk) else TextSegment(tuple(p)) for p in parts))


def request_of(prompt: Prompt, policy: str, tokens: int = 4, user: str = "local", **sampling) -> GenerationRequest:
    settings = Sampling(max_tokens=tokens, ignore_eos=True, **sampling)
    return GenerationRequest(f"r{next(_ids)}", prompt, parse_policy(policy), settings, user)


