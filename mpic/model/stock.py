"""A forward of the model as transformers computes it, without our attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpic.model.loaded import LoadedModel


def stock_logits(
    loaded: LoadedModel,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    cache: Any,
    keep: int,
    deepstack: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Run T rows as transformers does, with gradients where the caller wants them (training of packets). The
    caller sets an attention implementation of transformers' own.

    Args:
        embeds: ``[T, hidden]``.
        positions: ``[1 or 3, T]``.
        mask: ``[T, T]`` bool, true where a row sees another; None is causal.
        cache: transformers' own, which is read and extended, or None.
        keep: number of last rows whose logits are needed.
        deepstack: see ``RowInputs``.

    Returns:
        ``[keep, vocabulary]``.
    """
    if deepstack is not None:
        marks, features = deepstack
        loaded.extra_inputs = {"visual_pos_masks": marks[None], "deepstack_visual_embeds": list(features)}
    try:
        out = loaded.model(
            inputs_embeds=embeds[None],
            position_ids=positions[:1] if loaded.mrope == 1 else positions[:, None],
            attention_mask=None if mask is None else mask[None, None],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
    finally:
        loaded.extra_inputs = {}
    return out.logits[0]
