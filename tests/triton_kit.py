"""Steps for the tests of the Triton kernels: keys and values lie in an arena full of NaN, in extents or in pages that
are scattered over it, and every step is described twice: for the kernels and for the reference."""

from __future__ import annotations

import torch

from mpic.kernels.spans import Shift, SpanCall
from mpic.kernels.triton.step import Geometry
from mpic.kernels.triton.tiles import KV, Call
from mpic.kernels.triton.tuning import Tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 2
SMALL = Tiles(16, 16, 4, 1, 16, 4, 1, "of the tests")


def shift_of(base: int, half: int, interleaved: bool = False) -> Shift:
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = -base * frequencies
    return Shift(angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE), interleaved)


class World:
    """An arena and the pieces in it.

    Args:
        page: tokens a page; 0 for contiguous extents.
    """

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype = torch.float32, page: int = 0, seed: int = 0
    ) -> None:
        self.geometry, self.page = geometry, page
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.per_token = LAYERS * 2 * geometry.kv_heads * geometry.dim
        self.arena = torch.full((2048 * self.per_token,), float("nan"), dtype=dtype, device=DEVICE)
        self._free = 3  # tokens; what lies before and between stays poisoned
        self.page_order = torch.randperm(1024 // max(1, page), generator=self._generator).tolist()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.dtype).to(DEVICE)

    def place(self, n: int, skip: int = 0) -> tuple[KV, torch.Tensor]:
        """A piece of n filled tokens behind ``skip`` poisoned slots: where it lies, and its
        ``[layers, 2, kv_heads, n, head_dim]`` by value."""
        kv = self.reserve(n, skip)
        data = self.random(LAYERS, 2, self.geometry.kv_heads, n, self.geometry.dim)
        self.put(kv, data)
        return kv, data

    def reserve(self, n: int, skip: int = 0) -> KV:
        heads, dim, total = self.geometry.kv_heads, self.geometry.dim, n + skip
        if self.page:
            size = self.page
            taken = [self.page_order.pop() for _ in range(-(-total // size))]
            pages = tuple(number * size * self.per_token for number in taken)
            return KV(0, 2 * heads * size * dim, heads * size * dim, size * dim, skip, total, pages)
        spare = 5  # slots behind the piece in its extent
        n_extent = total + spare
        origin = self._free * self.per_token
        self._free += n_extent + 1
        assert self._free < 2048
        return KV(origin, 2 * heads * n_extent * dim, heads * n_extent * dim, n_extent * dim, skip, total)

    def slots(self, kv: KV) -> torch.Tensor:
        """Arena indices of every element of a piece, ``[layers, 2, kv_heads, n, head_dim]``."""
        dim, heads = self.geometry.dim, self.geometry.kv_heads
        s = torch.arange(kv.lo, kv.hi)
        if kv.pages is None:
            start = kv.origin + s * dim
        else:
            start = torch.tensor(kv.pages)[s // self.page] + s % self.page * dim
        layer = torch.arange(LAYERS).view(-1, 1, 1, 1, 1) * kv.layer
        value = torch.arange(2).view(-1, 1, 1, 1) * kv.value
        head = torch.arange(heads).view(-1, 1, 1) * kv.head
        return (layer + value + head + start[:, None] + torch.arange(dim)).to(DEVICE)

    def put(self, kv: KV, data: torch.Tensor) -> None:
        self.arena[self.slots(kv)] = data

    def get(self, kv: KV) -> torch.Tensor:
        return self.arena[self.slots(kv)]


class Described:
    """Calls for the kernels and for the reference, side by side."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[Call] = []
        self.shifts: list[Shift] = []
        self._spans: list[tuple[slice, torch.Tensor, bool, Shift | None]] = []

    def add(
        self, start: int, stop: int, kv: KV, data: torch.Tensor, base: int = 0, causal: bool = False
    ) -> None:
        g, shift = self.world.geometry, None
        if base:
            shift = shift_of(base, g.half, g.interleaved)
            self.shifts.append(shift)
        self.calls.append(Call(start, stop, kv, causal, len(self.shifts) if base else 0))
        self._spans.append((slice(start, stop), data, causal, shift))

    def expected(self, layer: int) -> list[SpanCall]:
        return [
            SpanCall(rows, data[layer, 0].float(), data[layer, 1].float(), causal, shift, False)
            for rows, data, causal, shift in self._spans
        ]
