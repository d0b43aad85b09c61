"""Compresses chunks that have just been compiled (``mpic.press``), and refuses models whose chunks cannot be
compressed."""

from __future__ import annotations

from functools import partial

import torch

from mpic.engine.native.batch import CompileJob
from mpic.errors import UnsupportedParameter
from mpic.kernels.attention import rotate
from mpic.kv.device import DeviceCache
from mpic.model.hooks import Observed
from mpic.model.loaded import LoadedModel
from mpic.press import LayerKV, Press, parse_press


def refusal(model: LoadedModel, press: Press | type[Press]) -> str | None:
    """Returns the reason why a press cannot compress chunks of a model, or None if it can."""
    if any(pattern.window is not None for pattern in model.patterns):
        return "some of its layers see a window, and a slot no longer says where its token stands"
    if model.scope is not None:
        return "some of its tokens attend to each other in both directions, removed ones among them"
    if model.latents:
        return "its layers keep latents, which all heads share"
    if press.needs_positions and model.mrope > 1:
        return "its positions have several axes, so the rotation of a key cannot be taken off"
    return None


def check_press(model: LoadedModel, name: str) -> None:
    """Refuses a press on a model whose chunks it cannot compress.

    Raises:
        UnsupportedParameter: says why.
    """
    press = parse_press(name)
    reason = None if press is None else refusal(model, press)
    if reason is not None:
        raise UnsupportedParameter(
            f"press {press} does not run on model {model.info.name}: {reason}", param="mpic.press"
        )


class Presser:
    """Presses chunks in place. All methods run on the engine's thread.

    Args:
        trailer: number of tokens that the model's adapter puts after a chunk (0 without one).
    """

    def __init__(self, model: LoadedModel, device: DeviceCache, trailer: int = 0) -> None:
        self._model, self._device, self._trailer = model, device, trailer

    def observe(self, job: CompileJob) -> None:
        """Prepares a job that is about to run to keep the queries that its chunk's press will look at."""
        resident = job.resident
        press = parse_press(resident.key.recipe.press)
        if press is None or not resident.is_pressed:
            return
        trailer = self._trailer if resident.key.recipe.packet else 0
        count = press.observed(len(resident.inputs), trailer)
        if count:
            job.observed = Observed(count)

    @torch.inference_mode()
    def press(self, job: CompileJob) -> None:
        """Compresses a chunk whose last row has run to the tokens that its press keeps, and frees the pages after
        them."""
        resident, pool = job.resident, self._device.pool
        press = parse_press(resident.key.recipe.press)
        if press is None or not resident.is_pressed:
            return
        compiled = pool.view(resident.extent)[:, :, :, resident.first :]
        kept = compiled.new_empty((*compiled.shape[:3], resident.slots, compiled.shape[4]))
        for layer in range(len(compiled)):
            index = press.kept(self._layer(job, layer, compiled[layer]))
            rest = index[:1].expand(compiled.shape[2] - len(index), -1)  # heads that the layer lacks
            index = torch.cat([index, rest])[None, :, :, None].expand(kept.shape[1:])
            torch.gather(compiled[layer], 2, index, out=kept[layer])
        self._device.shape(resident, pressed=True)
        pool.view(resident.extent)[:, :, :, resident.first :] = kept
        pool.trim(resident.extent)

    def _layer(self, job: CompileJob, layer: int, compiled: torch.Tensor) -> LayerKV:
        """Returns a layer as the press sees it, from ``compiled [2, kv_heads, n, head_dim]``, with the layer's own
        heads."""
        kind = self._model.kinds[self._model.kind_of[layer]]
        keys, values = compiled[:, : kind.kv_heads, :, : kind.dim].float()
        queries, scale = keys.new_empty((kind.heads, 0, kind.dim)), 1.0
        if job.observed is not None:
            queries = torch.cat(job.observed.queries[layer], 1).float()
            scale = job.observed.scales[layer]
        positions = job.positions[0, job.resident.first :].tolist()
        return LayerKV(layer, keys, values, partial(self._unrotated, keys, layer, positions), queries, scale)

    def _unrotated(self, keys: torch.Tensor, layer: int, positions: list[int]) -> torch.Tensor:
        rotation = self._model.kinds[self._model.kind_of[layer]].rotary.rotations(positions)
        return keys if rotation is None else rotate(keys, rotation)
