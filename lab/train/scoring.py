"""Held-out questions, and what a model answers to them under full attention and under reuse.

Several questions are asked about the same chunks, each alone, as branches of one context that is computed once
(`mpic_lab.train.packing`); a test holds that equal to asking one at a time. LegoLink-k is MPIC-k here, since no chunk
of these prompts starts at position 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration

from mpic_lab.generator import Generator
from mpic_lab.generator.wordings import Asking
from mpic_lab.generator.worlds import FIRST, World
from mpic_lab.train.batch import (
    Batch,
    Encoder,
    Example,
    collate,
    collate_branches,
    embed,
    exact_pieces,
    first_choices,
    shared_tokens,
)
from mpic_lab.train.model import autocast, image_features

BRANCHES = 8  # questions over the same chunks, where the task has so many
ROWS = 3072  # approximate number of rows of a forward


@dataclass(frozen=True)
class LinkVariant:
    """A way to link: the head length that is recomputed (None: everything), whether chunk positions shift."""

    name: str
    head: int | None
    shift: bool = True
    begins: int = 0  # tokens before every chunk while it is compiled, dropped afterwards


SUMMARY_LINKS = (
    LinkVariant("full", None),
    LinkVariant("reuse", 0),
    LinkVariant("mpic-4", 4),
    LinkVariant("mpic-8", 8),
    LinkVariant("mpic-16", 16),
    LinkVariant("reuse, no shift", 0, shift=False),
    LinkVariant("mpic-16, no shift", 16, shift=False),
)
PATCH_LINKS = (
    LinkVariant("full", None),
    LinkVariant("reuse", 0),
    LinkVariant("legolink-0", 0, begins=4),
    LinkVariant("mpic-2", 2),
    LinkVariant("mpic-8", 8),
    LinkVariant("mpic-32", 32),
    LinkVariant("mpic-64", 64),
    LinkVariant("reuse, no shift", 0, shift=False),
)
"""Variants for the second generation, whose chunks are ten times as long."""


@dataclass
class Score:
    """The score of a question: whether everything the model has to generate is exact, whether its first piece is, and
    whether it searched."""

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
    """Scores teacher-forced first choices, which for exact answers are what greedy decoding generates."""
    out = []
    for example, pieces in zip(examples, first_choices(model, batch, examples, features), strict=True):
        exact = exact_pieces(example, pieces)
        out.append(Score(all(exact), exact[0], int(pieces[0][0]) == search_id))
    return out


@torch.no_grad()
def first_token_share(model: LlavaForConditionalGeneration, examples: list[Example]) -> list[float]:
    """Returns the mean share of attention on the prompt's first token by layer (queries from the 17th token on)."""
    implementation = model.config.text_config._attn_implementation
    model.set_attn_implementation({"text_config": "eager"})
    shares = torch.zeros(model.config.text_config.num_hidden_layers)
    for example in examples:
        batch = collate([example]).to(model.device)
        out = model.model.language_model(
            inputs_embeds=embed(model, batch), output_attentions=True, use_cache=False
        ).attentions
        shares += torch.tensor([float(a[0, :, 16:, 0].float().mean()) for a in out])
    model.set_attn_implementation({"text_config": implementation})
    return [round(float(s), 4) for s in shares / len(examples)]


def questions(
    encoder: Encoder, task: str, count: int, size: int, seed: int, world: World = FIRST
) -> list[Example]:
    """Returns `size` held-out questions of a cell, each over its own chunks."""
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
    """Returns `size` held-out questions of a cell, those over the same chunks together."""
    generator, out, left = Generator(seed + count, "eval", asking, world), [], size
    while left:
        out.append([encoder(c) for c in generator.branches(task, count, min(BRANCHES, left))])
        left -= len(out[-1])
    return out


def recomputed_share(examples: list[Example], head: int | None) -> float:
    """Returns the share of chunk tokens that a link computes anew."""
    lengths = [end - start for e in examples for start, end in e.chunks]
    if not lengths or head is None:
        return 1.0
    return sum(min(head, n) for n in lengths) / sum(lengths)


def _packs(groups: list[list[Example]]) -> Iterator[list[list[Example]]]:
    """Yields conversations for one forward, of similar length and about ROWS rows."""
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
def score_groups(
    model: LlavaForConditionalGeneration,
    groups: list[list[Example]],
    links: tuple[LinkVariant, ...],
    search_id: int,
) -> dict[str, list[Score]]:
    """Returns the scores of all questions by the links' names; the questions of a group share their chunks."""
    scores: dict[str, list[Score]] = {link.name: [] for link in links}
    for pack in _packs(groups):
        features = None
        for link in links:
            batch = collate_branches(pack, [link.head] * len(pack), link.shift, link.begins).to(model.device)
            if features is None and batch.pixels is not None:
                features = image_features(model, batch.pixels).flatten(0, 1)
            examples = [e for group in pack for e in group]
            scores[link.name] += score(model, batch, examples, search_id, features)
    return scores


@torch.no_grad()
def score_cell(
    model: LlavaForConditionalGeneration,
    encoder: Encoder,
    task: str,
    count: int,
    size: int,
    seed: int,
    links: tuple[LinkVariant, ...] = SUMMARY_LINKS,
    asking: Asking = "eval",
    world: World = FIRST,
) -> list[dict[str, Any]]:
    """Returns one row per link: shares of `size` questions of a task over `count` chunks."""
    groups = conversations(encoder, task, count, size, seed, asking, world)
    examples = [e for group in groups for e in group]
    search_id = encoder.tokenizer.convert_tokens_to_ids("<search>")
    with autocast(model.device):
        scores = score_groups(model, groups, links, search_id)
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
