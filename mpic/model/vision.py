"""The inputs of an image or a clip: what a vision encoder and a processor make of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from PIL import Image
from torch import nn

from mpic import memory
from mpic.errors import UnsupportedModality
from mpic.imaging.clips import Clip, Sample
from mpic.imaging.processing import cut_at_tokens, process_images
from mpic.kv.chunk import ChunkInputs
from mpic.model.bidirectional import Scope
from mpic.model.clip_sampling import bytes_needed, metadata_of, sampler
from mpic.model.info import ModelInfo
from mpic.model.structure import inner_of


class VisionModel(Protocol):
    """The part of ``LoadedModel`` that vision needs."""

    model: nn.Module
    processor: Any
    tokenizer: Any
    config: Any
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    mrope: int
    context_length: int
    image_token_id: int | None
    has_vision: bool
    scope: Scope | None
    no_clips: str | None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor: ...


def image_inputs(model: VisionModel, image: Image.Image) -> ChunkInputs:
    """Return an image's own tokens (with what its processor puts between them, without what stands around them), their
    embeddings, DeepStack features and local rotary positions.

    Raises:
        UnsupportedModality: the model takes no images, or its processor gives this one other tokens than its encoder.
    """
    if not model.has_vision or model.processor is None or model.image_token_id is None:
        raise UnsupportedModality(f"model {model.info.name} does not take images")
    inner: Any = inner_of(model.model)
    made, texts = process_images(model.processor, [image])
    given = _given(model, inner.get_image_features, made)
    features, deep = _features(model, inner.get_image_features(**given))
    ids = torch.full((len(features),), model.image_token_id, dtype=torch.int64)
    if texts and model.tokenizer is not None:
        ids = torch.tensor(image_tokens(model, texts[0]))
    seen = ids == model.image_token_id
    _refuse_tokens(model, len(features), len(ids), int(seen.sum()))
    embeds, deepstack = _among_text(model, ids, seen, features, deep)
    positions, rotary_length = torch.arange(len(ids))[None], len(ids)
    if model.mrope == 3:
        grid, _ = inner.get_rope_index(
            ids[None].to(model.device),
            seen[None].to(model.device, torch.int32),
            image_grid_thw=given.get("image_grid_thw"),
        )
        positions = grid[:, 0].cpu()
        rotary_length = int(positions.max()) + 1
    return ChunkInputs(
        ids,
        positions.to(torch.int64).contiguous(),
        rotary_length,
        embeds.cpu(),
        None if deepstack is None else deepstack.cpu(),
    )


def image_tokens(model: VisionModel, text: str) -> list[int]:
    """Return the token ids, from the first of an image's to the last, in what a processor puts into a prompt for
    it."""
    token = model.tokenizer.convert_ids_to_tokens(model.image_token_id)
    cut = cut_at_tokens(text, token)
    if cut is None:
        raise UnsupportedModality(
            f"model {model.info.name}: its processor puts no {token} in place of an image"
        )
    inner = cut[1]
    between = inner.replace(token, "")
    if not between:  # by far the most; a tokenizer takes its time for thousands of tokens
        return [model.image_token_id] * (len(inner) // len(token))  # ty: ignore[invalid-explicit-return] (vision models have one)
    return list(model.tokenizer(inner, add_special_tokens=False)["input_ids"])


def _refuse_tokens(model: VisionModel, features: int, tokens: int, of_image: int) -> None:
    """Raise UnsupportedModality if a processor gives an image other tokens than the model can take."""
    if of_image != features:
        raise UnsupportedModality(
            f"model {model.info.name}: its processor gives the image {of_image} tokens, its encoder {features}"
        )
    if model.scope is not None and tokens != of_image:
        raise UnsupportedModality(
            f"model {model.info.name}: its image's tokens attend to each other in both directions, and its processor "
            "puts other tokens between them"
        )


def _among_text(
    model: VisionModel,
    ids: torch.Tensor,
    seen: torch.Tensor,
    features: torch.Tensor,
    deep: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the embeddings of tokens, and DeepStack's for all of them: an encoder's for those that it has ``seen``,
    and the table's, and zeros, for the others."""
    if seen.all():
        return features, deep
    embeds = model.embed(ids).to(model.dtype)
    embeds[seen.to(embeds.device)] = features
    if deep is None:
        return embeds, None
    deepstack = deep.new_zeros(deep.shape[0], *embeds.shape)
    deepstack[:, seen.to(deep.device)] = deep
    return embeds, deepstack


def clip_sampler(model: VisionModel) -> Sample:
    """Return what chooses the frames of a clip that a model sees.

    Raises:
        UnsupportedModality: the model takes no clips.
    """
    if model.no_clips is not None:
        raise UnsupportedModality(model.no_clips)
    return sampler(model.processor.video_processor, model.context_length)


def clip_inputs(model: VisionModel, clip: Clip) -> ChunkInputs:
    """Return the tokens that the model's processor puts in place of a clip (of some families with timestamps and
    markers between those of its frames), their embeddings, DeepStack features and local rotary positions.

    Args:
        clip: the frames that the model's sampler has chosen.

    Raises:
        UnsupportedModality: the model takes no clips.
        OutOfMemory: there is not enough memory for the frames as the processor enlarges them.
    """
    if model.no_clips is not None:
        raise UnsupportedModality(model.no_clips)
    inner: Any = inner_of(model.model)
    with memory.set_aside(bytes_needed(model.processor.video_processor, clip), "encoding the clip"):
        made = processed(model.processor, [clip], [model.processor.video_token])
    ids, kinds = made["input_ids"][0], made["mm_token_type_ids"][0]
    given = _given(model, inner.get_video_features, made)
    features, deep = _features(model, inner.get_video_features(**given))
    embeds, deepstack = _among_text(model, ids, kinds == CLIP_TYPE, features, deep)
    positions = _positions_and_next(model, inner, ids, kinds, made)
    return ChunkInputs(
        ids.to(torch.int64),
        positions[:, :-1].contiguous(),
        int(positions[0, -1]),
        embeds.cpu(),
        None if deepstack is None else deepstack.cpu(),
    )


CLIP_TYPE = 2
"""The type that processors give to the tokens of a clip (``mm_token_type_ids``)."""


def processed(processor: Any, clips: list[Clip], text: list[str]) -> Mapping[str, Any]:
    """Return what a processor makes of clips whose frames are sampled already."""
    return processor(
        text=text,
        videos=[clip.frames for clip in clips],
        video_metadata=[metadata_of(clip.facts, clip.indices) for clip in clips],
        do_sample_frames=False,
        input_data_format="channels_last",
        add_special_tokens=False,
        return_tensors="pt",
    )


def _positions_and_next(
    model: VisionModel, inner: Any, ids: torch.Tensor, kinds: torch.Tensor, made: Mapping[str, Any]
) -> torch.Tensor:
    """Return ``[3, n + 1]`` rotary positions of a clip's tokens and, last, of the token of text that follows it.

    Only the model knows the last one: in transformers 5.19 the text behind a clip goes on where its height or width
    ends, however many positions its time takes.
    """
    taken = inspect.signature(inner.get_rope_index).parameters
    given = {k: v for k, v in made.items() if k in ("video_grid_thw", "second_per_grid_ts") and k in taken}
    after = torch.zeros(1, dtype=torch.int64)
    ids = torch.cat([ids.to(torch.int64), after])[None].to(model.device)
    kinds = torch.cat([kinds.to(torch.int64), after])[None].to(model.device)
    positions, _ = inner.get_rope_index(ids, kinds, **given)
    return positions[:, 0].cpu().to(torch.int64)


def _given(
    model: VisionModel, encode: Callable[..., Any], made: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return those of a processor's tensors that the vision encoder takes, where and as the model is."""
    taken = inspect.signature(encode).parameters
    return {
        k: v.to(model.device, model.dtype if v.is_floating_point() else None)
        for k, v in made.items()
        if k in taken and isinstance(v, torch.Tensor)
    }


def _features(model: VisionModel, outputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the features ``[n, hidden]`` of a vision encoder's tokens, and DeepStack's ``[layers, n, hidden]``."""
    if getattr(outputs, "pooler_output", None) is None:
        raise UnsupportedModality(f"model {model.info.name} gives no features for an image's tokens")
    embeds = torch.cat([part.flatten(0, -2) for part in outputs.pooler_output]).to(model.dtype)
    deepstack = None
    if deep := getattr(outputs, "deepstack_features", None):
        deepstack = torch.stack([torch.cat(list(f)) if isinstance(f, list | tuple) else f for f in deep])
        deepstack = deepstack.to(model.dtype)
    return embeds, deepstack
