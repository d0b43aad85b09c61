"""Checks copies to and from a device that computes meanwhile: ``mpic.kv.copies`` and ``mpic.kv.readback`` on real
streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from mpic.kv.barrier import LayerBarrier, LoadSignal
from mpic.kv.copies import CopiedProgress, Copies, copies_for
from mpic.kv.readback import readback_for
from mpic.kv.staging import Staging, StagingRing
from mpic_lab.bench.harness import median_seconds
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.roofline import Cost
from mpic_lab.gpu.supervise import SectionRun

_PIECES = 5
"""How many slots of the readback a tensor takes that is read in one go, which has two."""


def copies(run: SectionRun) -> None:
    """Checks that a copy arrives before it is used and after earlier use of its target, and that copies overlap
    computing."""
    context = Context(run)
    found = copies_for(context.placement.device)
    if found is None:
        context.left_out(
            "copy check", "copies beside computing", f"{context.placement.device} copies in place"
        )
        return
    for name, work in {
        "layers arrive before the step that follows them": _arrive,
        "a load does not overwrite what is being read": _order,
        "ranges of a buffer arrive with the mark of the last": _ranges,
        "a buffer may be dropped while it is being copied": _dropped,
        "a slot of the staging ring is not filled again before it is copied": _ring,
        "what a thread reads back is what had been computed at its mark": _readback,
    }.items():
        context.check(
            "copy check", name, type(found).__name__, lambda work=work: work(context, found), 0.0, "error"
        )
    _overlap(context, found)


def _busy(context: Context, turns: int = 6) -> torch.Tensor:
    """Gives the device some milliseconds of work."""
    side = 4096 if not context.run.quick else 64
    a = torch.ones(side, side, dtype=context.placement.dtype, device=context.placement.device)
    for _ in range(turns):
        a = torch.mm(a, a).clamp_(max=1)
    return a


def _arrive(context: Context, found: Copies) -> float:
    layers, shape = 8, (8, 2, 4, 512, 128)
    target = torch.zeros(shape, dtype=context.placement.dtype, device=context.placement.device)
    buffer = found.buffer(shape, context.placement.dtype)
    buffer.copy_(torch.arange(layers).view(-1, 1, 1, 1, 1) + 1.0)
    found.order()
    progress = CopiedProgress(LoadSignal(), layers, found)
    _busy(context)
    for layer in range(layers):
        progress.copy((layer,), target[layer], buffer[layer])
        progress.arrive(layer)
    barrier, sums = LayerBarrier([progress], 1.0), []
    for layer in range(layers):
        barrier.wait(layer)
        sums.append(target[layer].float().mean())
    progress.settle()
    return float((torch.stack(sums).cpu() - torch.arange(1.0, layers + 1)).abs().max())


def _order(context: Context, found: Copies) -> float:
    """Reads the old values late, after other work, then loads new ones over them."""
    target = torch.ones(64 << 18, device=context.placement.device)
    buffer = found.buffer(target.shape, target.dtype)
    buffer.fill_(5.0)
    _busy(context, 20)
    old = target.clone()
    found.order()
    found.follow(found.start(target, buffer))
    return float((old - 1).abs().max() + (target - 5).abs().max())


def _ranges(context: Context, found: Copies) -> float:
    """Copies the last tokens of every head behind other work, as a part of a chunk inside vLLM."""
    heads, tokens, last = 64, 2048, slice(1500, 2048)
    buffer = found.buffer((heads, tokens, 128), torch.float32)
    buffer.copy_(torch.arange(1.0, tokens + 1)[None, :, None])
    target = torch.zeros(heads, 548, 128, device=context.placement.device)
    _busy(context)
    found.order()
    found.follow(found.start_all(zip(target, (head[last] for head in buffer), strict=True)))
    wanted = torch.arange(1501.0, 2049, device=target.device)[None, :, None]
    return float((target - wanted).abs().max())


def _dropped(context: Context, found: Copies) -> float:
    target = torch.zeros(64 << 18, device=context.placement.device)
    buffer = found.buffer(target.shape, target.dtype)
    buffer.fill_(3.0)
    mark = found.start(target, buffer)
    del buffer
    again = found.buffer(target.shape, target.dtype)  # not the same memory while the copy runs
    again.fill_(7.0)
    found.follow(mark)
    return float((target - 3).abs().max())


def _ring(context: Context, found: Copies) -> float:
    """Sends many pieces through two slots, behind other work: every slot is wanted before its copy has begun."""
    pieces, size = 16, 4 << 20
    target = torch.zeros((pieces, size), dtype=torch.uint8, device=context.placement.device)
    ring = StagingRing(found, Staging(2, size))
    _busy(context, 20)
    found.order()
    for number in range(pieces):
        with ring.slot() as slot:
            memory = slot.of((size,), torch.uint8)
            memory.fill_(number + 1)
            slot.mark = found.start(target[number], memory)
    ring.close()
    wanted = torch.arange(1, pieces + 1, device=target.device)
    return float((target.amax(1) - wanted).abs().max() + (target.amin(1) - wanted).abs().max())


def _readback(context: Context, found: Copies) -> float:
    """Reads a tensor that is computed late, in more pieces than there are slots, on a thread as a compiled chunk inside
    vLLM; other work is queued meanwhile."""
    slot_bytes = 4 << 20
    readback = readback_for(context.placement.device, slot_bytes)
    wanted = torch.arange(_PIECES * slot_bytes // 4 + 1, dtype=torch.float32)
    late = torch.zeros(wanted.shape, device=context.placement.device)
    there = wanted.to(late.device)
    _busy(context, 20)
    late.copy_(there)
    mark = readback.mark()
    del there

    def read() -> torch.Tensor:
        with readback.behind(mark):
            return readback.to_host(late)

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        _busy(context)
        return float((reading.result() - wanted).abs().max())


def _overlap(context: Context, found: Copies) -> None:
    """Measures the time of computing and copying together against that of each."""
    size = 1 << 20 if context.run.quick else 256 << 20
    source = found.buffer((size,), torch.uint8)
    target = torch.empty(size, dtype=torch.uint8, device=context.placement.device)

    def copy() -> None:
        found.order()
        found.follow(found.start(target, source))

    def both() -> None:
        found.order()
        mark = found.start(target, source)
        _busy(context)
        found.follow(mark)

    taken = {
        name: median_seconds(work, context.placement, 5)
        for name, work in (("copy", copy), ("compute", lambda: _busy(context)), ("both", both))
    }
    shape = f"{size >> 20} MiB"
    context.timed("copy beside computing", shape, "copy alone", taken["copy"], Cost(bus=size))
    for name, how in (("compute", "computing alone"), ("both", "both at once")):
        context.run.row("copy beside computing", shape, how, round(taken[name] * 1e3, 3), "ms")
    hidden = (taken["copy"] + taken["compute"] - taken["both"]) / min(taken["copy"], taken["compute"])
    context.run.row(
        "copy beside computing", shape, "share that is hidden", round(hidden, 3), "of the shorter"
    )
