"""Measures chunks that are not on the device: links over stored chunks while they are read."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median_low
from typing import Any

from mpic.engine.base import GenerationRequest
from mpic.library import Library, Limits
from mpic_lab.bench.disk import IN_MEMORY, drop_from_cache, file_system
from mpic_lab.bench.workload import PAGE, Ids, bring, compile_all, first_token, request_of
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.models import native_engine
from mpic_lab.gpu.roofline import Cost
from mpic_lab.gpu.supervise import SectionRun


def loads(run: SectionRun) -> None:
    """Measure the first token of a link whose chunks are resident, in host memory, in the page cache, on the disk; the
    load alone; and the share of the shorter of load and link that is hidden behind the other."""
    context = Context(run)
    subject = _StoredChunks(context)
    with tempfile.TemporaryDirectory(prefix="mpic-report-") as folder:
        root = Path(folder, "library")
        with Library.open(root, subject.limits) as library:
            subject.compile(library)
            kind = file_system(folder)
            for tier, cold in (("page cache", False), ("disk", True)):
                if cold and kind in IN_MEMORY:
                    why = f"{folder} is in memory ({kind}), so nothing is cold"
                    context.left_out("first token", subject.shape, why)
                    continue
                subject.measure(library, tier, cold, file_system=kind)
        host = "pinned" if context.placement.device.type == "cuda" else "plain"
        with Library.open(root, subject.limits, host=host) as library:
            subject.alone(library)  # read once, so that it is now in host memory
            tiers = sorted({one.tier for one in library.store.find(subject.keys).values()})
            if tiers != ["host"]:
                raise RuntimeError(f"chunks are in {tiers}, not in host memory")
            subject.measure(library, f"host memory, {host}")


class _StoredChunks:
    """Stores chunks of a model once, then reads them into one empty engine after another."""

    def __init__(self, context: Context) -> None:
        self._context, sizes = context, context.sizes
        model = sizes.models[-1]
        self._loaded, self._costs = context.model(model)
        self._ids = Ids(model.decoder.vocabulary)
        count, tokens = sizes.stored
        self._chunks = self._ids.chunks(count, tokens)
        self._kv = count * tokens * self._costs.token
        self.limits = Limits(disk_bytes=4 * self._kv + (1 << 30), host_bytes=4 * self._kv + (1 << 20))
        self._tokens = count * (tokens + PAGE) + 4096
        self.shape = f"{count} chunks of {tokens} tokens, {self._kv / 2**20:,.0f} MiB"

    def _request(self) -> GenerationRequest:
        return request_of(self._ids.spaced(self._chunks, self._context.sizes.text, 8), "mpic-32", 2)

    def compile(self, library: Library) -> None:
        """Store the chunks, and measure a link over resident ones."""
        with native_engine(self._loaded, self._tokens, library.store) as engine:
            compile_all(engine, self._chunks)
            self.keys = [engine.linker.key(chunk) for chunk in self._chunks]
            _, usage = first_token(engine, self._request())
            repeats = self._context.sizes.repeats
            resident = _best(lambda: first_token(engine, self._request())[0] / 1e3, repeats)
            self._link = self._costs.prefill(usage)
            self._context.timed("first token", self.shape, "resident", resident, self._link)
        self._paths = [library.store.path(key) for key in self.keys]
        # the baseline for loads: a new engine's first request, which costs more than later ones
        self._first = _best(lambda: self._linked(library, resident=True), repeats)
        self._context.timed(
            "first token", self.shape, "resident, a new engine's first request", self._first, self._link
        )

    def measure(self, library: Library, tier: str, cold: bool = False, **more: Any) -> None:
        """Write two rows: the load alone, and the first token of a link that waits for it."""
        context, repeats = self._context, self._context.sizes.repeats
        alone = _best(lambda: self.alone(library, cold), repeats)
        cost = Cost(bus=self._kv)
        context.rate("load alone", self.shape, tier, self._kv / 1e9 / alone, alone, cost, "GB/s", **more)
        linked = _best(lambda: self._linked(library, cold), repeats)
        hidden = round((alone + self._first - linked) / min(alone, self._first), 3)
        both = self._link + Cost(bytes=self._kv, bus=self._kv)
        context.timed("first token", self.shape, tier, linked, both, hidden_share=hidden)

    def alone(self, library: Library, cold: bool = False) -> float:
        """Return the seconds until an otherwise idle engine has all chunks resident."""
        with native_engine(self._loaded, self._tokens, library.store) as engine:
            if cold:
                drop_from_cache(self._paths)
            taken = bring(engine, self._chunks)
            began = time.perf_counter()
            self._context.placement.synchronize()
            return taken + time.perf_counter() - began

    def _linked(self, library: Library, cold: bool = False, resident: bool = False) -> float:
        """Return the seconds to the first token of a link that is an engine's first request.

        Args:
            cold: True if the page cache holds none of the chunks; ``resident``: True if the device holds all of them.
        """
        with native_engine(self._loaded, self._tokens, library.store) as engine:
            request = self._request()
            if resident:
                bring(engine, self._chunks)
            if cold:
                drop_from_cache(self._paths)
            elapsed, usage = first_token(engine, request)
            made = [use.tier for use in usage.chunks if use.tier in ("compiled", "none")]
            if made:
                raise RuntimeError(f"{len(made)} chunks were compiled instead of read")
            return elapsed / 1e3


def _best(measure, repeats: int) -> float:
    """Return the median after one measurement that does not count."""
    return median_low([measure() for _ in range(repeats + 1)][1:])
