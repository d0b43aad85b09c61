"""Steps on the CPU without the model's modules: those in which every row stands alone (decoding) by one call of
``mpic.kernels.decoder``, or of ``whole_decoder`` where the rows are tokens; those with blocks of rows layer by layer
(``mpic.kernels.decoder_blocks``).

It is made for decoders with the structure that ``fused_layers.py`` describes, and used once ``fused_proof.py`` has
shown that it computes what the model does. Steps with anything else to do go through the model's modules
(``hooks.py``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from mpic.kernels import decoder
from mpic.kernels.attention import Write
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.decoder_blocks import BlockLayers
from mpic.kernels.stream import StreamRows
from mpic.kernels.whole_decoder import WholeDecoder
from mpic.model.fused_layers import NOT_STREAM, NOTE, TOKENS_NOTE, Unfused, read_decoder, read_head
from mpic.model.hooks import Step
from mpic.model.loaded import LoadedModel
from mpic.model.module_watch import ModuleWatch
from mpic.model.rotary import Rotary
from mpic.model.structure import RowInputs, plain_ids

_FAR = 100_000
"""A position at which pairs of low frequencies have turned, too."""


class FusedStep:
    """The fused steps of a model.

    Raises:
        Unfused: the model cannot be run this way; the message says why.

    ``note`` says why some steps are not fused; ``counters`` has ``fused_steps`` of rows that stand alone, and
    ``fused_block_steps`` of all others.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        if loaded.device.type != "cpu":
            raise Unfused(f"it runs on the CPU, not on {loaded.device.type}")
        if not loaded.is_plain or loaded.latents or loaded.shape.parts != 2:
            raise Unfused("its layers do not all attend in the plain way")
        kind = loaded.kinds[0]
        if not loaded.streams:
            raise Unfused(loaded.attention_note or NOT_STREAM)
        head = loaded.model.get_output_embeddings()
        if (
            not isinstance(kind.rotary, Rotary)
            or kind.rotary.interleaved
            or kind.rotary.start
            or head is None
        ):
            raise Unfused("it has no rotary embedding of halves of a head, or no output projection")
        try:
            kernel = decoder.load(kind.dim, loaded.dtype, loaded.kv_dtype)
        except KernelUnavailable as reason:
            raise Unfused(str(reason)) from reason
        self._axes, self._scale = _axes_and_scale(loaded, kind.rotary.half)
        try:
            weights = read_decoder(loaded.text_model, self._scale)
            self._decoder = kernel.decoder(weights, kind.rotary.half)
            self._blocks: BlockLayers | None = BlockLayers(kernel, self._decoder)
        except ValueError as reason:
            raise Unfused(str(reason)) from reason
        self._frequencies = kind.rotary.frequencies.float()
        embedding = getattr(loaded.text_model, "rotary_emb", None)
        self._scaling = float(getattr(embedding, "attention_scaling", 1.0))
        self._loaded, self._head, self.most_rows = loaded, head, self._decoder.most_rows
        self._dtype, self._change, self.note = loaded.dtype, "", ""
        modules = _modules_of(loaded.model, loaded.text_model)
        self._watch = ModuleWatch(modules)
        self._watch_from_tokens = ModuleWatch([*modules, loaded.model.get_input_embeddings(), head])
        self._kernel = kernel
        self._begins_with_tokens = self._find_whole_decoder()
        self.counters: Counter[str] = Counter()

    def run(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor | None:
        """Runs a step. Arguments and result are those of ``LoadedModel.forward``; None: it has to be run through the
        model's modules, and nothing has been written."""
        if not len(inputs.embeds) or inputs.deepstack is not None or step.kernel is not None:
            return None
        if not self._loaded.streams or self._changed():
            return None
        is_alone = self._is_alone(len(inputs.embeds), step)
        if not is_alone and self._blocks is None:
            return None
        cosine, sine = self.rotations(positions)
        state = inputs.embeds.clone(memory_format=torch.contiguous_format)
        if is_alone:
            hidden = self._decoder(state, cosine, sine, step.single_writes, step.kinds[0].singles)[wanted]
            self.counters["fused_steps"] += 1
        else:
            places = self._places(len(state), step.writes)
            attend = functools.partial(_attend, step, self._scale)
            hidden = self._blocks(state, cosine, sine, places, attend, wanted)
            self.counters["fused_block_steps"] += 1
        return self._head(hidden).float()

    def begins_with_tokens(self) -> bool:
        """Returns whether the next step, if its rows stand alone, may be run by a ``whole_decoder``."""
        if not self._begins_with_tokens or not self._loaded.streams or self._loaded.triton is not None:
            return False
        change = self._watch_from_tokens.change()
        if bool(change) != bool(self._change):
            self._changed()  # says so
        return not change

    def whole_decoder(self) -> WholeDecoder:
        """Returns what runs steps of rows that stand alone from their tokens to their logits, with memory of its own.

        Raises:
            Unfused: embeddings or output projection are not plain.
        """
        embedding = self._loaded.model.get_input_embeddings()
        head = read_head(self._head)
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or head is None:
            raise Unfused("its embeddings or its output projection do more than look up and multiply")
        try:
            return WholeDecoder(self._kernel, self._decoder, embedding.weight, head)
        except ValueError as reason:
            raise Unfused(str(reason)) from reason

    def _find_whole_decoder(self) -> bool:
        """Returns whether there can be one, and notes the reason in the model's details if not."""
        details = self._loaded.info.details
        try:
            self.whole_decoder()
        except Unfused as reason:
            details[TOKENS_NOTE] = str(reason)
            return False
        details[TOKENS_NOTE] = ""
        return True

    def leave_blocks(self, why: str) -> None:
        """Runs no steps with blocks of rows from now on, and notes the reason in the model's details."""
        self._blocks, self.note = None, why
        self._loaded.info.details[NOTE] = why

    def _is_alone(self, count: int, step: Step) -> bool:
        """Returns whether a step has nothing but rows that stand alone, and few enough."""
        if count > self.most_rows or step.barrier is not None or step.observed or step.writes:
            return False
        kind, writes = step.kinds[0], step.single_writes
        if kind.calls or writes is None or writes.count != count:
            return False
        return type(kind.singles) is StreamRows

    def _places(self, count: int, writes: Sequence[Write]) -> torch.Tensor:
        """Returns where keys and values of ``count`` rows go (``BlockLayers``): nowhere those that no write has."""
        shape = self._loaded.shape
        fits = (shape.layers, 2, shape.kv_heads, shape.head_dim, self._loaded.kv_dtype, 1)
        table = np.zeros((count, 4), dtype=np.int64)
        for rows, span in writes:
            kv = span.source.data
            to_layer, to_part, to_head, to_slot, dense = kv.stride()
            slots = np.arange(span.lo, span.hi)
            if (*kv.shape[:3], kv.shape[4], kv.dtype, dense) != fits or span.hi > kv.shape[3]:
                raise ValueError(
                    f"rows cannot be written to slots {span.lo} to {span.hi} of {tuple(kv.shape)}"
                )
            table[rows] = 0, to_layer, to_part, to_head
            table[rows, 0] = kv.data_ptr() + slots * (to_slot * kv.element_size())
        return torch.from_numpy(table)

    def _changed(self) -> bool:
        """Returns whether the modules have changed since the proof, and says so in the model's details."""
        change = self._watch.change()
        if change != self._change:
            self._change = change
            note = f"the model has {change} since it was proved" if change else self.note
            self._loaded.info.details[NOTE] = note
        return bool(change)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and sine ``[T, half]`` fp32 of positions ``[1 or 3, T]``, rounded as the model's own are."""
        of_pairs = positions[self._axes] if len(positions) > 1 else positions
        angle = of_pairs.T.float().contiguous() * self._frequencies
        cosine, sine = angle.cos(), angle.sin()
        if self._scaling != 1.0:
            cosine, sine = cosine * self._scaling, sine * self._scaling
        if self._dtype is not torch.float32:
            cosine, sine = cosine.to(self._dtype).float(), sine.to(self._dtype).float()
        return cosine, sine


def _attend(
    step: Step, scale: float, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Computes a layer's attention (``mpic.kernels.decoder_blocks.Attend``) in a step whose blocks are written."""
    for rows, observed in step.observed:
        observed.take(layer, q[:, rows], scale)
    if step.single_writes is not None:
        step.single_writes.write(layer, k, v)
    if step.barrier is not None:
        step.barrier.wait(layer)
    return step.kinds[0].attend(q, layer, scale, step.partial)


def _modules_of(model: nn.Module, text_model: nn.Module) -> list[nn.Module]:
    """Returns the modules that a step replaces: the decoder's, and those around it."""
    around = [one for one in model.modules() if one is not text_model and _contains(one, text_model)]
    unused = text_model.get_input_embeddings()
    return [*around, *(one for one in text_model.modules() if one is not unused)]


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(one is inner for one in outer.modules())


@torch.inference_mode()
def _axes_and_scale(loaded: LoadedModel, half: int) -> tuple[torch.Tensor, float]:
    """Returns the axis of the positions ``[half]`` that turns each pair of a head, and the scale of attention scores,
    both as the first layer's attention is seen to have them."""
    inputs = loaded.rows(torch.tensor(plain_ids(loaded.config, 4)))
    none = torch.zeros(loaded.mrope, 4, dtype=torch.int64)
    here = loaded.probe(inputs, none, 0, [4], [[]])
    axes = torch.zeros(half, dtype=torch.int64)
    for axis in range(loaded.mrope):
        moved = none.clone()
        moved[axis] = _FAR
        there = loaded.probe(inputs, moved, 0, [4], [[]])
        turned = (there.keys != here.keys).any(0).any(0)
        axes[turned[:half] | turned[half : 2 * half]] = axis
    return axes, here.scale
