"""The page pool: one arena of KV memory, cut into contiguous extents.

An extent holds n tokens as ``[layers, parts, kv_heads, n, head_dim]`` contiguous: a chunk's file is one read into it,
every head's keys are one run of memory (what torch's attention kernels want), and a request's own tokens are one
extent too. Pages are the unit of accounting, nothing else.

Extents are allocated best-fit and free neighbours merge. When enough pages are free but no hole is large enough,
extents slide down to make one. New views are made for every step, so an extent may move between steps unless it is
*fixed* (a thread is reading into it).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from mpic.errors import IntegrityError
from mpic.kernels.attention import KVView
from mpic.kv.chunk import KVShape
from mpic.kv.lazy_memory import LazyMemory

_MOVE_ELEMENTS = 4 << 20


@dataclass(eq=False, slots=True)
class Extent:
    """A contiguous range of pages. ``tokens`` slots are usable; ``start`` (a page index) changes when it is moved."""

    start: int
    pages: int
    tokens: int
    fixed: int = 0
    freed: bool = False
    kept: KVView | None = None
    """See ``Pool.kv``; forgotten when the extent moves."""


class Pool:
    """Allocator of extents.

    Args:
        shape: the model's KV geometry.
        pages: size of the arena.
        page_size: tokens per page.
        dtype, device: type and device of the arena.
    """

    def __init__(
        self,
        shape: KVShape,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(
                f"a pool needs at least one page and one token a page, got {pages} and {page_size}"
            )
        self.shape, self.pages, self.page_size = shape, pages, page_size
        self.page_elements = page_size * shape.per_token
        elements, device = pages * self.page_elements, torch.device(device)
        lazy = device.type == "cpu" and LazyMemory.exists_here()
        self._lazy = LazyMemory(elements, dtype) if lazy else None
        self.arena = (
            torch.empty(elements, dtype=dtype, device=device) if self._lazy is None else self._lazy.tensor
        )
        self.extents: list[Extent] = []  # ascending by start
        self.free_pages = pages
        self.moves = 0
        self.reclaim: Callable[[int], bool] = lambda pages: False
        """Makes ``pages`` fit by freeing extents, or frees none and returns False."""

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.arena.element_size()

    def provide(self, tokens: int) -> bool:
        """Ask the system for a little of the memory for ``tokens`` behind the last extent, so that no step has to wait
        for it. Return whether there is more to ask for."""
        if self._lazy is None:
            return False
        used = self.extents[-1].start + self.extents[-1].pages if self.extents else 0
        return self._lazy.provide(used * self.page_bytes, self.pages_for(tokens) * self.page_bytes)

    def pages_for(self, tokens: int) -> int:
        return max(1, -(-tokens // self.page_size))

    def alloc(self, tokens: int) -> Extent | None:
        """Return an extent of at least one token, after evicting caches if needed (``reclaim``); None when that is not
        enough.

        The memory is not cleared. Nothing is evicted for a request that would still not fit.
        """
        pages = self.pages_for(tokens)
        if not self.fits(pages) and not self.reclaim(pages):
            return None
        hole = self._best_hole(pages) or self._compact(pages)
        if hole is None:
            return None
        index, start = hole
        extent = Extent(start, pages, tokens)
        self.extents.insert(index, extent)
        self.free_pages -= pages
        return extent

    def fits(self, pages: int, without: AbstractSet[Extent] = frozenset()) -> bool:
        """Return whether extents could be moved so that ``pages`` lie in one piece if those in ``without`` were freed.
        Fixed extents stay, and nothing moves past them."""
        start = used = 0
        for extent in self.extents:
            if extent in without:
                continue
            if not extent.fixed:
                used += extent.pages
                continue
            if extent.start - start - used >= pages:
                return True
            start, used = extent.start + extent.pages, 0
        return self.pages - start - used >= pages

    def free(self, extent: Extent) -> None:
        if extent.freed or extent.fixed:
            raise IntegrityError(f"extent freed {'twice' if extent.freed else 'while in use'}: {extent}")
        extent.freed = True
        self.extents.remove(extent)
        self.free_pages += extent.pages

    def trim(self, extent: Extent) -> None:
        """Give back the pages behind an extent's last slot."""
        pages = self.pages_for(extent.tokens)
        self.free_pages += extent.pages - pages
        extent.pages = pages

    def view(self, extent: Extent) -> torch.Tensor:
        """Return ``[layers, parts, kv_heads, tokens, head_dim]`` over the extent's memory. It is valid until the next
        ``alloc``."""
        start = extent.start * self.page_elements
        flat = self.arena[start : start + extent.tokens * self.shape.per_token]
        return flat.view(self.shape.extent(extent.tokens))

    def kv(self, extent: Extent) -> KVView:
        """Return a view of the extent's memory for kernels, the same object as long as the extent does not move."""
        if extent.kept is None:
            extent.kept = KVView(self.view(extent))
        return extent.kept

    def _holes(self) -> list[tuple[int, int, int]]:
        """Return (index into ``extents`` where a new one would go, first page, pages) of every hole."""
        holes, end = [], 0
        for i, extent in enumerate(self.extents):
            if extent.start > end:
                holes.append((i, end, extent.start - end))
            end = extent.start + extent.pages
        if end < self.pages:
            holes.append((len(self.extents), end, self.pages - end))
        return holes

    def _best_hole(self, pages: int) -> tuple[int, int] | None:
        fitting = [hole for hole in self._holes() if hole[2] >= pages]
        if not fitting:
            return None
        index, start, _ = min(fitting, key=lambda hole: hole[2])
        return index, start

    def _compact(self, pages: int) -> tuple[int, int] | None:
        """Slide movable extents down until a hole of ``pages`` opens; None when fixed extents prevent it."""
        end = 0
        for i, extent in enumerate(self.extents):
            if extent.start - end >= pages:
                return i, end
            if extent.start > end and not extent.fixed:
                self._move(extent, end)
            end = extent.start + extent.pages
        return (len(self.extents), end) if self.pages - end >= pages else None

    def _move(self, extent: Extent, start: int) -> None:
        """Copy an extent down part by part; each part is staged, so source and destination may overlap."""
        source, target = extent.start * self.page_elements, start * self.page_elements
        size = extent.tokens * self.shape.per_token
        for done in range(0, size, _MOVE_ELEMENTS):
            n, to, origin = min(_MOVE_ELEMENTS, size - done), target + done, source + done
            self.arena[to : to + n] = self.arena[origin : origin + n].clone()
        extent.start = start
        extent.kept = None
        self.moves += 1

    def check(self) -> None:
        """Raise IntegrityError unless extents lie inside the arena, are disjoint and ascending, and the free count is
        right."""
        end = used = 0
        for extent in self.extents:
            if extent.start < end or extent.start + extent.pages > self.pages or extent.freed:
                raise IntegrityError(f"extent out of place: {extent}")
            if extent.tokens > extent.pages * self.page_size:
                raise IntegrityError(f"extent too small for its tokens: {extent}")
            end = extent.start + extent.pages
            used += extent.pages
        if used + self.free_pages != self.pages:
            raise IntegrityError(f"{used} pages used and {self.free_pages} free of {self.pages}")
