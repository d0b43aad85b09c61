"""Decoding speed over linked chunks against transformers' own ``generate``."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Engine, GenerationUsage
from mpic.errors import ModelRefused
from mpic.kv.chunk import Chunk
from mpic_lab.bench.baseline import StockGenerator
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import (
    BenchDevice,
    BenchFailed,
    Report,
    Series,
    Ticker,
    bench,
    interleave,
    paired,
)
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    BenchModel,
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    request_of,
)

CACHES = ("dynamic", "static")
LONGER = 64
"""Tokens that the untimed requests of a batch ask for beyond those of the timed request; they are aborted before they
finish."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``decode`` bench."""

    decoder: DecoderShape = BENCH_DECODER
    batches: tuple[int, ...] = (1, 8)
    chunks: int = 8
    chunk_tokens: int = 512
    text: int = 64
    tokens: int = 20
    policy: str = "mpic-16"
    repeats: int = 3
    seed: int = 0

    @property
    def linked(self) -> int:
        return self.chunks * self.chunk_tokens


@bench(
    "decode",
    "tokens a second over 4k linked tokens a request",
    Settings,
    quick={
        "decoder": DecoderShape(
            layers=6, hidden=512, heads=8, intermediate=1024, vocabulary=8_000, context=8192
        ),
        "chunk_tokens": 256,
        "tokens": 16,
    },
    wants={"batch1_over_transformers": ">= 1.0", "batch8_over_transformers": ">= 1.0"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure each batch size in several columns: different linked chunks for each request, with keys and values in
    the model's dtype and in 16 bits, the same chunks for all, and transformers' caches."""
    model = make_model(settings.decoder, placement, seed=settings.seed)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    length = settings.linked + settings.text
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    plots: dict[int, dict[str, Series]] = {}
    most = max(settings.batches)
    spare = settings.text + settings.chunks * 64 + settings.tokens + 512
    tokens = most * (settings.linked + 3 * spare)
    with ExitStack() as opened:
        engine = opened.enter_context(engine_for(model, tokens))
        halved = _with_half_kv(opened, model, tokens)
        ticker.expect(len(settings.batches) * ((settings.repeats + 1) * (4 if halved else 3) + len(CACHES)))
        sets = []
        for i in range(most):
            ticker.say(f"compiling the chunks of request {i + 1}")
            sets.append(ids.chunks(settings.chunks, settings.chunk_tokens))
            for one in filter(None, (engine, halved)):
                compile_all(one, sets[-1])
        for batch in settings.batches:
            columns: dict[str, Callable[[], float]] = {
                "distinct": decoded(engine, settings, ids, sets[:batch]),
                "shared": decoded(engine, settings, ids, [sets[0]] * batch),
            }
            if halved is not None:
                columns["half"] = decoded(halved, settings, ids, sets[:batch])
            baselines = {
                k: StockGenerator(model.stock, settings.decoder, k, batch, length, settings.tokens)
                for k in CACHES
            }
            for kind, baseline in baselines.items():
                with ticker.step(f"transformers, {kind} cache"):
                    tried = baseline(tokens=4)
                first = {"table": "transformers, first run of each cache", "batch": batch, "cache": kind}
                rows.append(first | {"tokens_per_s": round(tried, 3)})
            best = max(CACHES, key=lambda kind: rows[-len(CACHES) + CACHES.index(kind)]["tokens_per_s"])
            columns["transformers"] = baselines[best]
            samples = plots[batch] = interleave(columns, settings.repeats, ticker)
            names = {"distinct": "linked, chunks of its own", "shared": "linked, same chunks"}
            names["half"] = "linked, chunks of its own, KV in 16 bits"
            for name, sample in samples.items():
                label = names.get(name, f"transformers, {best} cache")
                rows.append({"table": f"batch {batch}", "column": label} | sample.row("tokens_per_s"))
            headline[f"batch{batch}_over_transformers"] = paired(samples["distinct"], samples["transformers"])
            if "half" in samples:
                headline[f"batch{batch}_half_kv_over_float32"] = paired(samples["half"], samples["distinct"])
            del columns, baselines, baseline
            gc.collect()
    notes = {
        "model": model.description,
        "kv_tokens": length,
        "distinct": "every request links chunks no other request has; the headline is about these",
        "shared": "all requests link the same chunks and read them together",
        "transformers": "generate over a filled cache of the same length, a real batch, SDPA, not compiled; "
        "the cache that is faster in a first run is the one that is compared",
        "rate": "from the first new token to the last, so no prefill is counted",
    }
    return Report(rows, headline, notes, lambda figure: plot_rates(figure, plots))


def _with_half_kv(opened: ExitStack, model: BenchModel, tokens: int) -> Engine | None:
    """Start an engine that keeps keys and values in 16 bits; None if the model or device has no such option."""
    try:
        return opened.enter_context(engine_for(model, tokens, kv_dtype="float16"))
    except ModelRefused:
        return None


def decoded(engine: Engine, settings: Settings, ids: Ids, sets: list[list[Chunk]]) -> Callable[[], float]:
    """Return the tokens per second of a batch. The last request is timed, and the others begin before it and continue
    past its end, so that every timed step decodes the whole batch; BenchFailed is raised if they did not."""

    def measure() -> float:
        streams, submitted = [], []
        for i, chunks in enumerate(sets):
            prompt = ids.framed(chunks, settings.text)
            longer = 0 if i == len(sets) - 1 else LONGER
            submitted.append(time.perf_counter())
            streams.append(engine.submit(request_of(prompt, settings.policy, settings.tokens + longer)))
        timed = [(time.perf_counter(), delta) for delta in streams[-1]]
        for stream in streams[:-1]:
            stream.abort()
        for at, stream in zip(submitted, streams[:-1]):
            began, ended = timed[0][0] - at, timed[-1][0] - at
            expect_beside(stream.result().usage, settings.tokens, 1e3 * began, 1e3 * ended)
        usage = timed[-1][1].usage
        if usage.prefix_hit or any(c.tier != "device" for c in usage.chunks if c.reused):
            raise BenchFailed("a request found more, or less, than its resident chunks")
        return len(sets) * (len(timed) - 1) / (timed[-1][0] - timed[0][0])

    return measure


def expect_beside(usage: GenerationUsage, tokens: int, began: float, ended: float) -> None:
    """Check that a request was decoded in every step that another one was timed for.

    Args:
        tokens: number of tokens of the timed request; this request asked for ``LONGER`` more.
        began, ended: milliseconds from its submission to the first and to the last token of the timed one.

    Raises:
        BenchFailed: the request was not decoded in every such step.
    """
    if usage.completion_tokens < tokens or usage.ttft_ms > began or usage.preemptions:
        raise BenchFailed(f"a request of the batch began late or paused ({usage.completion_tokens} tokens)")
    if usage.completion_tokens == tokens + LONGER and usage.total_ms < ended:
        raise BenchFailed(f"a request of the batch ended early, after {usage.completion_tokens} tokens")


def plot_rates(figure: Any, samples: dict[int, dict[str, Series]]) -> None:
    """Draw the tokens a second of each batch size."""
    for axes, (batch, found) in zip(
        figure.subplots(1, len(samples), squeeze=False)[0], samples.items(), strict=True
    ):
        axes.bar(list(found), [sample.median for sample in found.values()])
        axes.set_title(f"batch {batch}")
        axes.set_ylabel("tokens a second")
