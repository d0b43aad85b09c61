"""Runs a model's image processor exactly as transformers does for a prompt.

A processor passes settings to its image processor that the image processor alone lacks: InternVL's cuts images into
tiles. Hence the engines call image processors through this module only.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from mpic.errors import ModelRefused

_OF_ARRAYS = ("return_tensors", "data_format")
"""Settings of the memory layout of pixels; models take one layout only."""


def process_images(processor: Any, images: Sequence[Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the tensors that a processor makes of images, and the text that it inserts for each image's token; no
    texts for a bare image processor.

    Args:
        images: images that each have a prompt of their own, or lists of images that share a prompt.

    Raises:
        ModelRefused: the processor does not tell the text.
    """
    whole = getattr(processor, "_process_images", None)
    if whole is None:
        return processor.image_processor(images=images, return_tensors="pt"), []
    try:
        return whole(images, **image_settings(processor))
    except NotImplementedError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name != "replace_image_token":
            raise
        raise ModelRefused(
            f"{type(processor).__name__} does not say what it puts into a prompt for an image"
        ) from error


def cut_at_tokens(text: str, token: str) -> tuple[str, str, str] | None:
    """Split the text that a processor inserts for an image into the part before the first ``token``, the part up to the
    end of the last ``token``, and the part after it. Return None if there is no such token."""
    first, last = text.find(token), text.rfind(token) + len(token)
    return None if first < 0 else (text[:first], text[first:last], text[last:])


def image_text(processor: Any, size: tuple[int, int]) -> tuple[str, str, str]:
    """Return the text that a processor puts into a prompt before the first token of an image of that width and height,
    between its tokens, and behind the last; nothing for a processor that has nothing but an image processor.

    Raises:
        ModelRefused: the processor does not tell the text, or there is no token of an image in it.
    """
    _, texts = process_images(processor, [Image.new("RGB", size)])
    if not texts:
        return "", "", ""
    [token, *_] = processor.tokenizer.convert_ids_to_tokens(list(processor.image_token_ids))
    cut = cut_at_tokens(texts[0], token)
    if cut is None:
        raise ModelRefused(
            f"{type(processor).__name__} replaces an image by {texts[0][:80]!r}, without {token}"
        )
    before, inner, after = cut
    return before, inner.replace(token, ""), after


def image_settings(processor: Any) -> dict[str, Any]:
    """Return the arguments with which a processor calls its image processor: defaults of the processor's class, which
    override the image processor's own settings, and the arguments that its tokenizer was made with."""
    merge = getattr(processor, "_merge_kwargs", None)
    if merge is None:
        return {"return_tensors": "pt"}
    made_with = getattr(getattr(processor, "tokenizer", None), "init_kwargs", {})
    kinds = merge(processor.valid_processor_kwargs, tokenizer_init_kwargs=made_with, return_tensors="pt")
    return dict(kinds["images_kwargs"])


def changed_settings(processor: Any) -> dict[str, Any]:
    """Return the ``image_settings`` that differ in effect from the image processor's own settings; most processors have
    none. They are part of a chunk's identity."""
    settings, own = image_settings(processor), processor.image_processor
    if not settings.get("do_pan_and_scan"):  # Gemma 3 has sizes of crops that it does not make
        settings = {key: value for key, value in settings.items() if not key.startswith("pan_and_scan_")}
    taken = getattr(getattr(own, "valid_kwargs", None), "__annotations__", settings)
    return {
        key: value
        for key, value in sorted(settings.items())
        if key in taken and key not in _OF_ARRAYS and (value or None) != (getattr(own, key, None) or None)
    }
