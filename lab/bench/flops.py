"""Operations of a prefill under each policy, counted, not timed. (KV Packet, section 4.2, counts what prepares the
retrieved caches alone; here the rows of the text and the first token's count, and turning keys does not.)

Every policy answers once over the same chunks; ``mpic_lab.eval.flops`` counts the engine's computation. The load of the
machine does not matter. KV Packet's adapter is not trained, which changes answers and not operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpic.link import parse_policy
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, Report, Row, Ticker, bench
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    first_token,
    request_of,
)
from mpic_lab.eval.flops import Flops


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``flops`` bench.

    Args:
        counts: numbers of chunks in a prompt.
        text: tokens around the chunks: half of them before, half behind.
        soft: tokens of a packet's header, and of its trailer.
    """

    decoder: DecoderShape = BENCH_DECODER
    counts: tuple[int, ...] = (2, 4, 8)
    chunk_tokens: int = 576
    text: int = 64
    soft: int = 8
    policies: tuple[str, ...] = (
        "full", "cacheblend-15", "random-15", "mpic-64", "mpic-32", "mpic-16", "legolink-16", "attnlink-16", "block-1",
        "legolink-0", "reuse", "packet",
    )  # fmt: skip
    seed: int = 0


@bench(
    "flops",
    "operations of a prefill under each policy, counted",
    Settings,
    quick={
        "decoder": DecoderShape(layers=4, hidden=256, heads=4, intermediate=512, vocabulary=2_000),
        "counts": (2, 4),
        "chunk_tokens": 256,
    },
    wants={"full_over_mpic32": "> 8", "cacheblend15_over_legolink16": "> 1"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Make one table with a row for each policy and number of chunks."""
    model = make_model(settings.decoder, placement, seed=settings.seed, packet=settings.soft)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    flops = Flops(model.stock)
    chunks = ids.chunks(max(settings.counts), settings.chunk_tokens)
    wrappings = sorted({p.wrapping for p in map(parse_policy, settings.policies) if p.uses_chunks})
    chunk_tokens = settings.chunk_tokens + 2 * settings.soft
    room = (len(wrappings) + 2) * (len(chunks) * chunk_tokens + settings.text + 64)
    counted: dict[tuple[int, str], float] = {}
    rows: list[Row] = []
    ticker.expect(len(settings.counts) * len(settings.policies))
    with engine_for(model, room) as engine:
        for wrapping in wrappings:
            compile_all(engine, chunks, wrapping)
        for count in settings.counts:
            for policy in settings.policies:
                with ticker.step(f"{policy} over {count}"):
                    prompt = ids.framed(chunks[:count], settings.text)
                    _, usage = first_token(engine, request_of(prompt, policy, 2))
                total = counted[count, policy] = flops.of(usage, parse_policy(policy))
                looked = total - flops.of(replace(usage, probed=0))
                rows.append(
                    {
                        "chunks": count,
                        "tokens": usage.prompt_tokens,
                        "policy": policy,
                        "computed": usage.computed,
                        "probed": usage.probed,
                        "deciding": round(looked / total, 3),
                        "gflop": round(counted[count, policy] / 1e9, 2),
                        "full_over": round(counted[count, "full"] / counted[count, policy], 2),
                    }
                )
    most = max(settings.counts)
    notes = {
        "model": model.description,
        "gflop": "2 a weight and computed token, 4 x head_dim a query, key and head; compiling chunks is not in it",
        "probed": "tokens that pass the first layer and the projections of the second, before cacheblend decides",
        "deciding": "their share of the operations (EPIC, figure 10, has it in time)",
    }
    headline = {
        "full_over_mpic32": counted[most, "full"] / counted[most, "mpic-32"],
        "cacheblend15_over_legolink16": counted[most, "cacheblend-15"] / counted[most, "legolink-16"],
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


def _plot(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        line = [(row["tokens"], row["gflop"]) for row in rows if row["policy"] == policy]
        axes.plot(*zip(*line, strict=True), marker="o", label=policy)
    axes.set(xlabel="tokens of the prompt", ylabel="GFLOP to the first token", yscale="log")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
