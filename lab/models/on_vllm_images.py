"""The image part of the check of a family inside vLLM: a tiny processor for its checkpoint, and links of a prompt with
two images against the oracle.

No family is treated specially but for the entries of the tables below: the processor's class is called with those of
its arguments that are known here, by name, and the tokenizer gives the family's image tokens the ids in its
configuration.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from mpic.engine.base import Engine
from mpic.errors import ModelRefused
from mpic.model.loaded import LoadedModel
from mpic_lab.bench.workload import image_chunk
from mpic_lab.models.check import around, over_policies, types_of
from mpic_lab.models.images import processor_of
from mpic_lab.models.instances import one_line
from mpic_lab.oracle import StockOracle

_WHOLE = {"rope_parameters": {"partial_rotary_factor": 1.0}}
_TEXT_SETTINGS: dict[str, dict[str, Any]] = {
    "glm4v": _WHOLE,  # transformers' default; vLLM's default is a half
    "glm4v_moe": _WHOLE,
    "glm_ocr": _WHOLE,
    "qwen3_vl_moe": {"norm_topk_prob": True, "rope_parameters": {"mrope_interleaved": True}},
    "mistral3": {"sliding_window": None},
}
"""By family, settings that transformers' default configuration lacks, so that vLLM has a default of its own."""
TRANSPOSED = ("qwen3_vl_moe",)
"""Families whose weights of experts are published transposed; transformers reads these, but does not write them so."""
_IMAGE_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral3": {"size": {"longest_edge": 32}},  # the form that vLLM reads
    "cohere2_vision": {"patch_size": 2},  # tokens along a side of a tile, which only the processor needs
}
"""By family, settings of the image processor that the first ones which the model takes lack."""
_FIELDS = {
    "image": "<image>",
    "video": "<|video|>",
    "audio": "<|audio|>",
    "image_start": "<|begin_of_image|>",
    "image_end": "<|end_of_image|>",
    "video_start": "<|begin_of_video|>",
    "video_end": "<|end_of_video|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "boi": "<|boi|>",
    "eoi": "<|eoi|>",
    "boa": "<|boa|>",
    "eoa": "<|eoa|>",
}
"""The tokens whose ids configurations have, and their words: those that processors ask for without the tokenizer."""
_FURTHER = {
    "video_token": "<|video|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "boi_token": "<|boi|>",
    "eoi_token": "<|eoi|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
"""Tokens of processors whose ids no configuration has; they are the last ones of the vocabulary."""


NOT_LINKED = ("more than one token repeated", "At most 0 image(s)")
"""In the messages with which images are refused when they are sent: images with other tokens between theirs, and all
images of a model that vLLM has for videos only."""


class Images(NamedTuple):
    """A family's images.

    Args:
        processor: of the checkpoint.
        loaded: a copy of the model, as the native engine has it.
        images: two, of different sizes.
    """

    processor: Any
    loaded: LoadedModel
    images: list[Image.Image]


class ProcessorError(Exception):
    """A processor or its images could not be made; the message says why."""


def complete(family: str, config: Any) -> None:
    """Set in a tiny instance's configuration what vLLM needs there."""
    text = config.get_text_config()
    for name, value in _TEXT_SETTINGS.get(family, {}).items():
        old = getattr(text, name, None)
        setattr(text, name, {**old, **value} if isinstance(value, dict) and old else value)


def images_of(family: str, model: nn.Module, vocabulary: int) -> Images:
    """Return a processor, a tokenizer in it, and images for a tiny instance.

    Args:
        vocabulary: tokens of the tokenizer.

    Raises:
        ProcessorError: there is none.
    """
    import transformers

    try:
        loaded = LoadedModel(copy.deepcopy(model), None, family)
        found, images = processor_of(family, loaded)
    except ModelRefused as error:
        raise ProcessorError(f"there is no oracle for its images: {error.message}") from error
    try:
        image_processor = found.image_processor
        if family in _IMAGE_SETTINGS:
            settings = {**image_processor.to_dict(), **_IMAGE_SETTINGS[family]}
            image_processor = type(image_processor)(**settings)
        loaded.processor.image_processor = image_processor
        tokens = len(loaded.image_inputs(images[0]))
        tokenizer = _tokenizer(model.config, vocabulary)
        given = _arguments(family, model.config, image_processor, tokenizer, tokens)
        if family not in PROCESSOR_MAPPING_NAMES:
            raise ValueError("transformers has none for this family")
        cls = getattr(transformers, PROCESSOR_MAPPING_NAMES[family])
        taken = inspect.signature(cls.__init__).parameters
        processor = cls(**{name: value for name, value in given.items() if name in taken})
    except Exception as error:
        raise ProcessorError(f"its processor could not be made: {one_line(error)}") from error
    return Images(processor, loaded, images)


def compare_images(engine: Engine, model: nn.Module, given: Images) -> tuple[float, float]:
    """Compare a served model with the oracle as ``over_policies`` does, for a prompt with two images as chunks."""
    loaded = given.loaded
    prompt = around(loaded.config, [image_chunk(image, "local") for image in given.images])
    inputs = [loaded.image_inputs(image) for image in given.images]
    oracle = StockOracle(copy.deepcopy(model), loaded.mrope, types_of(loaded), loaded.stand_ins)
    return over_policies(engine, oracle, prompt, inputs)


def _arguments(
    family: str, config: Any, image_processor: Any, tokenizer: PreTrainedTokenizerFast, tokens: int
) -> dict[str, Any]:
    """Return the arguments of processors, by name, for images of ``tokens`` tokens."""
    vision = config.vision_config
    side, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", 8)
    patches = (side // patch) ** 2 if isinstance(side, int) else None
    merge = getattr(vision, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", 1)
    strategy = getattr(config, "vision_feature_select_strategy", None)
    largest = getattr(image_processor, "max_image_size", None)
    given = {
        "image_processor": image_processor,
        "tokenizer": tokenizer,
        "feature_extractor": _made(FEATURE_EXTRACTOR_MAPPING_NAMES.get(family)),
        "video_processor": _made(VIDEO_PROCESSOR_MAPPING_NAMES.get(family), patch),
        "image_seq_length": tokens,
        "image_seq_len": tokens,
        "size_conversion": {largest: tokens} if isinstance(largest, int) else None,
        "patch_size": patch,
        "spatial_merge_size": merge,
        "num_image_tokens": patches,
        "num_query_tokens": getattr(config, "num_query_tokens", None),
        "num_additional_image_tokens": int("clip" in vision.model_type),  # its class token
        "vision_feature_select_strategy": strategy,
        "image_token": getattr(tokenizer, "image_token", None),
        "chat_template": tokenizer.chat_template,
    }
    return {name: value for name, value in given.items() if value is not None}


def _made(name: Any, patch: int | None = None) -> Any:
    """Return an instance of a class of transformers, which auto classes have one or several names of; None without a
    name."""
    import transformers

    names = list(name.values()) if isinstance(name, dict) else [name]
    if not any(names):
        return None
    cls = getattr(transformers, next(filter(None, names)))
    return cls(**({"patch_size": patch} if patch is not None and hasattr(cls, "patch_size") else {}))


def _tokenizer(config: Any, size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one word a token, with the words for images at the ids that a configuration has for them,
    and a template that shows an image as its token."""
    words = [f"<{i}>" for i in range(size)]
    special: dict[str, str] = {}
    for field, word in _FIELDS.items():
        ids = (getattr(config, f"{field}_token_{ending}", None) for ending in ("id", "index"))
        token = next((i for i in ids if isinstance(i, int) and 3 < i < size), None)
        if token is None:
            continue
        if words[token] == f"<{token}>":  # of two fields with one id, the first one names it
            words[token] = word
        special[f"{field}_token"] = words[token]
    for number, (field, word) in enumerate(_FURTHER.items()):
        if word not in words:
            words[size - 1 - number] = word
        special.setdefault(field, word)
    if "image_token" in special:
        special["context_image_token"] = special["image_token"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<3>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    added = [AddedToken(word, special=True, normalized=False) for word in dict.fromkeys(special.values())]
    tokenizer.add_special_tokens(added)
    shown = special.get("image_token", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<0>",
        bos_token="<1>",
        eos_token="<2>",
        unk_token="<3>",
        extra_special_tokens=special,
        chat_template="{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}" + shown + "{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}",
    )
