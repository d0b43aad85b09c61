"""``mpic bench peers``: first tokens and answers of MPIC and of every peer that is installed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpic_lab.bench.harness import BenchDevice, Report, Row, Ticker, bench
from mpic_lab.bench.peers import llama_server, lmcache_server, openvino_genai, plain_vllm
from mpic_lab.bench.peers.cases import (
    AGAIN,
    CASES,
    FIRST,
    FRESH,
    IMAGE_CASES,
    IMAGES,
    LINKS,
    NEW_IMAGES,
    PREFIX,
    SHORT,
    SHUFFLED,
    STOCK,
    TEXT_CASES,
    answers_case,
    wanted,
)
from mpic_lab.bench.peers.groups import groups
from mpic_lab.bench.peers.prompts import SIZES, Settings
from mpic_lab.bench.peers.rounds import Measured, Samples, measure
from mpic_lab.bench.peers.weights import write_weights
from mpic_lab.bench.workload import DecoderShape, TowerShape

VLLM, LLAMA = plain_vllm.VLLM.name, llama_server.LlamaServer.name
LMCACHE, GENAI = lmcache_server.LMCache.name, openvino_genai.GenAI.name
RATIOS = "ratios, more than 1: MPIC is faster"
"""The table of the ratios; its columns are the headlines."""

QUICK = {
    "decoder": DecoderShape(layers=4, hidden=384, heads=6, intermediate=1024, context=8192),
    "tower": TowerShape(layers=2, hidden=128, heads=2, size=224, patch=14),
    "document_tokens": 256,
    "short": 256,
    "tokens": 24,
    "repeats": 1,
}


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Draw a bar chart of medians for every case in the rows of a result."""
    cases = list(dict.fromkeys(row["table"] for row in rows if row["table"] != RATIOS))
    across = -(-len(cases) // 2)
    for axes, case in zip(figure.subplots(2, across, squeeze=False).flat, cases, strict=False):
        unit = "ms" if case in FIRST else "tokens_per_s"
        found = {row["column"]: row[f"median_{unit}"] for row in rows if row["table"] == case}
        axes.barh(list(found), list(found.values()))
        axes.invert_yaxis()
        axes.set_title(case, fontsize=8)
        axes.tick_params(labelsize=6)
        axes.set_xlabel("ms" if case in FIRST else "tokens/s", fontsize=7)


@bench(
    "peers",
    "first tokens and decoding beside transformers, vLLM, LMCache, llama.cpp and OpenVINO, each if it is installed",
    Settings,
    quick=QUICK,
    wants={
        "shuffled_best_peer_over_mpic32": ">= 10",
        "fresh_transformers_over_mpic": ">= 1.0",
        "fresh_vllm_over_mpic": ">= 1.0",
        "fresh_openvino_over_mpic": ">= 1.0",
        "short_vllm_over_mpic": ">= 1.0",
        "again_llama_over_mpic": ">= 1.0",
        "decode1_mpic_over_llama": ">= 1.0",
        "decode8_mpic_over_llama": ">= 1.0",
        "decode1_mpic_over_best_peer": ">= 1.0",
        "decode8_mpic_over_best_peer": ">= 1.0",
        "shuffled_images_best_peer_over_mpic32": ">= 10",
        "new_images_vllm_over_mpic": ">= 1.0",
    },
    sizes=SIZES,
    cases=CASES,
    draw=draw,
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Start every peer that is installed on the same weights, check that they agree, and let them take turns."""
    notes: dict[str, Any] = {"prompt_tokens": settings.length, "image_prompt_tokens": settings.image_length}
    notes |= {"peers": {}, "not measured": {}, "same next token as transformers": {}}
    samples: Samples = {}
    for images, cases in ((False, TEXT_CASES), (True, IMAGE_CASES)):
        if wanted(settings, cases):
            found, missing, description = _model(settings, placement, images, ticker)
            samples |= found.samples
            about = ", images" if images else ""
            notes["model" + about] = description
            notes["peers"] |= found.details
            notes["not measured"] |= {f"{name}{about}": reason for name, reason in missing.items()}
            notes["same next token as transformers"] |= {
                f"{name}{about}": count for name, count in found.agreement.items()
            }
    rows: list[Row] = [
        {"table": case, "column": column, **series.row("ms" if case in FIRST else "tokens_per_s")}
        for (case, column), series in samples.items()
    ]
    compared = ratios(settings, samples)
    rows += [
        {
            "table": RATIOS,
            "column": name,
            "min": min(some),
            "median": statistics.median(some),
            "max": max(some),
        }
        for name, some in compared.items()
    ]
    headline = {name: statistics.median(some) for name, some in compared.items()}
    return Report(rows, headline, notes | _explained(settings), lambda figure: draw(figure, rows))


def _model(
    settings: Settings, placement: BenchDevice, images: bool, ticker: Ticker
) -> tuple[Measured, dict[str, str], str]:
    """Measure all cases of one model. Return the measurements, the reasons why peers are missing, and a description
    of the model."""
    with tempfile.TemporaryDirectory(prefix="mpic-peers-") as folder:
        ticker.say("writing the weights")
        gguf = not images and llama_server.why_not() is None
        weights = write_weights(settings, placement, Path(folder), images, gguf)
        missing = {group.name: group.why_not(weights) for group in groups()}
        present = [group for group in groups() if missing[group.name] is None]
        found = measure(weights, present, ticker)
        return found, {name: reason for name, reason in missing.items() if reason}, weights.description


def _explained(settings: Settings) -> dict[str, str]:
    turns = (
        "all peers are in memory at once; rounds begin with another peer each, and the first one is cold"
        if settings.together
        else "one peer at a time, started anew for every turn and asked one short prompt that does not count; rounds "
        "begin with another one each; MPIC and transformers, which share weights, are started together; cold is the "
        "first round, which counts"
    )
    return {
        "turns": turns,
        "caches": "emptied before every turn; then each peer sees the system prompt. What a cache finds of a prompt is "
        "checked where the peer says it",
        SHUFFLED: "resident documents and a fresh question; a prefix cache finds the system prompt",
        AGAIN: "the prompt of the measurement before it, which caches of prefixes hold as a whole",
        NEW_IMAGES: "images that nobody has seen: they are encoded and computed by all",
        "headline": "median over rounds of the ratio within a round; best peer: the one with the best median",
        "several answers": "over the same documents in the same order, each with a question of its own, so that "
        "caches of prefixes may hold them once, as MPIC does",
        IMAGES: "peers encode the images anew, whose caches of encoded images are emptied; MPIC has compiled them",
    }


def ratios(settings: Settings, samples: Samples) -> dict[str, list[float]]:
    """Return the ratio within each round to the peers that were measured; more than 1 means that MPIC is faster."""
    found: dict[str, list[float]] = {}

    def add(name: str, above: tuple[str, str], below: tuple[str, str]) -> None:
        if above in samples and below in samples:
            pairs = zip(samples[above].values, samples[below].values, strict=True)
            found[name] = [round(a / b, 4) for a, b in pairs]

    def peers_at(case: str) -> list[str]:
        """Return the peers that were measured, from the lowest median on."""
        peers = {column for of, column in samples if of == case} - {PREFIX, *LINKS}
        return sorted(peers, key=lambda one: samples[case, one].median)

    for name, case in (("shuffled", SHUFFLED), ("shuffled_images", IMAGES)):
        if peers := peers_at(case):
            add(f"{name}_best_peer_over_mpic32", (case, peers[0]), (case, LINKS[0]))
    for name, case, peer in (
        ("fresh_transformers", FRESH, STOCK),
        ("fresh_vllm", FRESH, VLLM),
        ("fresh_openvino", FRESH, GENAI),
        ("short_vllm", SHORT, VLLM),
        ("again_llama", AGAIN, LLAMA),
        ("new_images_vllm", NEW_IMAGES, VLLM),
    ):
        add(f"{name}_over_mpic", (case, peer), (case, PREFIX))
    for count in settings.answers:
        case = answers_case(count)
        add(f"decode{count}_mpic_over_llama", (case, LINKS[0]), (case, LLAMA))
        if peers := peers_at(case):
            add(f"decode{count}_mpic_over_best_peer", (case, LINKS[0]), (case, peers[-1]))
    return found
