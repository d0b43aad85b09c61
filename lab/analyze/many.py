"""Attention and KV summed over many linked prompts: the papers show one prompt, this shows a hundred.

Prompts of a task differ in length, so tokens are counted in *groups* that every prompt has: the first token, the text
before the chunks, the tokens of each chunk by their place in it (the first, the second, the next two, four, ...), the
text behind each chunk. The row of the first output token is that of the prompt's last token, which computes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpic.errors import UnsupportedParameter
from mpic.link import ChunkPlace, Policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment
from mpic_lab.analyze import measures
from mpic_lab.analyze.dense import DenseLink, DenseLinker
from mpic_lab.analyze.measures import rounded

EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""First token of each group within a chunk."""
TOP = 50
"""Number of most distant tokens per layer that count as important (MPIC, figure 8)."""
LEAST, STEPS = -7.0, 140
"""Attention scores are counted in bins from ten to this power up to 1."""
SMALL = 1e-3
"""Tokens with less attention than this hardly matter (MPIC, section 3.3)."""


def group_names(chunks: int) -> list[str]:
    """Return the names of the groups of a prompt with ``chunks`` chunks."""
    ends = [*(str(end - 1) for end in EDGES[1:]), ""]
    inside = [
        str(low) if str(low) == high else f"{low}-{high}" for low, high in zip(EDGES, ends, strict=True)
    ]
    names = ["first token", "text before"]
    for number in range(1, chunks + 1):
        names += [f"chunk {number}: {one}" for one in inside]
        names.append("text between" if number < chunks else "question")
    return names


def groups_of(places: Sequence[ChunkPlace], length: int) -> torch.Tensor:
    """Return the number of each token's group, ``[length]``."""
    found = torch.ones(length, dtype=torch.int64)
    found[0] = 0
    for number, place in enumerate(places):
        base, end = 2 + number * (len(EDGES) + 1), place.start + place.length
        inside = torch.searchsorted(torch.tensor(EDGES), torch.arange(place.length), right=True) - 1
        found[place.start : end] = base + inside
        found[end:] = base + len(EDGES)
    return found


@dataclass
class PolicySums:
    """The attention of the prompts that were linked under one policy: maps are summed over prompts, and the shares and
    distances are kept for each prompt, by layer (``[layers]``).

    Attributes:
        map, rows: attention to a token of each group by the rows of each group, the last row apart, and in how many
            prompts there were such rows: ``[layers, groups + 1, groups]``, ``[groups + 1, groups]``.
        first: of the attention of all rows but the first, the share on the first token.
        heads: of the attention of the rows behind the chunks, the share on the chunks' first tokens.
        error: distance of the last row's attention from that under ``full``.
    """

    map: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    first: list[torch.Tensor] = field(default_factory=list)
    heads: list[torch.Tensor] = field(default_factory=list)
    error: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Gathered:
    """Sums over prompts with one number of chunks.

    Attributes:
        scores: number of chunk tokens by the attention they got from the last row under ``full``, ``[layers, STEPS]``.
        places: share of that attention within a chunk on its first tokens, summed up, ``[layers, tokens]`` a chunk.
        important: in how many layers each token of a chunk is among the ``TOP`` most distant, ``[tokens]`` a prompt.
        alone: share of the attention of a chunk that is compiled alone on its first token, by layer, ``[layers]`` a
            prompt.
        comparable: number of layers whose keys depend on the preceding text at all.
    """

    linker: DenseLinker
    policies: tuple[Policy, ...]
    chunks: int
    prompts: int = 0
    sums: dict[str, PolicySums] = field(default_factory=dict)
    scores: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    places: list[torch.Tensor] = field(default_factory=list)
    important: list[torch.Tensor] = field(default_factory=list)
    alone: list[torch.Tensor] = field(default_factory=list)
    comparable: int = 0

    def add(self, prompt: Prompt) -> None:
        """Link a prompt under every policy, ``full`` first, and add what it shows.

        Raises:
            UnsupportedParameter: it has another number of chunks than the others.
        """
        if len(prompt.chunks) != self.chunks:
            raise UnsupportedParameter(
                f"a sample has {len(prompt.chunks)} chunks and not {self.chunks}: choose a task with as many in each"
            )
        full: torch.Tensor | None = None
        for policy in self.policies:
            linked = self.linker.link(prompt, policy)  # one at a time: attention of all layers is large
            last = measures.last_row(linked)
            if full is None:
                full = last
                self._of_full(last, linked.places)
            self._of_policy(linked, (last - full).abs().sum(1) / 2)
        weights = self.linker.weights_alone(self.linker.inputs(prompt.chunks[0]))
        self.alone.append(torch.stack([layer[1:, 0].mean() for layer in weights]))
        self.important.append(self._distant(prompt))
        self.prompts += 1

    def _of_full(self, last: torch.Tensor, places: Sequence[ChunkPlace]) -> None:
        counted = measures.within(last, places)
        self.places += map(measures.cumulative_shares, counted)
        values = torch.cat(counted, 1).clamp_min(10**LEAST).log10()
        found = torch.stack([torch.histc(layer, STEPS, LEAST, 0.0) for layer in values])
        self.scores = found if not self.prompts else self.scores + found

    def _of_policy(self, linked: DenseLink, moved: torch.Tensor) -> None:
        groups = groups_of(linked.places, linked.weights[0].shape[1])
        count = len(group_names(self.chunks))
        columns = torch.nn.functional.one_hot(groups, count).float()
        sizes = columns.sum(0).clamp_min(1)
        of_rows = torch.cat([columns[linked.rows], torch.zeros(len(linked.rows), 1)], 1)
        of_rows[-1] = 0
        of_rows[-1, -1] = 1  # the last row stands apart
        there = of_rows.sum(0)
        heads = [place.start for place in linked.places]
        shown, first, on_heads = [], [], []
        for layer in linked.weights:
            weights = layer.float()
            shown.append(of_rows.T @ (weights @ columns / sizes) / there.clamp_min(1)[:, None])
            first.append(weights[linked.rows > 0, 0].mean())
            on_heads.append(weights[linked.asking][:, heads].sum(1).mean())
        rows = ((there > 0)[:, None] & (columns.sum(0) > 0)[None]).float()
        mine = self.sums.setdefault(linked.policy, PolicySums())
        mine.map, mine.rows = mine.map + torch.stack(shown), mine.rows + rows
        for kept, found in ((mine.first, first), (mine.heads, on_heads)):
            kept.append(torch.stack(found))
        mine.error.append(moved)

    def _distant(self, prompt: Prompt) -> torch.Tensor:
        """Return in how many layers each token of the prompt's first chunk is among the ``TOP`` whose keys differ most
        between the chunk before the question and behind it (L1, keys at chunk-local positions)."""
        texts = [segment for segment in prompt.segments if isinstance(segment, TextSegment)]
        begin, question = texts[0].token_ids, texts[-1].token_ids
        if isinstance(prompt.segments[0], ChunkSegment):
            begin = question[:1]
        before, behind = (
            measures.behind(self.linker, prompt.chunks[0], text)[0] for text in (begin, (*begin, *question))
        )
        distance = (before - behind).abs().sum((1, 3))  # [layers, tokens]
        able = [layer for layer in distance if layer.max() > 1e-3 * before.abs().sum((1, 3)).mean()]
        self.comparable = max(self.comparable, len(able))
        found = torch.zeros(distance.shape[1])
        for layer in able:
            found[layer.topk(min(TOP, len(layer))).indices] += 1
        return found

    # ---- means

    def attention_map(self, policy: str, layer: int) -> torch.Tensor:
        """Return the mean attention to a token, rows x columns in groups; NaN if no prompt has such rows or tokens."""
        sums = self.sums[policy]
        mean = sums.map[layer] / sums.rows.clamp_min(1)
        return mean.masked_fill(sums.rows == 0, float("nan"))

    def spread(self, policy: str, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean of ``first``, ``heads`` or ``error`` of a policy over prompts by layer, and their standard
        deviation."""
        return spread(getattr(self.sums[policy], what))

    def cumulative(self) -> torch.Tensor:
        """Return ``[layers, n]``: the share of the last row's attention within a chunk on its first 1..n tokens."""
        return measures.mean_of_all(self.places)

    def distribution(self) -> torch.Tensor:
        """Return ``[layers, STEPS]``: the share of chunk tokens with at most the attention of each step (MPIC, figure
        4a)."""
        return self.scores.cumsum(1) / self.scores.sum(1, keepdim=True)

    def counts(self) -> torch.Tensor:
        """Return the mean of ``important`` over prompts, for the tokens that every chunk has."""
        return measures.mean_of_all(self.important)

    def numbers(self) -> dict[str, Any]:
        """Return the content of ``analysis.json``, with each number by layer."""
        above = self.distribution()[:, round((math.log10(SMALL) - LEAST) / -LEAST * STEPS) - 1]
        alone = spread(self.alone)
        spreads = {
            name: {what: self.spread(name, what) for what in ("first", "heads", "error")}
            for name in self.sums
        }
        means, deviations = (
            {name: {what: rounded(one[of]) for what, one in mine.items()} for name, mine in spreads.items()}
            for of in (0, 1)
        )
        return {
            "prompts": self.prompts,
            "chunks": self.chunks,
            "share_of_tokens_over_a_thousandth": rounded(1 - above),
            "share_of_first_tokens": measures.first_shares(self.cumulative(), (1, 4, 16, 32, 64)),
            "first_token_of_a_chunk_alone": rounded(alone[0]),
            "layers_where_important": {"of": self.comparable, "tokens": rounded(self.counts())},
            "policies": means,
            "deviations": {"first_token_of_a_chunk_alone": rounded(alone[1]), "policies": deviations},
        }


def spread(found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the standard deviation of a figure over prompts."""
    values = torch.stack(list(found))
    return values.mean(0), values.std(0, correction=0)
