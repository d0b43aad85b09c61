"""Sizes at which every bench of the native engine takes seconds."""

from __future__ import annotations

import torch
from small_models import SMALL

from mpic_lab.bench import (
    decode,
    dtypes,
    flat,
    flops,
    forms,
    frames,
    memory,
    parallel,
    peaks,
    rates,
    retrieval,
    serving,
    start,
    ttft,
)
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import DecoderShape, TowerShape

CPU = BenchDevice(torch.device("cpu"), torch.float32)
TINY = DecoderShape(layers=2, hidden=64, heads=2, intermediate=64, vocabulary=300, context=2048)
TOWER = TowerShape(layers=1, hidden=32, heads=2, size=56, patch=8)
LOADS = {
    "same": memory.Load(requests=4, chunks=2, chunk_tokens=64, answer=4),
    "grown": memory.Load(requests=2, chunks=2, chunk_tokens=24, answer=4),
}
SERVED = {"pool": 3, "linked": 2, "chunk_tokens": 24, "answer": 2, "backlog": 0.05, "seconds": 0.05}
FEW = {"policies": ("full", "cacheblend-15", "legolink-16"), "text": 8, "answer": 2}
SETTINGS = {
    "ttft": ttft.Settings(TINY, TOWER, images=2, system=8, text=24, repeats=1, vision_repeats=1),
    "flat": flat.Settings(
        TINY, TINY, documents=2, totals=(64, 128), wide_totals=(128, 256), fixed=32, text=8, repeats=1
    ),
    "rates": rates.Settings(
        TINY, ("10",), 2048, 2, document_tokens=48, **FEW, rates=(10.0,), seconds=1.0, repeats=2
    ),
    "flops": flops.Settings(decoder=TINY, counts=(1, 2), chunk_tokens=48, text=8),
    "frames": frames.Settings(TINY, TOWER, frames=8, window=3, system=8, text=4, question=8),
    "memory": memory.Settings(
        TINY, **LOADS, counts=(1, 2), rates=(1.0,), seconds=0.05, text=8, policy="mpic-4"
    ),
    "serving": serving.Settings(TINY, **SERVED, text=8, shares=(0.5,)),
    "peaks": peaks.Settings(TINY, {"short": 24, "long": 48}, 3, 2, 8, 2, backlog=0.05, repeats=2),
    "parallel": parallel.Settings(
        TINY, 2, 24, (0, 1, 2), TOWER, (1,), text=8, many=3, many_text=6, repeats=1
    ),
    "decode": decode.Settings(
        decoder=TINY, batches=(1, 3), chunks=2, chunk_tokens=24, text=8, tokens=6, repeats=1
    ),
    "forms": forms.Settings(SMALL, batches=(1, 3), text=8, tokens=8, repeats=1),
    "dtype": dtypes.Settings(
        TINY,
        TOWER,
        documents=2,
        document_tokens=48,
        system=8,
        question=8,
        short=24,
        answers=(1, 3),
        tokens=400,  # they are generated at the same time, although requests are sent one after the other
        repeats=1,
    ),
    "start": start.Settings(uncounted=0, repeats=1),
    "retrieval": retrieval.Settings(TINY, TOWER, references=2, context=24, policy="mpic-4", repeats=1),
}
