"""A quick look at a few held-out questions during a run; the real evaluation is `mpic_lab.train.evaluate`."""

from __future__ import annotations

from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.generator import Generator
from mpic_lab.train.batch import Example
from mpic_lab.train.curriculum import encoded
from mpic_lab.train.generations import Generation
from mpic_lab.train.scoring import first_token_share, score_groups

_TOGETHER = 4  # questions of a conversation


def watch(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    generation: Generation,
    size: int,
) -> dict[str, float]:
    """Returns the share of right answers to about `size` questions a cell, and the first token's share of attention
    by layer. Cells of full size are also asked under other links, with `@` and their name.
    """
    search_id = tokenizer.convert_tokens_to_ids("<search>")
    scores: dict[str, float] = {}
    for task, count, side in generation.watched:
        name = f"{task} {count}" + (f" /{side}" if side else "")
        groups = _questions(generation, tokenizer, task, count, side, size)
        links = generation.links if side is None else generation.links[:1]
        for link, found in zip(links, score_groups(model, groups, links, search_id).values(), strict=True):
            share = round(sum(one.exact for one in found) / len(found), 4)
            scores[name if link.head is None else f"{name} @{link.name}"] = share
    if len(generation.links) > 1:
        examples = [
            generation.encoder(tokenizer)(Generator(5, "eval", world=generation.world).task("mixed", 2))
        ]
        for layer, share in enumerate(first_token_share(model, examples)):
            scores[f"sink {layer}"] = share
    return scores


def _questions(
    generation: Generation,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    count: int,
    side: int | None,
    size: int,
) -> list[list[Example]]:
    generator = Generator(5000 + count, "eval", world=generation.small(side))
    encoder = generation.encoder(tokenizer)
    groups: list[list[Example]] = []
    while sum(map(len, groups)) < size:
        branches = _TOGETHER if len(generation.links) > 1 else 1
        asked = generator.branches(task, count, branches)
        full = int(encoder.image_tokens**0.5)
        groups.append(encoded(encoder, asked, side or full, generator.rng.getrandbits(30) if side else 0))
    return groups
