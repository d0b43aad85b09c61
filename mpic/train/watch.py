"""A quick look at a few held-out questions while a run goes on; the real evaluation is `mpic.train.evaluate`."""

from __future__ import annotations

from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic.data.generator import Generator
from mpic.train.batch import Example, collate_branches, exact_answers
from mpic.train.curriculum2 import grid
from mpic.train.evaluate import first_token_share
from mpic.train.recipe import Recipe
from mpic.train.scoring import Link

_TOGETHER = 4  # conversations of a forward, and questions of a conversation


def watch(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, size: int
) -> dict[str, float]:
    """Share of right answers to about `size` questions a cell, and the first token's share of attention by layer.

    Of cells of full size also under other links, `@` their name.
    """
    scores: dict[str, float] = {}
    for task, count, side in recipe.watched:
        name = f"{task} {count}" + (f" /{side}" if side else "")
        groups = _questions(recipe, tokenizer, task, count, side, size)
        for link in recipe.links if side is None else recipe.links[:1]:
            scores[name if link.head is None else f"{name} @{link.name}"] = _share(model, groups, link)
    if len(recipe.links) > 1:
        examples = [recipe.encoder(tokenizer)(Generator(5, "eval", world=recipe.world).task("mixed", 2))]
        for layer, share in enumerate(first_token_share(model, examples)):
            scores[f"sink {layer}"] = share
    return scores


def _questions(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, task: str, count: int, side: int | None, size: int
) -> list[list[Example]]:
    generator = Generator(5000 + count, "eval", world=recipe.small(side))
    encoder = recipe.encoder(tokenizer)
    groups: list[list[Example]] = []
    while sum(map(len, groups)) < size:
        branches = _TOGETHER if len(recipe.links) > 1 else 1
        asked = generator.branches(task, count, branches)
        if side is not None:
            seed = generator.rng.getrandbits(30)
        group = []
        for conversation in asked:
            if side is not None:  # the same grid for all questions about an image
                rng = type(generator.rng)(seed)
                encoder.pick = lambda rng=rng: grid(rng, side, int(encoder.image_tokens**0.5))
            group.append(encoder(conversation))
        groups.append(group)
    return groups


def _share(model: LlavaForConditionalGeneration, groups: list[list[Example]], link: Link) -> float:
    right = asked = 0
    while groups:
        part, groups = groups[:_TOGETHER], groups[_TOGETHER:]
        examples = [e for group in part for e in group]
        batch = collate_branches(part, [link.head] * len(part), link.shift, link.begins).to(model.device)
        right += sum(all(spans) for spans in exact_answers(model, batch, examples))
        asked += len(examples)
    return round(right / asked, 4)
