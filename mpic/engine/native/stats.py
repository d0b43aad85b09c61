"""Gauges of an engine: its queue, what runs, and its pages by state."""

from __future__ import annotations

from typing import Any

from mpic.engine.native.request import Status
from mpic.engine.native.scheduler import Scheduler
from mpic.kv.pool import Pool

SEARCHING = (Status.SEARCHING, Status.PREEMPTED)


def stats(scheduler: Scheduler, pool: Pool) -> dict[str, Any]:
    """Return what ``Engine.stats`` promises but for the counters. It may be called from any thread; the engine may
    change something meanwhile."""
    requests, preempted = list(scheduler.running), list(scheduler.preempted)
    resident = list(scheduler.device.chunks.values())
    chunks = sum(resident.extent.pages for resident in scheduler.device.residents())
    extents = [request.extent for request in requests]
    running = sum(extent.pages for extent in extents if extent is not None)
    free = pool.free_pages
    return {
        "waiting": len(scheduler.waiting) + sum(r.status is Status.UNREAD for r in preempted),
        "running": len(requests),
        "searching": sum(r.status in SEARCHING for r in (*requests, *preempted)),
        "pages": {
            "total": pool.pages,
            "free": free,
            "chunks": chunks,
            "running": running,
            "prefix": max(0, pool.pages - free - chunks - running),
            "page_size": pool.page_size,
            "page_bytes": pool.page_bytes,
        },
        "chunks_resident": len(resident),
        "chunks_ready": sum(one.ready for one in resident),
    }
