"""vLLM on this device, where it is installed: the papers' headline with links inside vLLM, and unchanged vLLM's
decoding beside the native engine's.

The modules that import vLLM, or packages that a bare machine lacks, are imported when a section runs.
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mpic.library import Library
from mpic_lab.bench import checkpoint
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    TowerShape,
    compile_all,
    first_token,
    random_model,
    request_of,
)
from mpic_lab.gpu import record
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.models import LLAVA, QWEN, ModelShape
from mpic_lab.gpu.supervise import SectionRun

if TYPE_CHECKING:
    from mpic.engine.base import Engine
    from mpic_lab.bench.baseline_vllm import PlainVLLM
    from mpic_lab.bench.ttft import Prompts
    from mpic_lab.bench.vllm_pair import Settings

WORK = 12 << 30
"""Bytes of a GPU that two engines may take beside weights and pools."""
ANSWERS = 4
"""Times as many tokens as the native engine's batches decode: vLLM's answers begin one after the other."""


class InsideSizes(NamedTuple):
    """Sizes of the sections here; all others are those of the native sections.

    Args:
        images, decoding: the models' shapes.
        tower: an encoder of one layer, so that it costs next to nothing, with the tokens of an image.
        block: tokens of a block of vLLM's cache.
    """

    images: ModelShape
    decoding: ModelShape
    tower: TowerShape
    block: int


FULL = InsideSizes(LLAVA, QWEN, TowerShape(1, 1024, 16, 756, 14), 128)
"""2,916 tokens an image, a square that is about LLaVA-1.6's 2,880."""
_TINY = ModelShape("tiny", DecoderShape(2, 128, 4, 64, 4, 300))
QUICK = InsideSizes(_TINY, _TINY, TowerShape(1, 32, 2, 56, 8), 32)


def _sizes(run: SectionRun) -> InsideSizes:
    return QUICK if run.quick else FULL


def _weights(decoder: DecoderShape) -> int:
    """Returns about how many weights a decoder has."""
    d, kv_heads = decoder, decoder.kv_heads or decoder.heads
    attention = 2 * d.hidden * d.hidden * (1 + kv_heads / d.heads)
    return int(d.layers * (attention + 3 * d.hidden * d.intermediate) + d.vocabulary * d.hidden)


@contextmanager
def _saved(context: Context, decoder: DecoderShape, tower: TowerShape) -> Iterator[str]:
    """Yields the folder of a random model, whose memory on the device is free again."""
    with tempfile.TemporaryDirectory(prefix="mpic-report-") as folder:
        model = random_model(decoder, context.placement, tower)
        checkpoint.save(model, decoder, Path(folder, "model"))
        del model
        gc.collect()
        context.free()
        yield str(Path(folder, "model"))


# ---- first tokens


def first_tokens(run: SectionRun) -> None:
    """Measures 1 to 10 images: vLLM with its prefix cache, links inside vLLM, and vLLM with everything that a link
    reuses in its prefix cache."""
    from mpic_lab.bench import ttft, vllm_pair

    context, sizes = Context(run), _sizes(run)
    wanted = context.sizes.headline
    fits = lambda count: _bytes(context, _settings(context, count)) <= context.free()
    counts = sorted(filter(fits, wanted.images), reverse=True)  # the largest must not be cut off
    name = f"first token inside vLLM, {sizes.images.name}"
    if len(counts) < len(wanted.images):
        missing = sorted(set(wanted.images) - set(counts))
        context.left_out(name, f"{missing} images", "two engines do not fit this device's memory")
    if not counts:
        return
    settings = _settings(context, counts[0])
    with (
        _saved(context, settings.decoder, sizes.tower) as model,
        tempfile.TemporaryDirectory(prefix="mpic-report-", ignore_cleanup_errors=True) as folder,
        Library.open(Path(folder, "library")) as library,
        vllm_pair.engines_of(settings, context.placement, model, library) as (plain, ours),
    ):
        compile_all(ours, ttft.Prompts(settings).chunks)
        for count in counts:
            shape = f"{count} images of {sizes.tower.tokens} tokens"
            if run.left < 10:
                context.left_out(name, shape, "out of time")
                continue
            taken = _of_images(replace(settings, images=count), plain, ours, wanted.repeats)
            for how, milliseconds in taken.items():
                run.row(name, shape, how, round(milliseconds, 3), "ms")
            if count == counts[0]:
                _heads(run, shape, taken)


def _settings(context: Context, images: int) -> Settings:
    from mpic_lab.bench.vllm_pair import Settings

    sizes, wanted = _sizes(context.run), context.sizes.headline
    length = images * sizes.tower.tokens + wanted.system + wanted.text
    decoder = replace(sizes.images.decoder, context=-(-(length + 64) // sizes.block) * sizes.block)
    given = {"images": images, "system": wanted.system, "text": wanted.text, "block": sizes.block}
    return Settings(decoder, sizes.tower, **given, answers=0, arrivals=0, questions=1)


def _bytes(context: Context, settings: Settings) -> int:
    """Returns about how many bytes of the device two engines take."""
    dtype, decoder = context.placement.dtype, settings.decoder
    pool = (decoder.context + settings.block) * decoder.token_bytes(dtype)
    return 2 * (_weights(decoder) * dtype.itemsize + pool) + WORK


def _of_images(settings: Settings, plain: PlainVLLM, ours: Engine, repeats: int) -> dict[str, float]:
    """Returns the median milliseconds of each way, after one prompt that does not count."""
    from mpic_lab.bench import ttft
    from mpic_lab.bench.vllm_pair import ALONE, FLOOR, LINK, VllmAlone

    prompts = ttft.Prompts(settings)
    alone = VllmAlone(settings, plain, prompts)
    ways: dict[str, Callable[[], float]] = {
        ALONE: alone.first,
        LINK: lambda: _linked(settings, ours, prompts),
        FLOOR: alone.first_cached,
    }
    # the chunks come into host memory, which is page-locked for them: that may take longer than a link waits
    first_token(ours, request_of(prompts.make(prompts.chunks), LINK, 2))
    return {how: median([way() for _ in range(repeats + 1)][1:]) for how, way in ways.items()}


def _linked(settings: Settings, ours: Engine, prompts: Prompts) -> float:
    from mpic_lab.bench.vllm_pair import LINK

    taken, usage = first_token(ours, request_of(prompts.make(prompts.chunks), LINK, 2))
    if usage.computed != settings.computed:
        reasons = [use.reason for use in usage.chunks]
        raise BenchFailed(f"{LINK} computed {usage.computed} of {settings.computed} tokens {reasons}")
    return taken


def _heads(run: SectionRun, shape: str, taken: dict[str, float]) -> None:
    from mpic_lab.bench.vllm_pair import ALONE, FLOOR, LINK

    cut, over = 100 * (1 - taken[LINK] / taken[ALONE]), taken[LINK] / taken[FLOOR]
    run.row("headline", shape, LINK, round(cut, 2), "% less", headline="vllm_ttft_cut_percent", goal=">= 85")
    run.row("headline", shape, LINK, round(over, 3), "", headline="vllm_mpic32_over_floor", goal="<= 1.25")


# ---- decoding


def decode(run: SectionRun) -> None:
    """Measures how fast unchanged vLLM decodes the batches of the section ``decode``, and compares."""
    from mpic.engine.vllm.frontend.options import prepare_environment
    from mpic_lab.bench.baseline_vllm import PlainVLLM
    from mpic_lab.bench.vllm_pair import engine_config

    context, sizes = Context(run), _sizes(run)
    decoder, cases = _cases(context)
    if not cases:
        return
    with _saved(context, decoder, sizes.tower) as folder:
        cpu = prepare_environment()
        from mpic.engine.vllm.frontend.model import describe_model  # imports vLLM

        tokens, batch = max(case.tokens for case in cases), max(case.batch for case in cases)
        config = engine_config(
            decoder, context.placement, folder, tokens, sizes.block, max_running=max(2, batch)
        )
        with closing(PlainVLLM(config, describe_model(config, cpu), cpu)) as engine:
            ids, ratios = Ids(decoder.vocabulary), []
            for case in cases:
                measure = functools.partial(_rate, context, engine, ids, case, ratios)
                context.attempt("decode, vLLM", case.shape, measure)
    if ratios:
        head = {"headline": "decode_over_vllm", "goal": ">= 0.85"}
        run.row("headline", "the batch that is worst", "native over vLLM", round(min(ratios), 3), "", **head)


class PrefixBatch(NamedTuple):
    """A batch over prompts that are in the prefix cache.

    Args:
        prefix: tokens of each prompt, the same for all when it is ``shared``.
        tokens: that the pool must hold.
        shape: as the native engine's row says it.
    """

    batch: int
    prefix: int
    shared: bool
    tokens: int
    shape: str


def _cases(context: Context) -> tuple[DecoderShape, list[PrefixBatch]]:
    """Returns the decoder, and the batches of the section ``decode`` that fit this device."""
    from mpic_lab.gpu.decoding import shape_of

    sizes, inside = context.sizes, _sizes(context.run)
    own = sizes.text + ANSWERS * sizes.tokens + 2 * inside.block
    longest = max(sizes.contexts) * sizes.set_chunks * sizes.chunk
    context_length = -(-(longest + own) // inside.block) * inside.block
    decoder = replace(inside.decoding.decoder, context=context_length)
    itemsize = context.placement.dtype.itemsize
    room = context.free() - _weights(decoder) * itemsize - WORK
    cases = []
    for batch in sizes.batches:
        for width in sizes.contexts:
            for shared in (False, True):
                prefix = width * sizes.set_chunks * sizes.chunk
                tokens = (prefix + inside.block) * (1 if shared else batch) + batch * own
                case = PrefixBatch(batch, prefix, shared, tokens, shape_of(batch, prefix, shared))
                if tokens * decoder.token_bytes(context.placement.dtype) <= room:
                    cases.append(case)
                else:
                    context.left_out("decode, vLLM", case.shape, "it does not fit this device's memory")
    return decoder, cases


def _rate(context: Context, engine: PlainVLLM, ids: Ids, case: PrefixBatch, ratios: list[float]) -> None:
    """Writes the rows of one batch, and notes the native engine's ratio to it."""
    from mpic_lab.bench.ttft_vllm import rate

    run, sizes = context.run, context.sizes
    if run.left < 15:
        context.left_out("decode, vLLM", case.shape, "the section's time is nearly up")
        return
    prefixes = [ids.fresh(case.prefix) for _ in range(1 if case.shared else case.batch)]
    for primed in [engine.ask([prefix], 1) for prefix in prefixes]:
        primed.result()
    times: list[list[float]] = [[] for _ in range(case.batch)]
    answers = [
        engine.ask(
            [(*prefixes[row % len(prefixes)], *ids.fresh(sizes.text))], ANSWERS * sizes.tokens, times[row]
        )
        for row in range(case.batch)
    ]
    for answer in answers:
        answer.result()
    theirs = rate(times)
    run.row("decode, vLLM", case.shape, "vllm", round(theirs, 4), "tokens/s")
    found = [
        row["value"]
        for row in record.latest(record.read(run.out))
        if row["section"] == "decode" and (row["measured"], row["shape"]) == ("decode", case.shape)
    ]
    if found and found[-1] is not None:
        ratios.append(found[-1] / theirs)
        run.row("decode, native over vLLM", case.shape, "vllm", round(ratios[-1], 3), "")
