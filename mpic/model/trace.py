"""The facts of a model's layers, found by running them on four tokens before the model serves anything.

Every layer is made to give each token its own value, so a token's state does not depend on its place or on the tokens
before it, unless something other than attention looks at them. The same tokens are then run at other positions, and
once with another first token: keys that change with positions show the layer's rotary embedding, values that change
show absolute positions, and a token that notices its neighbour shows a state (convolution, recurrence). Masks are read
off the functions from which transformers would make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.kernels.patterns import Blocks, Pattern
from mpic.kernels.windows import Window
from mpic.model.rotary import Rotary, Unrotated, candidates, refuse_changing

ROWS = 4
SHIFTS = (7, 1000)
"""Positions by which the same tokens are moved: near, for fast frequencies; far, for slow ones."""
_FAR = 1 << 21
"""A place in a prompt behind any window."""
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "sliding_window",  # the mask says the same, and is decisive
}


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: the facts that decide which layers can share the calls of a step.

    Args:
        rotary: rotation of their queries.
        window: the window of tokens that they see; None: everything before.
        heads, kv_heads: number of heads of queries and of keys.
        dim: dimension of a head as it is kept, the larger of its key's and its value's.
        blocks: the way in which the rows of a block see its later rows; None: they do not.
    """

    rotary: Rotary | Unrotated
    window: Window | None
    heads: int
    kv_heads: int
    dim: int
    blocks: Blocks | None = None

    @property
    def pattern(self) -> Pattern:
        return Pattern(self.window, self.blocks)


class LayerFacts(NamedTuple):
    """A layer's kind (a number), and the parts of its softmax other than scores."""

    kind: int
    softcap: bool
    sinks: bool


@dataclass
class LayerTrace:
    """The part of a run that one layer has seen: tensors ``[heads, rows, dim]``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    window: Any  # the window, or another fact that the run reads from a mask
    module: nn.Module
    softcap: bool
    sinks: bool


@dataclass
class ForwardTrace:
    """Records a run of the model. ``mpic.model.hooks`` passes it every layer and every mask.

    Args:
        read: function from a layer's mask function to the fact that is recorded.
    """

    read: Callable[[Callable[..., Any]], Any] = field(default_factory=lambda: window_of)
    layers: dict[int, LayerTrace] = field(default_factory=dict)
    _masks: dict[int, Any] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)

    def mask(
        self,
        mask_function: Callable[..., Any],
        q_length: int,
        kv_length: int,
        dtype: Any = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return a tensor that stands for a mask, so that it can be recognised when a layer receives it: on the
        device of the model, or what moves tensors there would make it another."""
        try:
            window: Any = self.read(mask_function)
        except ModelRefused as refusal:  # a model may make masks that none of its layers uses
            window = refusal
        tensor = torch.zeros(1, 1, q_length, kv_length, dtype=dtype or torch.float32, device=device)
        self._kept.append(tensor)
        self._masks[tensor.untyped_storage().data_ptr()] = window
        return tensor

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        given: dict[str, Any],
    ) -> torch.Tensor:
        """Record a layer and return each row's own value, ``[1, rows, heads, dim]``."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ModelRefused(f"{type(module).__name__} does not know the number of its layer")
        if layer in self.layers:
            raise ModelRefused(f"layer {layer} attends more than once")
        meaning = {k for k, v in given.items() if v is not None and v is not False and k not in _HARMLESS}
        meaning -= {"softcap", "s_aux"}
        if meaning:
            raise ModelRefused(f"attention arguments that are not supported: {', '.join(sorted(meaning))}")
        if mask is None and given.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise ModelRefused("attention in both directions depends on the whole prompt")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise ModelRefused("its attention is over other tokens than its own")
        self.layers[layer] = LayerTrace(
            query[0].float(),
            key[0].float(),
            value[0].float(),
            self._window(mask),
            module,
            given.get("softcap") is not None,
            given.get("s_aux") is not None,
        )
        own = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return own.transpose(1, 2).contiguous()

    def _window(self, mask: Any) -> Any:
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.untyped_storage().data_ptr() not in self._masks:
            raise ModelRefused("it makes masks of its own, which may say more than what stands before")
        window = self._masks[mask.untyped_storage().data_ptr()]
        if isinstance(window, ModelRefused):
            raise window
        return window


def seen_by(mask_function: Callable[..., Any]) -> Callable[[int, int], bool]:
    """Return one of transformers' mask functions as a function of a row's and a key's place."""
    return lambda row, key: bool(mask_function(0, 0, torch.tensor(row), torch.tensor(key)))


def window_of(mask_function: Callable[..., Any]) -> Window | None:
    """Return the window of one of transformers' mask functions ``(batch, head, row, key) -> seen``; None: all before.

    Raises:
        ModelRefused: the mask is neither causal nor a window.
    """
    sees = seen_by(mask_function)

    def first(row: int) -> int:
        lo, hi = 0, row
        while lo < hi:
            middle = (lo + hi) // 2
            lo, hi = (lo, middle) if sees(row, middle) else (middle + 1, hi)
        return lo

    try:
        if sees(_FAR, _FAR + 1):
            raise ModelRefused("attention in both directions depends on the whole prompt")
        start = first(_FAR)
        window = None
        if start and first(_FAR + 1) == start + 1 and first(_FAR + 2) == start + 2:
            window = Window(_FAR - start + 1)
        elif start:
            window = Window(_chunk(first, start), chunked=True)
        if not _is_right(window, sees):
            raise ModelRefused("its masks are neither causal nor a window")
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"its masks depend on more than places in the prompt: {error}") from error
    return window


def _chunk(first: Callable[[int], int], start: int) -> int:
    """Return the size of the chunk that begins at ``start``, which is the distance to the beginning of the next
    one."""
    step = 1
    while first(_FAR + step) == start:
        step *= 2
        if step > _FAR:
            raise ModelRefused("its masks are neither causal nor a window")
    lo, hi = step // 2, step
    while lo < hi:
        middle = (lo + hi) // 2
        lo, hi = (lo, middle) if first(_FAR + middle) != start else (middle + 1, hi)
    return _FAR + lo - start


def _is_right(window: Window | None, sees: Callable[[int, int], bool]) -> bool:
    """Return whether a window agrees with a mask function at places that were not examined before."""
    generator = np.random.default_rng(0)
    size = 64 if window is None else window.size
    for row in generator.integers(0, 4 * size, 24).tolist():
        floor = 0 if window is None else int(window.floor(np.array([row]))[0])
        for key in {0, floor - 1, floor, row, row + 1, int(generator.integers(0, row + 1))}:
            if key >= 0 and sees(row, key) != (floor <= key <= row):
                return False
    return True


def trace(
    text_model: nn.Module,
    run: Callable[[torch.Tensor, int, ForwardTrace], torch.Tensor],
    tokens: Sequence[int],
    layers: int,
    dtype: torch.dtype,
) -> tuple[list[LayerKind], list[LayerFacts]]:
    """Find the kinds of a model's layers, and the facts of each layer.

    Args:
        run: runs token ids ``[ROWS]`` at positions from a number on under a trace, and returns logits.
        tokens: ``ROWS + 1`` different token ids.
        layers: number of the model's layers.

    Raises:
        ModelRefused: the layers cannot be linked; the message says why.
    """
    refuse_changing(text_model)
    limit = _LIMITS.get(dtype, 1e-3)
    ids = torch.tensor(tokens[:ROWS])
    original, other = ForwardTrace(), ForwardTrace()
    logits = run(ids, 0, original)
    if sorted(original.layers) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(original.layers))
        raise ModelRefused(f"{_some(missing)} do not attend through transformers' attention interface")
    changed = ids.clone()
    changed[0] = tokens[ROWS]
    logits_changed = run(changed, 0, other)
    for number, seen in original.layers.items():
        if not alike(seen.value[:, 1:], other.layers[number].value[:, 1:], limit):
            raise ModelRefused(_STATE)
    if not alike(logits[1:], logits_changed[1:], limit):
        raise ModelRefused(_STATE)
    moved = []
    for shift in SHIFTS:
        shifted = ForwardTrace()
        run(ids, shift, shifted)
        moved.append(shifted)
    return _facts(text_model, original, moved, limit)


_STATE = "tokens meet outside of attention: layers keep a state (convolution, recurrence), not keys and values alone"


def _facts(
    text_model: nn.Module, original: ForwardTrace, moved: Sequence[ForwardTrace], limit: float
) -> tuple[list[LayerKind], list[LayerFacts]]:
    device = next(text_model.parameters()).device
    rotaries: list[Rotary | Unrotated] = [Unrotated()]
    kinds: list[LayerKind] = []
    facts: list[LayerFacts] = []
    for number in sorted(original.layers):
        seen, shifted = original.layers[number], [trace.layers[number] for trace in moved]
        if not all(alike(seen.value, one.value, limit) for one in shifted):
            raise ModelRefused("what its layers keep depends on absolute positions")
        rotary = _rotary(text_model, rotaries, seen, shifted, limit, device)
        if rotary not in rotaries:
            rotaries.append(rotary)
        size = max(seen.key.shape[-1], seen.value.shape[-1])
        kind = LayerKind(rotary, seen.window, len(seen.query), len(seen.key), size)
        if kind not in kinds:
            kinds.append(kind)
        facts.append(LayerFacts(kinds.index(kind), seen.softcap, seen.sinks))
    return kinds, facts


def _rotary(
    text_model: nn.Module,
    known: Sequence[Rotary | Unrotated],
    seen: LayerTrace,
    shifted: Sequence[LayerTrace],
    limit: float,
    device: torch.device,
) -> Rotary | Unrotated:
    """Return the rotation that explains how a layer's queries and keys change with positions, preferably a known
    one."""
    if all(alike(seen.key, one.key, limit) and alike(seen.query, one.query, limit) for one in shifted):
        return known[0]
    head_dim = seen.key.shape[-1]
    fitting = (r for r in known if isinstance(r, Rotary) and r.start + 2 * r.half <= head_dim)
    for rotary in (*fitting, *candidates(text_model, head_dim, device)):
        if all(
            rotary.explains(seen.key, one.key, shift, limit)
            and rotary.explains(seen.query, one.query, shift, limit)
            for one, shift in zip(shifted, SHIFTS, strict=True)
        ):
            return rotary
    raise ModelRefused("its keys change with positions in a way that no rotary embedding of it explains")


def limit_of(module: nn.Module) -> float:
    """Return the largest relative difference that rounding can cause."""
    return _LIMITS.get(next(module.parameters()).dtype, 1e-3)


def alike(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    """Return whether two tensors are equal up to rounding."""
    return float((a - b).abs().max()) <= limit * max(float(a.abs().max()), 1e-30)


def _some(layers: Sequence[int]) -> str:
    return f"layers {', '.join(map(str, layers[:4]))}{', ...' if len(layers) > 4 else ''}"


def with_blocks(
    kinds: Sequence[LayerKind], layers: Sequence[LayerFacts], blocks: Sequence[Blocks | None]
) -> tuple[list[LayerKind], list[LayerFacts]]:
    """Return kinds and facts of a model's layers, with the blocks of each layer."""
    of_layers = [replace(kinds[facts.kind], blocks=one) for facts, one in zip(layers, blocks, strict=True)]
    made = list(dict.fromkeys(of_layers))
    return made, [
        facts._replace(kind=made.index(kind)) for facts, kind in zip(layers, of_layers, strict=True)
    ]
