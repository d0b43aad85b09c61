"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in which the latent of each token is kept.

Keys and values of all heads are linear functions of one latent a token, but for the last dimensions of the keys, which
turn with positions and are the same for all heads. The expansion is absorbed into queries and outputs (there, end of
section 2.1.2): a key ``[U c, r]`` gives the query ``[p, q]`` the score ``p . U c + q . r = (U^T p) . c + q . r``, and
values ``V c`` of weights ``w`` sum to ``V (sum of w c)``. So a layer attends with one key head ``[c, r]``, whose values
are the same vectors. Where all layers do so they are kept once: a small part of the bytes, in pool, files and tiers
alike, and only ``r`` turns in a link.

Such layers are not found from configurations: a projection in the layer must explain its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from mpic.kv.chunk import LATENT, LATENT_ONCE
from mpic.model.own_modules import KernelLinear
from mpic.model.rotary import Rotary
from mpic.model.trace import ForwardTrace, LayerFacts, LayerKind, LayerTrace, alike, limit_of

ATTRIBUTE = "_mpic_latent"
"""The attribute of an attention module that holds its ``LatentLayer``."""
_MOST_ON_CUDA = 256
"""The largest heads that torch's flash attention takes on CUDA; there a larger latent is kept expanded."""
_latents: ContextVar[torch.Tensor | None] = ContextVar("mpic_latents", default=None)


class LatentLayer(NamedTuple):
    """The expansion of one layer.

    Args:
        keys: ``[heads, k, rank]``, from a latent to the part of a key that does not turn.
        values: ``[heads, v, rank]``.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def rank(self) -> int:
        return self.keys.shape[2]

    def absorb(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries ``[1, heads, T, rank + r]`` and keys ``[1, 1, T, rank + r]`` for ``query, key [1, heads, T,
        k + r]`` of the rows whose latents the layer has just expanded."""
        latents = _latents.get()
        assert latents is not None
        still = self.keys.shape[1]
        absorbed = torch.matmul(query[..., :still], self.keys)
        latents = latents.reshape(1, 1, -1, self.rank)
        return (
            torch.cat([absorbed, query[..., still:]], -1),
            torch.cat([latents, key[:, :1, :, still:]], -1),
        )

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """Return ``[1, T, heads, v]`` for attended latents ``[1, T, heads, rank + r]``."""
        return torch.einsum("bthr,hvr->bthv", out[..., : self.rank], self.values.to(out.dtype))

    def distances(self, difference: torch.Tensor) -> torch.Tensor:
        """Return ``[n]``, the squared lengths over all heads of keys and values, for ``difference [2, 1, n, rank +
        r]`` fp32 of what is attended to."""
        key, value = difference[:, 0, :, : self.rank]
        turning = difference[0, 0, :, self.rank :]
        found = len(self.keys) * turning.square().sum(1)
        for latent, expansion in ((key, self.keys), (value, self.values)):
            found += torch.einsum("nr,hkr->hnk", latent, expansion.float()).square().sum((0, 2))
        return found


class Kept(NamedTuple):
    """Kinds and facts of layers as they are kept, and the expansions of those that keep latents, by layer."""

    kinds: list[LayerKind]
    layers: list[LayerFacts]
    latents: dict[int, LatentLayer]


def keep_latents(
    text_model: nn.Module,
    kinds: Sequence[LayerKind],
    layers: Sequence[LayerFacts],
    run: Callable[[ForwardTrace], Any],
) -> Kept:
    """Make every layer keep latents that has smaller ones than its keys and values.

    Args:
        run: runs the model under a trace.
    """
    wanted = [isinstance(kind.rotary, Rotary) and kind.rotary.start > 0 for kind in kinds]
    if not any(wanted):
        return Kept(list(kinds), list(layers), {})
    inputs: dict[nn.Module, torch.Tensor] = {}
    watch = ForwardTrace()
    with ExitStack() as stack:
        for module in text_model.modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m, args[0]))
                stack.callback(hook.remove)
        run(watch)
    rotaries: dict[tuple[int, int], Rotary] = {}
    latents: dict[int, LatentLayer] = {}
    of_layers = []
    for number, facts in enumerate(layers):
        kind, seen = kinds[facts.kind], watch.layers[number]
        found = _projection(seen, kind, inputs) if wanted[facts.kind] else None
        if found is not None:
            projection, layer = found
            latents[number] = layer
            projection.register_forward_pre_hook(_note)
            setattr(seen.module, ATTRIBUTE, layer)
            kind = _as_kept(kind, seen, layer, rotaries)
        of_layers.append(kind)
    made = list(dict.fromkeys(of_layers))
    numbered = [facts._replace(kind=made.index(kind)) for facts, kind in zip(layers, of_layers, strict=True)]
    return Kept(made, numbered, latents)


def layout_of(latents: dict[int, LatentLayer], layers: int) -> str:
    """Return the ``Recipe.layout`` of chunks of a model with so many layers."""
    if not latents:
        return ""
    return LATENT_ONCE if len(latents) == layers else LATENT


def _note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    _latents.set(args[0])


def _as_kept(
    kind: LayerKind, seen: LayerTrace, layer: LatentLayer, rotaries: dict[tuple[int, int], Rotary]
) -> LayerKind:
    rotary = kind.rotary
    assert isinstance(rotary, Rotary)
    name = (id(rotary), layer.rank)
    if name not in rotaries:
        rotaries[name] = Rotary(rotary.frequencies, rotary.interleaved, layer.rank, seen.key.device)
    size = layer.rank + seen.key.shape[-1] - rotary.start
    return replace(kind, rotary=rotaries[name], kv_heads=1, dim=size)


def _projection(
    seen: LayerTrace, kind: LayerKind, inputs: dict[nn.Module, torch.Tensor]
) -> tuple[nn.Linear, LatentLayer] | None:
    """Return the projection from which a layer computes its keys and values, if it has one and latents are smaller."""
    heads, rows, size = seen.key.shape
    assert isinstance(kind.rotary, Rotary)
    still, limit = kind.rotary.start, limit_of(seen.module)
    if not alike(seen.key[:1, :, still:].expand(heads, -1, -1), seen.key[:, :, still:], limit):
        return None
    for module in seen.module.modules():
        if type(module) not in (nn.Linear, KernelLinear) or module.bias is not None or module not in inputs:
            continue
        if type(module.weight) is not nn.Parameter:  # quantised weights: the layer stays expanded
            continue
        kept, latents = module.in_features + size - still, inputs[module].reshape(-1, module.in_features)
        if module.out_features != heads * (still + seen.value.shape[-1]) or len(latents) != rows:
            continue
        if kept >= heads * kind.dim or (seen.key.device.type == "cuda" and kept > _MOST_ON_CUDA):
            continue
        weight = module.weight.detach().view(heads, -1, module.in_features)
        layer = LatentLayer(weight[:, :still], weight[:, still:])
        keys, values = (torch.einsum("tr,hkr->htk", latents.float(), w.float()) for w in layer)
        if alike(seen.key[:, :, :still], keys, limit) and alike(seen.value, values, limit):
            return module, layer
    return None
