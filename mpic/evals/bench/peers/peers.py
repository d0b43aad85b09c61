"""``mpic bench peers``: first tokens and answers of MPIC and of every peer that is installed, in turns."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from mpic.evals.bench import checkpoint
from mpic.evals.bench.harness import (
    BenchDevice,
    BenchFailed,
    Report,
    Row,
    Series,
    Ticker,
    bench,
    paired,
    rotated,
)
from mpic.evals.bench.peers import llama_server, plain_vllm
from mpic.evals.bench.peers.native import Native
from mpic.evals.bench.peers.prompts import Peer, Questions, Settings
from mpic.evals.bench.peers.stock import Stock
from mpic.evals.bench.workload import DecoderShape, ModelPair, compile_all, engine_for, make_pair

MPIC, LINKS = "MPIC prefix", ("MPIC mpic-32", "MPIC legolink-16")
VLLM, LLAMA, STOCK = plain_vllm.VLLM.name, llama_server.LlamaServer.name, Stock.name
SHUFFLED, FRESH, SHORT, AGAIN = "documents in a new order", "all fresh", "few fresh tokens", "the same again"
FIRST = (SHUFFLED, FRESH, SHORT, AGAIN)
Samples = dict[tuple[str, str], Series]
"""Measurements by case and column."""


def answers_case(count: int) -> str:
    return f"{count} answer{'s' * (count > 1)} over the documents"


QUICK = {
    "decoder": DecoderShape(layers=4, hidden=384, heads=6, intermediate=1024, context=8192),
    "document_tokens": 256,
    "short": 256,
    "tokens": 24,
    "repeats": 1,
}


@bench(
    "peers",
    "first tokens and decoding beside transformers, vLLM and llama.cpp, each if it is installed",
    Settings,
    quick=QUICK,
    wants={
        "shuffled_best_peer_over_mpic32": ">= 10",
        "fresh_transformers_over_mpic": ">= 1.0",
        "fresh_vllm_over_mpic": ">= 1.0",
        "short_vllm_over_mpic": ">= 1.0",
        "again_llama_over_mpic": ">= 1.0",
        "decode1_mpic_over_llama": ">= 1.0",
        "decode8_mpic_over_llama": ">= 1.0",
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Starts every peer that is installed on the same weights, checks that they agree, and lets them take turns."""
    pair = make_pair(settings.decoder, placement, seed=settings.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpic-peers-")))
        peers, missing = stack.enter_context(_started(settings, placement, pair, folder, ticker))
        questions = Questions(settings)
        agreement = _check(settings, peers, questions)
        samples = _measure(settings, peers, questions, ticker)
    rows: list[Row] = [
        {"table": case, "column": column, **series.row("ms" if case in FIRST else "tokens_per_s")}
        for (case, column), series in samples.items()
    ]
    notes = {
        "model": pair.description,
        "prompt_tokens": settings.length,
        "peers": {peer.name: peer.detail for peer in peers},
        "not measured": missing,
        "same next token as MPIC": agreement,
        SHUFFLED: "resident documents and a fresh question; a prefix cache finds the system prompt",
        AGAIN: "the prompt of the measurement before it, which caches of prefixes hold as a whole",
        "headline": "median over rounds of the ratio within a round; best peer: the one with the lowest median",
    }
    return Report(rows, headline(settings, samples), notes, lambda figure: _plot(figure, samples))


@contextmanager
def _started(
    settings: Settings, placement: BenchDevice, pair: ModelPair, folder: Path, ticker: Ticker
) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """Starts the peers; yields them, and the reasons why others are missing."""
    threads, missing = torch.get_num_threads(), {}
    tokens = (max(settings.answers) + 4) * (settings.question + settings.tokens + 64) + 6 * settings.length
    with ExitStack() as stack:
        engine = stack.enter_context(engine_for(pair.loaded, tokens))
        compile_all(engine, Questions(settings).documents)
        peers: list[Peer] = [Native(engine, name.removeprefix("MPIC ")) for name in (MPIC, *LINKS)]
        peers.append(Stock(pair.stock, pair.loaded.shape, placement))
        if reason := plain_vllm.why_not():
            missing[VLLM] = reason
        else:
            ticker.say("starting vLLM")
            pair.stock.save_pretrained(folder / "model")
            checkpoint.tokenizer(settings.decoder.vocabulary).save_pretrained(folder / "model")
            vllm = plain_vllm.VLLM(settings, placement, folder / "model", threads)
            peers.append(stack.enter_context(closing(vllm)))
        if reason := llama_server.why_not():
            missing[LLAMA] = reason
        elif placement.device.type != "cpu":
            missing[LLAMA] = "it is measured on CPUs only"
        else:
            ticker.say("starting llama.cpp")
            llama = llama_server.LlamaServer(settings, pair.stock, folder, threads)  # type: ignore[arg-type]
            peers.append(stack.enter_context(closing(llama)))
        yield peers, missing


def _check(settings: Settings, peers: Sequence[Peer], questions: Questions) -> dict[str, str]:
    """Asks all for the next token of some prompts; returns how often each says what MPIC says. Raises BenchFailed for a
    peer that disagrees more often than rounding explains, so that it computes another model."""
    probes = [questions.probe() for _ in range(settings.probes)]
    expected = [peers[0].next_token(ids) for ids in probes]
    agreement = {}
    for peer in peers[1:]:
        same = sum(peer.next_token(ids) == token for ids, token in zip(probes, expected, strict=True))
        agreement[peer.name] = f"{same} of {len(probes)}"
        if 4 * same < 3 * len(probes):
            raise BenchFailed(
                f"{peer.name} generates another token than {peers[0].name} after {len(probes) - same} of "
                f"{len(probes)} prompts: it does not compute the same model"
            )
    return agreement


def _measure(settings: Settings, peers: Sequence[Peer], questions: Questions, ticker: Ticker) -> Samples:
    """Lets the peers take turns; each round begins with another one. The first round is cold."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    ticker.expect((settings.repeats + 1) * len(peers))
    for turn in range(settings.repeats + 1):
        for peer in rotated(peers, turn):
            with ticker.step(peer.name):
                for case, value in _turn(settings, peer, questions, turn).items():
                    values[case, peer.name].append(value)
    cases = (*FIRST, *(answers_case(count) for count in settings.answers))
    return {
        (case, peer.name): Series(values[case, peer.name][0], values[case, peer.name][1:])
        for case in cases
        for peer in peers
        if (case, peer.name) in values
    }


def _turn(settings: Settings, peer: Peer, questions: Questions, turn: int) -> dict[str, float]:
    """Measures every case of one peer; those that a policy or peer does not change are left out."""
    found = {SHUFFLED: peer.first_ms(questions.shuffled(turn))}
    if peer.name not in LINKS:
        fresh = questions.fresh(settings.length)
        found[FRESH] = peer.first_ms(fresh)
        if peer.name != STOCK:
            found[AGAIN] = peer.first_ms(fresh)
        found[SHORT] = peer.first_ms(questions.fresh(settings.short))
    if peer.name not in (MPIC, LINKS[1]):
        for count in settings.answers:
            prompts = [questions.ordered() for _ in range(count)]
            found[answers_case(count)] = peer.rate(prompts, settings.tokens)
    return found


def headline(settings: Settings, samples: Samples) -> dict[str, float]:
    """Returns the ratios to the peers that were measured; more than 1 means that MPIC is faster."""
    peers = {column for _, column in samples} - {MPIC, *LINKS}
    best = min(peers, key=lambda name: samples[SHUFFLED, name].median)
    ratios: dict[str, Callable[[], float]] = {
        "shuffled_best_peer_over_mpic32": lambda: paired(samples[SHUFFLED, best], samples[SHUFFLED, LINKS[0]])
    }
    for name, case, peer in (
        ("fresh_transformers", FRESH, STOCK),
        ("fresh_vllm", FRESH, VLLM),
        ("short_vllm", SHORT, VLLM),
        ("again_llama", AGAIN, LLAMA),
    ):
        ratios[f"{name}_over_mpic"] = lambda case=case, peer=peer: paired(
            samples[case, peer], samples[case, MPIC]
        )
    for count in settings.answers:
        case = answers_case(count)
        ratios[f"decode{count}_mpic_over_llama"] = lambda case=case: paired(
            samples[case, LINKS[0]], samples[case, LLAMA]
        )
    needs = {"vllm": VLLM, "llama": LLAMA}
    return {
        name: ratio()
        for name, ratio in ratios.items()
        if all(peer in peers for word, peer in needs.items() if word in name)
    }


def _plot(figure: Any, samples: Samples) -> None:
    cases = list(dict.fromkeys(case for case, _ in samples))
    for axes, case in zip(figure.subplots(2, -(-len(cases) // 2)).flat, cases, strict=False):
        found = {column: series.median for (of, column), series in samples.items() if of == case}
        axes.barh(list(found), list(found.values()))
        axes.invert_yaxis()
        axes.set_title(case, fontsize=8)
        axes.tick_params(labelsize=6)
        axes.set_xlabel("ms" if case in FIRST else "tokens/s", fontsize=7)
