"""Measures decoding over linked chunks, in batches."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

from mpic.kv.chunk import Chunk
from mpic_lab.bench import decode as decoding
from mpic_lab.bench.workload import Ids, compile_all
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.models import LoadedModel, native_engine
from mpic_lab.gpu.roofline import Cost
from mpic_lab.gpu.supervise import SectionRun

SPARE = 1024
"""Tokens of the pool beside a request's own text and answer: its page ends, heads that are computed again."""


def decode(run: SectionRun) -> None:
    """Measure batches whose requests link different chunks, and batches that link the same; batches that do not fit
    are reported."""
    context = Context(run)
    sizes = context.sizes
    longest = max(sizes.contexts) * sizes.set_chunks * sizes.chunk
    model = sizes.models[-1]
    decoder = replace(model.decoder, context=max(model.decoder.context, 2 * longest))
    model = replace(model, decoder=decoder)
    loaded, costs = context.model(model)
    count = _sets_that_fit(context, loaded)
    ids = Ids(model.decoder.vocabulary)
    own = sizes.text + sizes.tokens + SPARE
    chunks = count * sizes.set_chunks
    with native_engine(
        loaded, chunks * (sizes.chunk + 16) + max(sizes.batches) * own, cuda_graphs="auto"
    ) as engine:
        sets = [ids.chunks(sizes.set_chunks, sizes.chunk) for _ in range(count)]
        began = time.perf_counter()
        compile_all(engine, [chunk for one in sets for chunk in one])
        cost = Cost(chunks * costs.compiled(sizes.chunk).flops, costs.weights)
        shape, taken = f"{chunks} chunks of {sizes.chunk} tokens", time.perf_counter() - began
        rate = chunks * sizes.chunk / taken
        context.rate("compiling chunks", shape, context.attention, rate, taken, cost, "tokens/s")
        for batch in sizes.batches:
            for width in sizes.contexts:
                for shared in (False, True):
                    if run.left < 20:
                        context.left_out(
                            "decode", f"batch {batch}, {width} sets", "the section's time is nearly up"
                        )
                        return
                    context.attempt(
                        "decode",
                        f"batch {batch}, {width} sets, {'shared' if shared else 'own'}",
                        functools.partial(_batch, context, engine, costs, ids, sets, batch, width, shared),
                    )


def _batch(
    context, engine, costs, ids, sets: list[list[Chunk]], batch: int, width: int, shared: bool
) -> None:
    """Write one row: a batch over contexts of ``width`` sets each."""
    sizes = context.sizes
    tokens = width * sizes.set_chunks * sizes.chunk
    shape = shape_of(batch, tokens, shared)
    if (1 if shared else batch) * width > len(sets):
        context.left_out(
            "decode", shape, f"{batch * width} sets of chunks do not fit; {len(sets)} are resident"
        )
        return
    requests = [
        [chunk for one in sets[at : at + width] for chunk in one]
        for at in ([0] * batch if shared else range(0, batch * width, width))
    ]
    settings = decoding.Settings(text=sizes.text, tokens=sizes.tokens, policy="reuse")
    warm = replace(settings, tokens=max(2, sizes.tokens // 8))  # compiles the kernels that this batch needs
    decoding.decoded(engine, warm, ids, requests)()
    rate = decoding.decoded(engine, settings, ids, requests)()
    unique = tokens * (1 if shared else batch) + batch * (sizes.text + sizes.tokens // 2)
    cost = costs.step(batch, tokens + sizes.text, unique)
    step = batch / rate
    more = {"step_ms": round(step * 1e3, 3)}
    context.rate("decode", shape, context.attention, rate, step, cost, "tokens/s", **more)


def shape_of(batch: int, tokens: int, shared: bool) -> str:
    return f"batch {batch}, {tokens} tokens {'shared' if shared else 'of its own each'}"


def _sets_that_fit(context: Context, loaded: LoadedModel) -> int:
    """Return the number of sets that are wanted, or that fit into three quarters of the free memory together with the
    requests."""
    sizes = context.sizes
    token = loaded.shape.per_token * context.placement.dtype.itemsize
    requests = max(sizes.batches) * (sizes.text + sizes.tokens + SPARE)
    room = 0.75 * context.free() / token - requests
    fits = room / (sizes.set_chunks * (sizes.chunk + 16))
    return sizes.sets if fits >= sizes.sets else max(1, int(fits))
