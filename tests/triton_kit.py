"""Steps for the tests of the Triton kernels: keys and values lie in an arena full of NaN, and every step is described
twice: for the kernels, by strides, and for the reference, by value."""

from __future__ import annotations

import torch
from rotation_kit import Rotary

from mpic.kernels.attention import KVView, SpanCall
from mpic.kernels.span import Span
from mpic.kernels.triton.launch import Geometry
from mpic.kernels.triton.tiles import Strides
from mpic.kernels.triton.tuning import Tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 2
SMALL = Tiles(16, 16, 4, 1, 16, 4, 1)


def rotary_of(geometry: Geometry) -> Rotary:
    return Rotary(geometry.half, geometry.interleaved, DEVICE)


class World:
    """An arena and the extents in it."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.geometry, self.dtype = geometry, dtype
        self._generator = torch.Generator().manual_seed(seed)
        self.per_token = LAYERS * 2 * geometry.kv_heads * geometry.dim
        self.arena = torch.full((2048 * self.per_token,), float("nan"), dtype=dtype, device=DEVICE)
        self._free = 3  # tokens; the slots before and between stay poisoned

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.dtype).to(DEVICE)

    def fill(self, n: int, skip: int = 0) -> tuple[Span, torch.Tensor]:
        """Return a span of n filled tokens behind ``skip`` poisoned slots, and its
        ``[layers, 2, kv_heads, n, head_dim]`` by value."""
        span = self.reserve(n, skip)
        data = self.random(LAYERS, 2, self.geometry.kv_heads, n, self.geometry.dim)
        self.put(span, data)
        return span, data

    def reserve(self, n: int, skip: int = 0) -> Span:
        heads, dim, total = self.geometry.kv_heads, self.geometry.dim, n + skip
        spare = 5  # slots behind the span in its extent
        size = total + spare
        origin = self._free * self.per_token
        self._free += size + 1
        assert self._free < 2048
        return Span(Strides(origin, 2 * heads * size * dim, heads * size * dim, size * dim), skip, total)

    def slots(self, span: Span) -> torch.Tensor:
        """Return the arena indices of every element, ``[layers, 2, kv_heads, n, head_dim]``."""
        dim, heads, source = self.geometry.dim, self.geometry.kv_heads, span.source
        start = source.origin + torch.arange(span.lo, span.hi) * dim
        layer = torch.arange(LAYERS).view(-1, 1, 1, 1, 1) * source.layer
        value = torch.arange(2).view(-1, 1, 1, 1) * source.value
        head = torch.arange(heads).view(-1, 1, 1) * source.head
        return (layer + value + head + start[:, None] + torch.arange(dim)).to(DEVICE)

    def put(self, span: Span, data: torch.Tensor) -> None:
        self.arena[self.slots(span)] = data

    def get(self, span: Span) -> torch.Tensor:
        return self.arena[self.slots(span)]


class Described:
    """Calls for the kernels and for the reference, side by side."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[SpanCall] = []
        self.expected: list[SpanCall] = []

    def add(
        self, start: int, stop: int, span: Span, data: torch.Tensor, base: int = 0, causal: bool = False
    ) -> None:
        rows = slice(start, stop)
        self.calls.append(SpanCall(rows, span._replace(base=base), causal))
        by_value = Span(KVView(data.float()), 0, span.tokens, base)
        self.expected.append(SpanCall(rows, by_value, causal))
