"""Checks static decoding steps and steps that are launched ahead, and measures what they cost and save."""

from __future__ import annotations

import time
from itertools import islice

import torch

from mpic.engine.base import GenerationRequest
from mpic.engine.native.engine import NativeEngine
from mpic.kv.chunk import Chunk
from mpic.model.loaded import LoadedModel
from mpic.prompt.segments import Prompt
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    compile_all,
    decoding,
    engine_for,
    random_model,
    request_of,
)
from mpic_lab.gpu import profile
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.roofline import Costs
from mpic_lab.gpu.supervise import SectionRun

SPARE = 1024
"""Tokens of the pool beside a request's own text and answer."""
WAYS = {
    "graphs on": {"cuda_graphs": "on", "ahead": True},
    "graphs off": {"cuda_graphs": "off", "ahead": True},
    "graphs on, one step after the other": {"cuda_graphs": "on", "ahead": False},
}
"""Engines that are compared with the first, and their options."""


def graphs(run: SectionRun) -> None:
    """Decodes the same prompts with and without CUDA graphs, and ahead or not: answers are the same, a step takes fewer
    launches."""
    context = Context(run)
    _exact(context)
    sizes = context.sizes
    model = sizes.models[-1]
    loaded, costs = context.model(model)
    ids, most = Ids(model.decoder.vocabulary), max(sizes.batches)
    chunks = ids.chunks(sizes.set_chunks, sizes.chunk)
    prompts = [ids.framed(chunks, sizes.text) for _ in range(most)]
    room = sizes.set_chunks * (sizes.chunk + 16) + most * (sizes.text + sizes.tokens + SPARE)
    answers: dict[str, list[tuple[int, ...]]] = {}
    for way, options in WAYS.items():
        began = time.perf_counter()
        with engine_for(loaded, room, max_running=most, **options) as engine:
            shape, how = f"steps of {most} rows and fewer", f"{context.attention}, {way}"
            run.row("engine starts", shape, how, round(time.perf_counter() - began, 2), "s")
            # the engine has compared both kinds of steps with the usual ones, or it would not have started
            if options["cuda_graphs"] == "on":
                kinds = {"cuda_graphs": engine.executor.static}
                if context.placement.device.type == "cuda":  # others have no pieces
                    kinds["piecewise_graphs"] = engine.executor.piecewise
                for detail, steps in kinds.items():
                    of = f"steps of {steps.most} rows and fewer" if steps else detail
                    run.row(
                        "compared", of, loaded.info.details.get(detail, ""), None, "", ok=steps is not None
                    )
                    run.row("buffers", of, how, steps.nbytes >> 20 if steps else 0, "MiB")
            answers[way] = _decode(context, costs, engine, how, chunks, prompts)
            ahead = engine.stats()["counters"].get("steps_ahead", 0)
            run.row("steps launched ahead", shape, how, ahead, "", ok=bool(ahead) == options["ahead"])
    first, *others = WAYS
    for other in others:
        same = sum(a == b for a, b in zip(answers[first], answers[other], strict=True))
        # bf16 may round to another token
        exact = {"ok": same == most} if context.placement.dtype == torch.float32 else {}
        shape, how = f"{most} prompts", f"{first}; {other}"
        run.row("answers that are the same", shape, how, same, "answers", **exact)


def _exact(context: Context) -> None:
    """Checks that a small fp32 model answers a batch alike in every way, token by token."""
    placement = BenchDevice(context.placement.device, torch.float32)
    decoder = DecoderShape(2, 256, 4, 256, 2, 1000, 2048)
    loaded = LoadedModel(random_model(decoder, placement, gain=4.0, seed=3), None, "check")
    loaded.choose_attention(context.attention)
    ids, tokens = Ids(decoder.vocabulary), 4 if context.run.quick else 48
    chunks = ids.chunks(2, 16)
    prompts = [ids.framed(chunks, 8) for _ in range(2 if context.run.quick else 8)]
    answers = []
    for options in WAYS.values():
        with engine_for(loaded, 1024 + len(prompts) * 1024, max_running=len(prompts), **options) as engine:
            compile_all(engine, chunks)
            streams = [engine.submit(request_of(prompt, "reuse", tokens)) for prompt in prompts]
            answers.append([tuple(stream.result().token_ids) for stream in streams])
    for way, found in zip(list(WAYS)[1:], answers[1:], strict=True):
        same = sum(a == b for a, b in zip(answers[0], found, strict=True))
        shape, how = f"{len(prompts)} prompts, float32", f"{next(iter(WAYS))}; {way}"
        context.run.row("answers that are the same", shape, how, same, "answers", ok=same == len(prompts))


def _decode(
    context: Context, costs: Costs, engine: NativeEngine, how: str, chunks: list[Chunk], prompts: list[Prompt]
) -> list[tuple[int, ...]]:
    """Writes the rows of one engine and returns the answers to all prompts at once."""
    sizes = context.sizes
    compile_all(engine, chunks)
    linked = len(chunks) * sizes.chunk

    def requests(batch: int, tokens: int) -> list[GenerationRequest]:
        return [request_of(prompt, "reuse", tokens) for prompt in prompts[:batch]]

    for batch in sizes.batches:
        with decoding(engine, requests(batch, 2)) as deltas:  # compiles the kernels that the batch needs
            list(deltas)
        with decoding(engine, requests(batch, 2 * sizes.tokens)) as deltas:
            found = profile.steps_of(engine, lambda: list(islice(deltas, sizes.tokens)))
        cost = costs.step(batch, linked, linked + batch * sizes.text)
        profile.step_rows(context, f"decoding, batch {batch} over the same {linked} tokens", how, found, cost)
    streams = [engine.submit(request) for request in requests(len(prompts), sizes.tokens)]
    return [tuple(stream.result().token_ids) for stream in streams]
