"""Collects the facts about a model's layers that are found out at load time by running it (``trace.py``,
``bidirectional.py``, ``latent.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.kernels.patterns import Blocks
from mpic.model.bidirectional import Mask, Scope, find_blocks, types_name
from mpic.model.hooks import running
from mpic.model.latent import LatentLayer, keep_latents
from mpic.model.structure import RowInputs, plain_ids, stand_ins_of
from mpic.model.trace import ROWS, ForwardTrace, LayerFacts, LayerKind, seen_by, trace, with_blocks


class Runnable(Protocol):
    """The interface of a model that finding its facts needs; see ``LoadedModel``."""

    model: nn.Module
    text_model: nn.Module
    config: Any
    text_config: Any
    device: torch.device
    dtype: torch.dtype
    mrope: int
    image_token_id: int | None

    def rows(self, token_ids: torch.Tensor) -> RowInputs: ...

    def call(
        self,
        inputs: RowInputs,
        positions: torch.Tensor,
        step: ForwardTrace,
        wanted: torch.Tensor,
        given: dict[str, torch.Tensor] | None = None,
    ) -> Any: ...


class ModelFacts(NamedTuple):
    """The kinds of a model's layers, the facts of each layer, the layers that keep latents in place of keys and values,
    the tokens that attend to each other in both directions, and the tokens that layers look up in place of others."""

    kinds: list[LayerKind]
    layers: list[LayerFacts]
    latents: dict[int, LatentLayer]
    scope: Scope | None
    stand_ins: dict[int, int]


@torch.inference_mode()
def find_facts(model: Runnable) -> ModelFacts:
    """Return the facts of a model whose layers attend through ``hooks.TRACED``.

    Raises:
        ModelRefused: the model cannot be linked; the message names the family and says why.
    """
    family = model.config.model_type
    tokens = plain_ids(model.config, ROWS + 1)

    def run(ids: torch.Tensor, start: int, watch: ForwardTrace) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids), device=model.device).expand(model.mrope, -1)
        wanted = torch.arange(len(ids), device=model.device)
        return model.call(model.rows(ids), positions, watch, wanted).logits[0].float()

    try:
        kinds, layers = trace(model.text_model, run, tokens, model.text_config.num_hidden_layers, model.dtype)
        scope, blocks = _blocks(model, [kinds[facts.kind].window for facts in layers])
        kinds, layers = with_blocks(kinds, layers, blocks)
        with running(ForwardTrace()):
            stand_ins = stand_ins_of(model.model, model.text_model, model.image_token_id)
        kept = keep_latents(
            model.text_model, kinds, layers, lambda watch: run(torch.tensor(tokens), 0, watch)
        )
    except ModelRefused as refusal:
        raise ModelRefused(f"{family}: {refusal.message}") from refusal
    except Exception as error:
        raise ModelRefused(
            f"{family}: it cannot be called with embeddings and positions: {type(error).__name__}: {error}"
        ) from error
    return ModelFacts(*kept, scope, stand_ins)


def _blocks(model: Runnable, windows: Sequence) -> tuple[Scope | None, list[Blocks | None]]:
    """Return the tokens that attend to each other in both directions, and the way in which the layers do."""
    name = types_name(model.model)
    if name is None:
        return None, [None] * len(windows)
    rows = model.rows(torch.tensor(plain_ids(model.config, ROWS)))
    positions = torch.arange(ROWS, device=model.device).expand(model.mrope, -1)
    none = torch.zeros(0, dtype=torch.int64, device=model.device)

    def masks(types: torch.Tensor) -> list[Mask]:
        watch = ForwardTrace(read=seen_by)
        model.call(rows, positions, watch, none, {name: types[None].to(model.device)})
        return [watch.layers[number].window for number in sorted(watch.layers)]

    return find_blocks(windows, masks)
