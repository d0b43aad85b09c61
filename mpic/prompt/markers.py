"""The text that a processor puts around the tokens of an image, in addition to the text of the chat template.

Some templates print all of it (Qwen-VL's vision start and end). Others print one token for an image, and the processor
replaces it: by markers and the image's tokens (Gemma 3, InternVL, SmolVLM). The markers are the request's own text.
"""

from __future__ import annotations

from typing import Any

from mpic.imaging.processing import image_text

_SIZE = (64, 64)


def image_markers(processor: Any) -> tuple[str, str]:
    """Return the text before and behind the tokens of an image, with which a processor replaces its image token; empty
    without a processor of images.

    Raises:
        ModelRefused: there is no replacement, or it has no token of an image.
    """
    if getattr(processor, "image_processor", None) is None:
        return "", ""
    before, _, after = image_text(processor, _SIZE)
    return before, after
