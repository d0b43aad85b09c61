"""Numbers about attention and KV of linked prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpic.evals.analyze.dense import DenseLink, DenseLinker
from mpic.kernels.attention import rotate
from mpic.kv.chunk import Chunk
from mpic.link import parse_policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment


def received(linked: DenseLink) -> torch.Tensor:
    """Returns ``[layers, N]``: the attention per row that each token gets from the rows after the last chunk; for
    ``full`` this is the question's attention to every token (MPIC, section 4)."""
    end = max((place.start + place.length for place in linked.places), default=0)
    asking = linked.rows >= end
    return torch.stack([layer[asking].mean(0) for layer in linked.weights])


def concentration(linked: DenseLink) -> torch.Tensor:
    """Returns ``[layers, N]``: share of attention on the n most attended tokens, n = 1..N (the CDF of MPIC's
    figures)."""
    ordered = received(linked).sort(1, descending=True).values
    return ordered.cumsum(1) / ordered.sum(1, keepdim=True)


def by_place(linked: DenseLink) -> torch.Tensor:
    """Returns ``[layers, n]``: share of the question's attention to chunks that goes to their first 1..n tokens,
    averaged over chunks, which is the share that ``mpic-n`` and LegoLink-n recompute (EPIC, section 3)."""
    paid = received(linked)
    shortest = min(place.length for place in linked.places)
    shares = []
    for place in linked.places:
        own = paid[:, place.start : place.start + place.length]
        shares.append((own.cumsum(1) / own.sum(1, keepdim=True).clamp_min(1e-12))[:, :shortest])
    return torch.stack(shares).mean(0)


def distance(
    linker: DenseLinker, chunk: Chunk, before: tuple[Sequence[int], Sequence[int]]
) -> dict[str, Any]:
    """Returns how much a chunk's keys and values depend on the text before it (CacheBlend, section 3; EPIC, section 3).

    Args:
        before: token ids of the two texts that precede the chunk.

    Returns:
        ``keys``, ``values`` ``[layers, n]``: relative distance between the chunk's full-prefill KV behind each text,
        keys compared at chunk-local positions.
    """
    found = [_behind(linker, chunk, text) for text in before]
    out = {}
    for number, name in enumerate(("keys", "values")):
        one, other = found[0][number], found[1][number]
        size = torch.linalg.vector_norm(one, dim=(1, 3)).clamp_min(1e-9)
        out[name] = torch.linalg.vector_norm(one - other, dim=(1, 3)) / size
    return out


def keys_behind(
    linker: DenseLinker, chunk: Chunk, before: tuple[Sequence[int], Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a chunk's full-prefill keys behind each of two texts, at chunk-local positions, ``[layers, kv_heads, n,
    head_dim]``."""
    one, other = (_behind(linker, chunk, text)[0] for text in before)
    return one, other


def _behind(linker: DenseLinker, chunk: Chunk, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a chunk's full-prefill keys, at chunk-local positions, and values behind a text."""
    prompt = Prompt((TextSegment(tuple(text)), ChunkSegment(chunk), TextSegment(tuple(text[:1]))))
    linked = linker.link(prompt, parse_policy("full"))
    (place,) = linked.places
    tokens = slice(place.start, place.start + place.length)
    keys = linked.keys[:, :, tokens]
    rotation = linker.model.rotation(place.base)
    if rotation is not None:
        keys = torch.stack([rotate(layer, rotation) for layer in keys])
    return keys.float(), linked.values[:, :, tokens].float()


def attention_error(linked: DenseLink, full: DenseLink) -> torch.Tensor:
    """Returns ``[layers]``: total variation distance between the last row's attention under a policy and under
    ``full``."""
    return torch.stack(
        [(a[-1] - b[-1]).abs().sum() / 2 for a, b in zip(linked.weights, full.weights, strict=True)]
    )
