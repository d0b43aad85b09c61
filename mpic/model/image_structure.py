"""Asks a model's processor, when the model is loaded, which tokens it puts into a prompt for an image.

A chunk holds the tokens from the first of its image to the last, and the prompt template puts the same text around
every image. A processor may do otherwise for images of some sizes only, such as those that it cuts into tiles, hence it
is asked about several. It runs without the vision encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from PIL import Image

from mpic.errors import ModelRefused
from mpic.imaging.processing import process_images
from mpic.kv.chunk import ChunkInputs
from mpic.model.loaded import LoadedModel
from mpic.model.vision import image_tokens

_SIZES = ((64, 64), (1280, 960), (1500, 300), (300, 1500))
"""Width and height of the images: the first one is what ``mpic.prompt.markers`` asks about, and the others are cut into
tiles by every processor that cuts any."""
_SMALL = ((96, 48), (48, 96))
"""Sizes of the images that get the fewest tiles beyond one where proportions decide, as with InternVL."""
_MEDIUM = (600, 300)
"""The size of the image that does where sizes decide, as with Cohere2Vision."""


def gradient(size: tuple[int, int]) -> Image.Image:
    """Return an RGB image of this width and height, with a gradient, so that its pixels differ."""
    return Image.linear_gradient("L").resize(size).convert("RGB")


def sizes_to_encode(loaded: LoadedModel) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of two images for the self-test, which encodes them: small ones, but one that is cut where the
    processor puts other tokens between tiles and does not cut the small ones."""
    first, second = _SMALL
    if _is_whole(loaded) and not _has_breaks(loaded, second):
        cut = [size for size in (_MEDIUM, _SIZES[1]) if _has_breaks(loaded, size)]
        second = cut[0] if cut else second
    return first, second


def _has_breaks(loaded: LoadedModel, size: tuple[int, int]) -> bool:
    """Return whether there are other tokens between those of an image."""
    _, inner, _ = _cut(loaded, _prompt_of(loaded, [gradient(size)]))
    return any(one != loaded.image_token_id for one in inner)


def refuse_structure(loaded: LoadedModel) -> None:
    """Raise ModelRefused if a chunk would not have the tokens that the processor puts between those of an image, or if
    the text around them depends on the image."""
    if not _is_whole(loaded):
        return
    family, around = loaded.config.model_type, None
    for size in _SIZES:
        image = gradient(size)
        before, inner, after = _cut(loaded, _prompt_of(loaded, [image]))
        texts = process_images(loaded.processor, [image])[1]
        held = image_tokens(loaded, texts[0]) if texts else [loaded.image_token_id] * len(inner)
        if held != inner:
            raise ModelRefused(
                f"{family}: its processor puts other tokens between those of an image of {size[0]} x {size[1]} pixels "
                "(row breaks or tile markers) than a chunk would hold"
            )
        if around is not None and around != (before, after):
            raise ModelRefused(
                f"{family}: what its processor puts around an image depends on the image's size: an image of "
                f"{size[0]} x {size[1]} pixels does not stand between the same tokens as a small one"
            )
        around = before, after


def refuse_other_tokens(
    loaded: LoadedModel, images: Sequence[Image.Image], chunks: Sequence[ChunkInputs]
) -> None:
    """Raise ModelRefused if chunks of images have other tokens than the processor gives them in a prompt."""
    if not _is_whole(loaded):
        return
    for image, chunk in zip(images, chunks, strict=True):
        _, inner, _ = _cut(loaded, _prompt_of(loaded, [image]))
        if inner != chunk.token_ids.tolist():
            raise ModelRefused(
                f"{loaded.config.model_type}: a chunk of an image of {image.width} x {image.height} pixels has "
                f"{len(chunk)} tokens, and its processor gives the image {len(inner)} in a prompt"
            )


def layout_note(loaded: LoadedModel) -> str | None:
    """Return what to say of a model whose processor gives images that share a prompt other tokens than each has alone,
    as LLaVA-OneVision's does; None for all others."""
    if not _is_whole(loaded):
        return None
    images = [gradient(_SIZES[0])] * 2
    alone = 2 * _count(loaded, _prompt_of(loaded, images[:1]))
    try:
        together = _count(loaded, _prompt_of(loaded, images, as_one=True))
    except (ValueError, TypeError, IndexError, AttributeError):
        return None  # a processor that takes no lists of lists has no second layout
    if together == alone:
        return None
    return (
        "an image has the tokens that it has alone in a prompt, also beside others: two of 64 x 64 pixels have "
        f"{alone}, and transformers gives two of one conversation {together}"
    )


def _is_whole(loaded: LoadedModel) -> bool:
    """Return whether there is a processor that makes whole prompts; benches have image processors alone."""
    token = getattr(loaded.processor, "image_token", None)
    return loaded.tokenizer is not None and callable(loaded.processor) and isinstance(token, str)


def _prompt_of(loaded: LoadedModel, images: list[Image.Image], as_one: bool = False) -> list[int]:
    """Return the token ids that the processor makes of a prompt of images.

    Args:
        as_one: pass the images as those of one conversation, as chat templates of transformers do.
    """
    processor: Any = loaded.processor
    text = [processor.image_token * len(images)]
    made = processor(text=text, images=[images] if as_one else images, return_tensors="pt")
    return list(made["input_ids"][0].tolist())


def _count(loaded: LoadedModel, ids: list[int]) -> int:
    return ids.count(cast(int, loaded.image_token_id))


def _cut(loaded: LoadedModel, ids: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return a prompt of one image in three: before its first token, to its last, and behind.

    Raises:
        ModelRefused: it has no token of an image.
    """
    places = [i for i, one in enumerate(ids) if one == loaded.image_token_id]
    if not places:
        raise ModelRefused(
            f"{loaded.config.model_type}: its processor puts no tokens into a prompt for an image"
        )
    first, last = places[0], places[-1] + 1
    return ids[:first], ids[first:last], ids[last:]
