"""The load-time self-test with an image, because no list of families can foresee how a model lays out its images.

A prompt of two images between texts is run once by the stock model, called with token ids and pixel values, and once as
a step in which each image has its own extent. Before that, the model's processor is asked what it puts into a prompt
(``image_structure``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from PIL import Image

from mpic.imaging.processing import process_images
from mpic.kv.chunk import ChunkInputs
from mpic.model.bidirectional import token_types, types_name
from mpic.model.image_structure import (
    gradient,
    refuse_other_tokens,
    refuse_structure,
    sizes_to_encode,
)
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import Segments, as_step, compare, stock_attention
from mpic.model.structure import RowInputs, plain_ids

_TEXTS = (6, 3, 4)
"""Tokens of text before, between and behind the two images."""


@torch.inference_mode()
def image_self_test(loaded: LoadedModel) -> float:
    """Compare with the stock model and return the relative error.

    Raises:
        ModelRefused: the logits differ, or the model's images cannot be linked.
    """

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        refuse_structure(loaded)
        images = [gradient(size) for size in sizes_to_encode(loaded)]
        chunks = [loaded.image_inputs(image) for image in images]
        refuse_other_tokens(loaded, images, chunks)
        return linked(loaded, chunks, partial(_stock, images=images))

    failed = f"{loaded.config.model_type}: its images cannot be linked"
    why = "it lays its images out, or attends to them, in another way"
    return compare(loaded, logits, failed, "logits behind linked images", why)


def linked(
    loaded: LoadedModel,
    chunks: Sequence[ChunkInputs],
    stock: Callable[[LoadedModel, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a prompt with two chunks, as a step and by the stock model, called with its ids."""
    rows, positions, segments = prompt_of(loaded, chunks)
    got = as_step(loaded, rows, positions.to(loaded.device), segments, loaded.scope)
    return got, stock(loaded, rows.ids)


def prompt_of(loaded: LoadedModel, chunks: Sequence[ChunkInputs]) -> tuple[RowInputs, torch.Tensor, Segments]:
    """Return text, chunk, text, chunk, text: rows, positions, and segments."""
    words = torch.tensor(plain_ids(loaded.config, sum(_TEXTS)))
    ids, embeds, marks, features, positions, segments = [], [], [], [], [], []
    base = 0
    for number, n in enumerate(_TEXTS):
        text, words = words[:n], words[n:]
        parts = [(text, loaded.embed(text), torch.arange(n).expand(loaded.mrope, -1), n, None)]
        if number < len(chunks):
            one = chunks[number]
            assert one.embeds is not None
            parts.append(
                (one.token_ids, one.embeds.to(parts[0][1]), one.positions, one.rotary_length, one.deepstack)
            )
        for is_chunk, (tokens, values, local, length, deep) in enumerate(parts):
            start = sum(map(len, ids))
            segments.append((start, start + len(tokens), bool(is_chunk)))
            ids.append(tokens)
            embeds.append(values)
            positions.append(local + base)
            marks.append(torch.full((len(tokens),), deep is not None, device=values.device))
            features += [] if deep is None else [deep.to(values)]
            base += length
    deepstack = (torch.cat(marks), torch.cat(features, 1)) if features else None
    return RowInputs(torch.cat(ids), torch.cat(embeds), deepstack), torch.cat(positions, 1), tuple(segments)


def _stock(loaded: LoadedModel, ids: torch.Tensor, images: list[Image.Image]) -> torch.Tensor:
    made = dict(process_images(loaded.processor, images)[0])
    extra = {k: v.to(loaded.device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    if isinstance(extra.get("pixel_values"), torch.Tensor):
        extra["pixel_values"] = extra["pixel_values"].to(loaded.dtype)
    name = types_name(loaded.model)
    if name is not None and (loaded.mrope == 3 or loaded.scope is not None):
        seen = cast(torch.Tensor, ids == loaded.image_token_id)
        extra[name] = token_types(loaded.scope, seen)[None].to(loaded.device)
    with stock_attention(loaded):
        return loaded.model(input_ids=ids[None].to(loaded.device), **extra, use_cache=False).logits[0].float()
