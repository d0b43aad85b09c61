"""Finds the parts of a transformers model, and the inputs of its rows."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.kernels.upload import send


class RowInputs(NamedTuple):
    """The inputs of the first layer for T rows.

    Args:
        ids: ``[T]`` int64; the placeholder for tokens of an image.
        embeds: ``[T, hidden]``.
        deepstack: features that are added after the first layers ``(rows [T] bool, features [layers, rows.sum(),
            hidden])`` (Qwen3-VL), or None.
    """

    ids: torch.Tensor
    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, torch.Tensor] | None = None


OWN_EMBEDDINGS = "its layers look up embeddings of their own by token id, and trained tokens have no ids"
"""Why a model that ``has_layer_embeddings`` cannot have packets."""


def has_layer_embeddings(text_model: nn.Module) -> bool:
    """Return whether the layers look up embeddings of their own by token id (Gemma 3n and 4)."""
    sized = getattr(text_model.config, "hidden_size_per_layer_input", None)
    return bool(sized) and hasattr(text_model, "get_per_layer_inputs")


def per_layer_inputs(
    text_model: nn.Module, ids: torch.Tensor, stand_ins: Mapping[int, int] | None = None
) -> torch.Tensor | None:
    """Return the embeddings that a model with its own embeddings in every layer (Gemma 3n and 4) looks up for ``ids
    [T]`` in host memory, or None for other models. Without them such a model would search its whole table for each
    row's embedding.

    Args:
        stand_ins: the tokens that it looks up in place of others (``stand_ins_of``).
    """
    if not has_layer_embeddings(text_model):
        return None
    for token, other in (stand_ins or {}).items():
        ids = ids.where(ids != token, other)
    look_up: Any = text_model.get_per_layer_inputs
    device = next(text_model.parameters()).device
    return look_up(send(ids, device)[None], *[None] * (len(inspect.signature(look_up).parameters) - 1))


@torch.inference_mode()
def stand_ins_of(model: nn.Module, text_model: nn.Module, image_token_id: int | None) -> dict[int, int]:
    """Return the token that a model looks up in its layers' embeddings in place of an image's, which is mostly
    padding. It is found from the inputs of the text model when the whole model is called with an image's token.

    Raises:
        ModelRefused: it looks up something else.
    """
    if not has_layer_embeddings(text_model) or image_token_id is None:
        return {}
    given: list[torch.Tensor] = []
    hook = text_model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs["per_layer_inputs"]), with_kwargs=True
    )
    try:
        model(
            input_ids=torch.tensor([[image_token_id]], device=next(model.parameters()).device),
            use_cache=False,
        )
    finally:
        hook.remove()
    padding = getattr(text_model.config, "pad_token_id", None)
    for token in (image_token_id, padding, 0):
        if token is None:
            continue
        looked_up = per_layer_inputs(text_model, torch.tensor([token]))
        if looked_up is not None and torch.equal(given[0][0], looked_up[0]):
            return {image_token_id: token}
    raise ModelRefused("its layers have embeddings for the tokens of an image that no token of text has")


def _special_ids(config: Any) -> set[int]:
    """Return the tokens that a model's forward may look for: those that stand for images, video, audio, padding."""
    named = config.to_dict().items()
    return {v for k, v in named if isinstance(v, int) and k.endswith(("_token_id", "_token_index"))}


def plain_ids(config: Any, count: int) -> list[int]:
    """Return the ids of ``count`` tokens of text, ascending."""
    special = _special_ids(config)
    return list(itertools.islice((i for i in itertools.count(3) if i not in special), count))


def as_plain(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return ids in which tokens that stand for something else are replaced by a text token."""
    special = torch.tensor(sorted(_special_ids(config)), dtype=ids.dtype)
    return ids.where(~torch.isin(ids, special), plain_ids(config, 1)[0])


def inner_of(model: nn.Module) -> nn.Module:
    """Return the model below the output projection, which has different attribute names in different families."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, nn.Module):
        inner = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    return inner if isinstance(inner, nn.Module) else model


def text_model_of(model: nn.Module) -> nn.Module:
    """Return the decoder over text, which is the language model of a vision-language model."""
    inner = inner_of(model)
    for name in ("language_model", "text_model", "decoder"):
        part = getattr(inner, name, None)
        if isinstance(part, nn.Module):
            return inner_of(part) if part is not inner else part
    return inner


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the decoder over text. Raise ModelRefused if it has no layers."""
    text = text_model_of(model)
    if not hasattr(text, "layers"):
        raise ModelRefused(f"{type(model).__name__}: no decoder with layers")
    return text
