"""Images for tiny instances: the family's own image processor with small sizes, and the stock model's answer to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from mpic.errors import ModelRefused
from mpic_lab.models.instances import GRID, one_line

_SQUARE = {"height": 32, "width": 32}
_TRIES: tuple[dict[str, Any], ...] = (
    {
        "size": _SQUARE,
        "high_res_size": _SQUARE,
        "crop_size": _SQUARE,
        "patch_size": 8,
        "max_soft_tokens": 70,
        "max_image_size": 490,
    },
    {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, "image_grid_pinpoints": GRID},
    {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 8},
    {"min_pixels": 256, "max_pixels": 4096, "patch_size": 8},
    {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}, "patch_size": 8},
    {"encoder_patch_size": 8, "do_image_splitting": False, "min_image_tokens": 4, "max_image_tokens": 16},
    {},
)
"""Arguments of an image processor; the first set that the model takes is used. If none is taken, the error of the first
set is reported, because the later sets are for other processors."""
_OF_OTHERS = ("Qwen2VLImageProcessor", "Glm46VImageProcessor", "Glm4vImageProcessor", "CLIPImageProcessor")
"""Image processors for families that have none of their own; the stock model must take them."""


def processor_of(family: str, loaded: Any) -> tuple[Any, list[Image.Image]]:
    """Return a processor with which a loaded model takes images, and two images of different sizes.

    Raises:
        ModelRefused: there is no such processor; the message has the error of the last attempt.
    """
    import transformers

    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or ()
    names = [names] if isinstance(names, str) else names.values() if isinstance(names, dict) else names
    names = [*filter(None, names)] or _OF_OTHERS
    images, first = [_image(1, 40, 32), _image(2, 32, 48)], ""
    merged = {"patch_size": 8 * getattr(loaded.config, "spatial_merge_size", 1)}
    for name in names:
        cls = getattr(transformers, name, None)
        for options in _TRIES if cls is not None else ():
            if "patch_size" in options and not hasattr(cls, "merge_size"):
                options = {**options, **merged}  # the processor around it expects merged patches
            try:
                loaded.processor = SimpleNamespace(image_processor=cls(**options), tokenizer=None)
                for image in images:
                    loaded.image_inputs(image)
                return loaded.processor, images
            except Exception as error:
                first = first or one_line(error)
    raise ModelRefused(f"its images are not taken: {first or 'transformers has no image processor for it'}")


def _image(seed: int, width: int, height: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@torch.no_grad()
def stock_answer(
    model: nn.Module,
    processor: Any,
    ids: list[int],
    images: list[Image.Image],
    types: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the last logits of the untouched model, called as its users call it: token ids, pixel values, and the
    types of tokens."""
    model.set_attn_implementation("eager")
    extra = dict(processor.image_processor(images=images, return_tensors="pt"))
    return model(input_ids=torch.tensor([ids]), **extra, **types, use_cache=False).logits[0, -1]
