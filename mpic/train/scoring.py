"""Held-out questions, and what a model answers to them under full attention and under reuse.

Several questions are asked about the same chunks, each alone, as branches of one context that is computed once
(`mpic.train.rows`); a test holds that equal to asking one at a time. LegoLink-k is MPIC-k here, since no chunk of
these prompts starts at position 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration

from mpic.data.generator import Generator
from mpic.data.generator.wordings import Asking
from mpic.data.generator.worlds import FIRST, World
from mpic.train.batch import (
    Batch,
    Encoder,
    Example,
    collate_branches,
    exact_pieces,
    first_choices,
    shared_tokens,
)
from mpic.train.model import image_features

BRANCHES = 8  # questions over the same chunks, where the task has so many
ROWS = 3072  # of a forward, about


@dataclass(frozen=True)
class Link:
    """A way to link: the head length that is recomputed (None: everything), whether chunk positions shift."""

    name: str
    head: int | None
    shift: bool = True
    begins: int = 0  # tokens before every chunk while it is compiled, dropped afterwards


LINKS = (
    Link("full", None),
    Link("reuse", 0),
    Link("mpic-4", 4),
    Link("mpic-8", 8),
    Link("mpic-16", 16),
    Link("reuse, no shift", 0, shift=False),
    Link("mpic-16, no shift", 16, shift=False),
)
LINKS2 = (
    Link("full", None),
    Link("reuse", 0),
    Link("legolink-0", 0, begins=4),
    Link("mpic-2", 2),
    Link("mpic-8", 8),
    Link("mpic-32", 32),
    Link("mpic-64", 64),
    Link("reuse, no shift", 0, shift=False),
)
"""Of the second generation, whose chunks are ten times as long."""


@dataclass
class Score:
    """One question: is everything the model has to say exact, its first piece, and did it call the search."""

    exact: bool
    first: bool
    searched: bool


@torch.no_grad()
def score(
    model: LlavaForConditionalGeneration,
    batch: Batch,
    examples: list[Example],
    search_id: int,
    features: torch.Tensor | None = None,
) -> list[Score]:
    """Teacher-forced first choices, which for exact answers are what greedy decoding says."""
    out = []
    for example, pieces in zip(examples, first_choices(model, batch, examples, features), strict=True):
        exact = exact_pieces(example, pieces)
        out.append(Score(all(exact), exact[0], int(pieces[0][0]) == search_id))
    return out


def questions(
    encoder: Encoder, task: str, count: int, size: int, seed: int, world: World = FIRST
) -> list[Example]:
    """`size` held-out questions of a cell, each over its own chunks."""
    generator = Generator(seed + count, "eval", world=world)
    return [encoder(generator.task(task, count)) for _ in range(size)]


def conversations(
    encoder: Encoder,
    task: str,
    count: int,
    size: int,
    seed: int,
    asking: Asking = "eval",
    world: World = FIRST,
) -> list[list[Example]]:
    """`size` held-out questions of a cell, those over the same chunks together."""
    generator, out, left = Generator(seed + count, "eval", asking, world), [], size
    while left:
        out.append([encoder(c) for c in generator.branches(task, count, min(BRANCHES, left))])
        left -= len(out[-1])
    return out


def recomputed_share(examples: list[Example], head: int | None) -> float:
    """Share of chunk tokens that a link computes anew."""
    lengths = [end - start for e in examples for start, end in e.chunks]
    if not lengths or head is None:
        return 1.0
    return sum(min(head, n) for n in lengths) / sum(lengths)


def _packs(groups: list[list[Example]]) -> Iterator[list[list[Example]]]:
    """Conversations for one forward, of similar length and about ROWS rows."""
    pack: list[list[Example]] = []
    size = 0
    for group in sorted(groups, key=lambda g: len(g[0].ids)):
        rows = sum(len(e.ids) for e in group) - (len(group) - 1) * shared_tokens(group)
        if pack and size + rows > ROWS:
            yield pack
            pack, size = [], 0
        pack.append(group)
        size += rows
    yield pack


@torch.no_grad()
def score_cell(
    model: LlavaForConditionalGeneration,
    encoder: Encoder,
    task: str,
    count: int,
    size: int,
    seed: int,
    links: tuple[Link, ...] = LINKS,
    asking: Asking = "eval",
    world: World = FIRST,
) -> list[dict[str, Any]]:
    """One row a link: shares of `size` questions of a task over `count` chunks."""
    groups = conversations(encoder, task, count, size, seed, asking, world)
    examples = [e for group in groups for e in group]
    search_id = encoder.tokenizer.convert_tokens_to_ids("<search>")
    scores: dict[str, list[Score]] = {link.name: [] for link in links}
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        for pack in _packs(groups):
            features = None
            for link in links:
                batch = collate_branches(pack, [link.head] * len(pack), link.shift, link.begins)
                batch = batch.to(model.device)
                if features is None and batch.pixels is not None:
                    features = image_features(model, batch.pixels).flatten(0, 1)
                asked = [e for group in pack for e in group]
                scores[link.name] += score(model, batch, asked, search_id, features)
    return [
        {
            "task": task,
            "chunks": count,
            "link": link.name,
            "questions": len(found),
            "conversations": len(groups),
            "exact": _share(s.exact for s in found),
            "searched": _share(s.searched for s in found),
            "call_exact": _share(s.first for s in found),
            "recomputed": round(recomputed_share(examples, link.head), 4),
        }
        for link in links
        for found in [scores[link.name]]
    ]


def _share(values: Iterator[bool]) -> float:
    found = list(values)
    return round(sum(found) / len(found), 4)
