"""Numbers about attention and KV of linked prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpic.kernels.attention import rotate
from mpic.kv.chunk import Chunk
from mpic.link import ChunkPlace, parse_policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment
from mpic_lab.analyze.dense import DenseLink, DenseLinker


def received(linked: DenseLink) -> torch.Tensor:
    """Return ``[layers, N]``: the attention per row that each token gets from the rows after the last chunk; for
    ``full`` this is the question's attention to every token (MPIC, section 3.3)."""
    return torch.stack([layer[linked.asking].mean(0) for layer in linked.weights])


def last_row(linked: DenseLink) -> torch.Tensor:
    """Return ``[layers, N]``: the attention of the prompt's last row, which computes the first output token."""
    return torch.stack([layer[-1] for layer in linked.weights])


def concentration(linked: DenseLink) -> torch.Tensor:
    """Return ``[layers, N]``: share of attention on the n most attended tokens, n = 1..N (the CDF of MPIC's
    figures)."""
    ordered = received(linked).sort(1, descending=True).values
    return ordered.cumsum(1) / ordered.sum(1, keepdim=True)


def by_place(linked: DenseLink) -> torch.Tensor:
    """Return ``[layers, n]``: share of the question's attention to chunks that goes to their first 1..n tokens,
    averaged over chunks, which is the share that ``mpic-n`` and LegoLink-n recompute (EPIC, section 4.2)."""
    return mean_of_all(cumulative_shares(part) for part in within(received(linked), linked.places))


def within(paid: torch.Tensor, places: Sequence[ChunkPlace]) -> list[torch.Tensor]:
    """Return the columns of each chunk, ``[layers, n]``, of attention ``[layers, N]``."""
    return [paid[:, place.start : place.start + place.length] for place in places]


def cumulative_shares(paid: torch.Tensor) -> torch.Tensor:
    """Return ``[layers, n]``: share of the attention to a chunk's tokens ``[layers, n]`` on its first 1..n tokens."""
    return paid.cumsum(1) / paid.sum(1, keepdim=True).clamp_min(1e-12)


def mean_of_all(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors ``[..., n]`` over the tokens that the shortest of them has."""
    parts = list(parts)
    shortest = min(part.shape[-1] for part in parts)
    return torch.stack([part[..., :shortest] for part in parts]).mean(0)


def distance(
    linker: DenseLinker, chunk: Chunk, before: tuple[Sequence[int], Sequence[int]]
) -> dict[str, Any]:
    """Return how much a chunk's keys and values depend on the text before it (CacheBlend; MPIC, section 5.2).

    Args:
        before: token ids of the two texts that precede the chunk.

    Returns:
        ``keys``, ``values`` ``[layers, n]``: relative distance between the chunk's full-prefill KV behind each text,
        keys compared at chunk-local positions.
    """
    found = [behind(linker, chunk, text) for text in before]
    out = {}
    for number, name in enumerate(("keys", "values")):
        one, other = found[0][number], found[1][number]
        size = torch.linalg.vector_norm(one, dim=(1, 3)).clamp_min(1e-9)
        out[name] = torch.linalg.vector_norm(one - other, dim=(1, 3)) / size
    return out


def behind(linker: DenseLinker, chunk: Chunk, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's full-prefill keys, at chunk-local positions, and values behind a text, ``[layers, kv_heads, n,
    head_dim]`` in host memory."""
    prompt = Prompt((TextSegment(tuple(text)), ChunkSegment(chunk), TextSegment(tuple(text[:1]))))
    linked = linker.link(prompt, parse_policy("full"))
    (place,) = linked.places
    tokens = slice(place.start, place.start + place.length)
    keys = linked.keys[:, :, tokens]
    rotation = linker.model.rotation(place.base)
    if rotation is not None:
        keys = torch.stack([rotate(layer, rotation) for layer in keys])
    return keys.float().cpu(), linked.values[:, :, tokens].float().cpu()


def attention_error(linked: DenseLink, full: DenseLink) -> torch.Tensor:
    """Return ``[layers]``: total variation distance between the last row's attention under a policy and under
    ``full``."""
    return (last_row(linked) - last_row(full)).abs().sum(1) / 2


def numbers(linked: Sequence[DenseLink], distance: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the numbers of one prompt for ``analysis.json``, each by layer.

    Args:
        linked: under every policy, ``full`` first.
        distance: the result of ``distance``.
    """
    full = linked[0]
    return {
        "policies": [one.policy for one in linked],
        "tokens": full.weights[0].shape[1],
        "share_of_first_tokens": first_shares(by_place(full), (1, 4, 16, 32)),
        "attention_error": {one.policy: rounded(attention_error(one, full)) for one in linked},
        "kv_distance": {
            name: {
                "first_16": rounded(part[:, :16].mean(1)),
                "rest": rounded(part[:, 16:].mean(1)) if part.shape[1] > 16 else [],
            }
            for name, part in distance.items()
        },
    }


def first_shares(places: torch.Tensor, counts: Sequence[int]) -> dict[str, list[float]]:
    """Return from ``[layers, n]`` the share of a chunk's first tokens by layer, for each number of them."""
    return {str(k): rounded(places[:, min(k, places.shape[1]) - 1]) for k in counts}


def rounded(values: Iterable[Any]) -> list[float]:
    """Return values rounded to four decimals, for JSON."""
    return [round(float(value), 4) for value in values]
