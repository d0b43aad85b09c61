"""The baseline: stock transformers on the same weights, with the fastest cache it can be given."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mpic_lab.bench.workload import DecoderShape

UNMASKED = "sdpa_unmasked"
"""SDPA over everything without a mask: not a causal model's result, but no plain forward can be faster."""


def _unmasked(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **kwargs
) -> tuple:
    kwargs["is_causal"] = False
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


AttentionInterface.register(UNMASKED, _unmasked)
AttentionMaskInterface.register(UNMASKED, lambda *args, **kwargs: None)


class _Slots(DynamicLayer):
    """A cache layer that is allocated once: new keys are written after the old ones, and nothing is concatenated."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity, self.used = capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self._capacity, dim)
        self.values = value_states.new_zeros(batch, heads, self._capacity, dim)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0


def _fill(cache: Cache, shape: DecoderShape, batch: int, length: int, model: nn.Module) -> Cache:
    """Return random KV, because the values in a cache do not change the cost of reading it."""
    generator = torch.Generator().manual_seed(7)
    heads = shape.kv_heads or shape.heads
    one = torch.randn(2, 1, heads, length, shape.hidden // shape.heads, generator=generator)
    one = one.to(model.device, model.dtype)
    for layer in range(shape.layers):
        cache.update(one[0].expand(batch, -1, -1, -1), one[1].expand(batch, -1, -1, -1), layer)
    return cache


def floors(
    stock: nn.Module,
    shape: DecoderShape,
    ids: Callable[[int], tuple[int, ...]],
    new: int,
    resident: int,
    sync: Callable,
) -> dict[str, Callable[[], float]]:
    """Return ways to run one plain forward of ``new`` tokens over ``resident`` cached ones; each returns milliseconds.
    The fastest of them is the floor of a link that computes the same number of tokens over the same number of cached
    ones.
    """
    total = new + resident
    slots = Cache(layers=[_Slots(total) for _ in range(shape.layers)])
    _fill(slots, shape, 1, resident, stock)
    static = _fill(StaticCache(stock.config, total), shape, 1, resident, stock)
    positions = torch.arange(resident, total, device=stock.device)[None]
    allowed = torch.ones(new, total, dtype=torch.bool, device=stock.device).tril(resident)
    mask = torch.zeros(1, 1, new, total, dtype=stock.dtype, device=stock.device)
    mask.masked_fill_(~allowed, float("-inf"))

    def run(cache: Cache, attention: str, given: torch.Tensor | None) -> float:
        for layer in cache.layers:
            if isinstance(layer, _Slots):
                layer.used = resident
            else:
                layer.cumulative_length.fill_(resident)
        stock.set_attn_implementation(attention)
        fresh = ids(new)
        sync()
        began = time.perf_counter()
        with torch.inference_mode():
            tokens = torch.tensor(fresh, device=stock.device)[None]
            out = stock(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=cache,
                attention_mask=given,
                use_cache=True,
                logits_to_keep=1,
            )
            int(out.logits[0, -1].argmax())
        sync()
        return (time.perf_counter() - began) * 1e3

    return {
        "floor: no mask": lambda: run(slots, UNMASKED, None),
        "floor: ready mask": lambda: run(slots, "sdpa", mask),
        "floor: static cache": lambda: run(static, "sdpa", None),
    }


class _TokenTimes:
    """A streamer that records when ``generate`` returned each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class StockGenerator:
    """``generate`` over a cache that already holds ``length`` tokens for each of ``batch`` rows.

    Args:
        kind: ``static`` or ``dynamic``, transformers' own caches.
    """

    def __init__(
        self, stock: nn.Module, shape: DecoderShape, kind: str, batch: int, length: int, tokens: int
    ) -> None:
        self._stock, self._shape = stock, shape
        self._batch, self._length, self._tokens = batch, length, tokens
        self._static = StaticCache(stock.config, length + tokens) if kind == "static" else None
        if self._static is not None:
            _fill(self._static, shape, batch, length, stock)

    def __call__(self, tokens: int | None = None) -> float:
        """Return the tokens a second over all rows, from the first new token to the last; ``tokens`` makes a shorter
        run."""
        tokens = tokens or self._tokens
        self._stock.set_attn_implementation("sdpa")
        if self._static is not None:
            cache: Cache = self._static
            for layer in cache.layers:
                layer.cumulative_length.fill_(self._length)
        else:
            cache = _fill(
                DynamicCache(config=self._stock.config), self._shape, self._batch, self._length, self._stock
            )
        prompt = torch.full((self._batch, self._length + 1), 11, device=self._stock.device)
        clock = _TokenTimes()
        with torch.inference_mode():
            self._stock.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                streamer=clock,
                disable_compile=True,
            )
        times = clock.times[1:]  # ``generate`` puts the prompt first
        return self._batch * (len(times) - 1) / (times[-1] - times[0])
