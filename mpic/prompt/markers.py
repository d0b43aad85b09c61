"""The text that a processor puts around the tokens of an image, in addition to the text of the chat template.

Some templates print all of it (Qwen-VL's vision start and end). Others print one token for an image, and the processor
replaces it: by markers and the image's tokens (Gemma 3, InternVL, SmolVLM). The markers are the request's own text.
"""

from __future__ import annotations

from typing import Any

from PIL import Image

from mpic.errors import ModelRefused

_SIZE = (64, 64)


def image_markers(processor: Any) -> tuple[str, str]:
    """Returns the text before and behind the tokens of an image, with which a processor replaces its image token; empty
    without a processor of images.

    Raises:
        ModelRefused: the replacement has no token of an image.
    """
    replace = getattr(processor, "replace_image_token", None)
    if replace is None or getattr(processor, "image_processor", None) is None:
        return "", ""
    inputs = processor.image_processor(images=[Image.new("RGB", _SIZE)], return_tensors="pt")
    text = replace(inputs, image_idx=0)
    [token, *_] = processor.tokenizer.convert_ids_to_tokens(list(processor.image_token_ids))
    if token not in text:
        raise ModelRefused(f"{type(processor).__name__} replaces an image by {text[:80]!r}, without {token}")
    return text[: text.index(token)], text[text.rindex(token) + len(token) :]
