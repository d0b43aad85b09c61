"""Checks whole models on this device: the load-time self-test on real shapes, and the engine against itself."""

from __future__ import annotations

import functools
import gc
import tempfile
from pathlib import Path

import torch

from mpic.engine.base import Engine
from mpic.library import Library
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import (
    PAGE,
    DecoderShape,
    Ids,
    compile_all,
    prompt_of,
    random_model,
    request_of,
    text_chunk,
)
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.models import MOST, TOLERANCE, LoadedModel, native_engine, self_test
from mpic_lab.gpu.supervise import SectionRun


def self_tests(run: SectionRun) -> None:
    """Test the engine, in fp32 where answers must be identical; then real shapes under each attention."""
    context = Context(run)
    for attention in ("auto", "triton"):
        context.check(
            "engine check",
            "a chunk in front of a prompt: tokens as without reuse, from the device and from its file",
            attention,
            functools.partial(_reuses, context, attention),
            0.0,
            "tokens that differ",
        )
    context.check(
        "engine check",
        "a batch of answers over two chunks: the same tokens with CUDA graphs and without",
        context.attention,
        functools.partial(_batches, context),
        0.0,
        "answers that differ",
    )
    for model in context.sizes.models:
        loaded = model.build(context.placement)
        for attention in ("auto", "triton"):
            context.check(
                "self-test",
                f"{model.name}, {str(context.placement.dtype).removeprefix('torch.')}",
                attention,
                functools.partial(_self_test, loaded, attention),
                MOST * TOLERANCE[context.placement.dtype],  # the self-test already refuses smaller errors
                "relative error",
            )
        del loaded
        gc.collect()
        context.free()


def _self_test(loaded: LoadedModel, attention: str) -> float:
    loaded.choose_attention(attention)
    return self_test(loaded)


def _small(context: Context, attention: str) -> tuple[LoadedModel, int]:
    """Return a small model in float32, and the size of its vocabulary."""
    placement = BenchDevice(context.placement.device, torch.float32)
    decoder = DecoderShape(
        layers=2, hidden=256, heads=4, intermediate=256, kv_heads=2, vocabulary=1000, context=2048
    )
    loaded = LoadedModel(random_model(decoder, placement, gain=4.0, seed=3), None, "check")
    loaded.choose_attention(attention)
    return loaded, decoder.vocabulary


def _batches(context: Context) -> float:
    """Return how many answers of a batch differ between decoding in CUDA graphs and without."""
    loaded, vocabulary = _small(context, context.attention)
    ids, tokens, count = Ids(vocabulary), 4 if context.run.quick else 48, 2 if context.run.quick else 8
    chunks = ids.chunks(2, 16)
    prompts = [ids.framed(chunks, 8) for _ in range(count)]
    answers = []
    for graphs in ("on", "off"):
        with native_engine(loaded, 2048 + count * 1024, max_running=count, cuda_graphs=graphs) as engine:
            compile_all(engine, chunks)
            streams = [engine.submit(request_of(prompt, "reuse", tokens)) for prompt in prompts]
            answers.append([list(stream.result().token_ids) for stream in streams])
    return float(sum(a != b for a, b in zip(*answers, strict=True)))


def _reuses(context: Context, attention: str) -> float:
    """Return how many tokens differ between ``full`` and ``reuse`` of a chunk that begins the prompt, which is exact:
    from the device, then in a new engine that reads the chunk's file."""
    loaded, vocabulary = _small(context, attention)
    ids, tokens = Ids(vocabulary), 4 if context.run.quick else 24
    chunk, text = text_chunk(ids.fresh(20 if context.run.quick else 100)), ids.fresh(30)

    def answer(engine: Engine, policy: str) -> list[int]:
        stream = engine.submit(request_of(prompt_of(chunk, text), policy, tokens))
        return list(stream.result().token_ids)

    with (
        tempfile.TemporaryDirectory(prefix="mpic-report-") as folder,
        Library.open(Path(folder, "l")) as library,
    ):
        # closing the engine writes unsaved chunks
        with native_engine(loaded, 64 * PAGE, library.store) as engine:
            expected = answer(engine, "full")
            engine.compile(chunk).result()
            found = [answer(engine, "reuse")]
        with native_engine(loaded, 64 * PAGE, library.store) as engine:
            found.append(answer(engine, "reuse"))
    lengths = [len(answer) for answer in (expected, *found)]
    if set(lengths) != {tokens}:
        raise RuntimeError(f"answers of {lengths} tokens, not {tokens}")
    return float(sum(a != b for answer in found for a, b in zip(expected, answer)))
