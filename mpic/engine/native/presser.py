"""Compresses chunks (``mpic.press``) that have just been compiled or read, and refuses models whose chunks cannot be
compressed."""

from __future__ import annotations

import torch

from mpic.engine.native.batch import CompileJob
from mpic.errors import UnsupportedParameter
from mpic.kernels.attention import rotate
from mpic.kv.device import DeviceCache, Resident
from mpic.model.hooks import Observed
from mpic.model.loaded import LoadedModel
from mpic.press import LayerKV, Press, parse_press


def refusal(model: LoadedModel, press: Press | type[Press]) -> str | None:
    """Return the reason why a press cannot compress chunks of a model, or None if it can."""
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
    """Refuse a press on a model whose chunks it cannot compress.

    Raises:
        UnsupportedParameter: says why.
    """
    press = parse_press(name)
    reason = None if press is None else refusal(model, press)
    if reason is not None:
        raise UnsupportedParameter(
            f"press {press} does not run on model {model.info.name}: {reason}", param="mpic.press"
        )


def compress(
    model: LoadedModel,
    press: Press,
    compiled: torch.Tensor,
    positions: list[int],
    observed: Observed | None = None,
) -> torch.Tensor:
    """Return the KV that a press leaves, ``[layers, 2, kv_heads, slots, head_dim]``.

    Args:
        compiled: ``[layers, 2, kv_heads, n, head_dim]``, keys rotated at ``positions``.
        positions: of the n tokens, on the first axis.
        observed: the queries that the press needs; None if it needs none.
    """
    slots = press.slots(compiled.shape[3])
    kept = compiled.new_empty((*compiled.shape[:3], slots, compiled.shape[4]))
    for layer in range(len(compiled)):
        index = press.kept(_layer(model, layer, compiled[layer], positions, observed))
        rest = index[:1].expand(compiled.shape[2] - len(index), -1)  # heads that the layer lacks
        index = torch.cat([index, rest])[None, :, :, None].expand(kept.shape[1:])
        torch.gather(compiled[layer], 2, index, out=kept[layer])
    return kept


def _layer(
    model: LoadedModel, layer: int, compiled: torch.Tensor, positions: list[int], observed: Observed | None
) -> LayerKV:
    """Return a layer as the press sees it, from ``compiled [2, kv_heads, n, head_dim]``, with the layer's own heads.
    It is always copied: sums over memory that lies differently may be rounded differently."""
    kind = model.kinds[model.kind_of[layer]]
    own = compiled[:, : kind.kv_heads, :, : kind.dim]
    keys, values = own.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    queries, scale = keys.new_empty((kind.heads, 0, kind.dim)), 1.0
    if observed is not None:
        queries, scale = torch.cat(observed.queries[layer], 1).float(), observed.scales[layer]

    def unrotated() -> torch.Tensor:
        rotation = kind.rotary.rotations(positions)
        return keys if rotation is None else rotate(keys, rotation)

    return LayerKV(layer, keys, values, unrotated, queries, scale)


class Presser:
    """Presses chunks in place. All methods run on the engine's thread.

    Args:
        trailer: number of tokens that the model's adapter puts after a chunk (0 without one).
    """

    def __init__(self, model: LoadedModel, device: DeviceCache, trailer: int = 0) -> None:
        self._model, self._device, self._trailer = model, device, trailer

    def observe(self, job: CompileJob) -> None:
        """Prepare a job that is about to run to keep the queries that its chunk's press will look at."""
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
        """Compress a chunk whose last row has run to the tokens that its press keeps, and free the pages after
        them."""
        self._press(job.resident, job.observed)

    @torch.inference_mode()
    def press_read(self, resident: Resident) -> None:
        """Compress a chunk whose uncompressed form has been read, by a press that needs no queries."""
        self._press(resident)

    def _press(self, resident: Resident, observed: Observed | None = None) -> None:
        pool, press = self._device.pool, parse_press(resident.key.recipe.press)
        if press is None or not resident.is_pressed:
            return
        compiled = pool.view(resident.extent)[:, :, :, resident.first :]
        positions = (resident.inputs.positions[0] + resident.first).tolist()
        kept = compress(self._model, press, compiled, positions, observed)
        self._device.shape(resident, pressed=True)
        pool.view(resident.extent)[:, :, :, resident.first :] = kept
        pool.trim(resident.extent)
