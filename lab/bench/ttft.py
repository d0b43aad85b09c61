"""Measures the time to the first token with several images in the prompt: the savings by linking, and the distance from
a floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Engine, GenerationUsage
from mpic.kv.chunk import Chunk
from mpic.prompt.segments import Prompt
from mpic_lab.bench.baseline import floors
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, Report, Series, Ticker, bench, interleave, paired
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    BENCH_TOWER,
    DecoderShape,
    Ids,
    TowerShape,
    compile_all,
    engine_for,
    expect,
    first_token,
    image_chunk,
    prompt_of,
    random_image,
    request_of,
)

LINKED = {"reuse-2step": 0, "reuse": 0, "mpic-32": 32, "legolink-32": 32}
"""Policies that link, and how many of each image's tokens they recompute."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``ttft`` bench."""

    decoder: DecoderShape = BENCH_DECODER
    tower: TowerShape = BENCH_TOWER
    images: int = 8
    system: int = 40
    text: int = 160
    repeats: int = 5
    vision_repeats: int = 2
    seed: int = 0

    @property
    def length(self) -> int:
        """Number of tokens of a prompt."""
        return self.images * self.tower.tokens + self.system + self.text


QUICK = {
    "decoder": DecoderShape(layers=4, hidden=384, heads=6, intermediate=1024, context=8192),
    "tower": TowerShape(layers=2, hidden=128, heads=2, size=336, patch=14),
    "repeats": 3,
    "vision_repeats": 1,
}


class Prompts:
    """Makes prompts with fresh text, so that only the parts that a column is meant to share can be found again."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self.ids = Ids(settings.decoder.vocabulary, settings.seed)
        self.system = self.ids.fresh(settings.system)
        side = settings.tower.size
        self.images = [random_image(settings.seed + i, side) for i in range(settings.images)]
        self.chunks = [image_chunk(image) for image in self.images]
        self.owners = 0

    def again(self) -> list[Chunk]:
        """Return the same images from an owner that the engine has not seen, so that they have to be encoded."""
        self.owners += 1
        return [image_chunk(image, f"bench-{self.owners}") for image in self.images]

    def make(self, chunks: list[Chunk], system: tuple[int, ...] | None = None) -> Prompt:
        """Return system prompt, half of the text, the images with a little text between them, the rest of the text."""
        s = self._settings
        between = s.text // (2 * len(chunks))
        head = s.text // 2
        parts: list[Any] = [system or self.ids.fresh(s.system), self.ids.fresh(head)]
        for chunk in chunks[:-1]:
            parts += [chunk, self.ids.fresh(between)]
        return prompt_of(*parts, chunks[-1], self.ids.fresh(s.text - head - between * (len(chunks) - 1)))


@bench(
    "ttft",
    "time to first token of a prompt with 8 images, chunk KV resident",
    Settings,
    quick=QUICK,
    wants={"prefix_over_mpic32": ">= 6", "mpic32_over_floor": "<= 1.25"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure every policy and the floor in the same rounds."""
    model = make_model(settings.decoder, placement, settings.tower, seed=settings.seed)
    prompts = Prompts(settings)
    image_tokens = settings.images * settings.tower.tokens
    length = settings.length
    new = length - image_tokens + 32 * settings.images
    with engine_for(model, 3 * length + image_tokens + 4096) as engine:
        compile_all(engine, prompts.chunks)
        first_token(engine, request_of(prompt_of(prompts.system, prompts.ids.fresh(8)), "prefix", 2))
        usages: dict[str, GenerationUsage] = {}
        tokens = settings.tower.tokens
        columns = {p: _column(engine, prompts, p, tokens, usages) for p in ("full", "prefix", *LINKED)}
        under = floors(
            model.stock, settings.decoder, prompts.ids.fresh, new, length - new, placement.synchronize
        )
        encoded = {p: _column(engine, prompts, p, tokens, usages, encode=True) for p in ("full", "prefix")}
        encoded |= {p: columns[p] for p in LINKED}
        ticker.expect((settings.repeats + 1) * len(columns | under) + settings.vision_repeats * len(encoded))
        samples = interleave(columns | under, settings.repeats, ticker)
        with_vision = interleave(encoded, settings.vision_repeats, ticker, cold=False)
    floor = min(under, key=lambda name: samples[name].median)
    rows = _rows("vision encoding left out", {k: samples[k] for k in columns}, usages)
    rows += [
        {"table": "vision encoding left out", "column": name, "computed": new, "reused": length - new}
        | samples[name].row()
        for name in under
    ]
    rows += _rows("vision encoding in the request", with_vision, usages)
    headline = {
        "prefix_over_mpic32": paired(samples["prefix"], samples["mpic-32"]),
        "mpic32_over_floor": paired(samples["mpic-32"], samples[floor]),
    }
    notes = {
        "model": model.description,
        "prompt_tokens": length,
        "image_tokens": settings.tower.tokens,
        "floor": f"{floor} was the fastest plain transformers forward of {new} tokens over {length - new} resident",
        "sharing": "every request has fresh text, so no linked request finds an earlier one in its prefix cache; "
        "prefix finds its system prompt and nothing else",
        "vision": "a request of full or prefix encodes its images; linked chunks carry their embeddings",
        "headline": "median over rounds of the ratio within a round",
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, samples, with_vision))


def _column(
    engine: Engine,
    prompts: Prompts,
    policy: str,
    image_tokens: int,
    usages: dict[str, GenerationUsage],
    encode: bool = False,
) -> Callable[[], float]:
    prefix = policy == "prefix"
    kept = max(0, image_tokens - LINKED[policy]) if policy in LINKED else 0
    reused = len(prompts.chunks) * kept

    def measure() -> float:
        chunks = prompts.again() if encode else prompts.chunks
        prompt = prompts.make(chunks, prompts.system if prefix else None)
        elapsed, usage = first_token(engine, request_of(prompt, policy, 2))
        expect(usage, reused=reused, prefix_hit=len(prompts.system) if prefix else 0)
        usages[policy] = usage
        return elapsed

    return measure


def _rows(table: str, samples: dict[str, Series], usages: dict[str, GenerationUsage]) -> list[dict[str, Any]]:
    return [
        {"table": table, "column": name}
        | {"computed": usages[name].computed, "reused": usages[name].reused}
        | sample.row()
        for name, sample in samples.items()
    ]


def bars(axes: Any, first: dict[str, Series], with_vision: dict[str, Series]) -> None:
    """Draw medians of the time to the first token, and on top of them the time of vision encoding."""
    names = list(first)
    medians = [first[name].median for name in names]
    axes.barh(names, medians, label="vision encoding left out")
    extra = [max(0.0, with_vision[n].median - first[n].median) if n in with_vision else 0.0 for n in names]
    axes.barh(names, extra, left=medians, label="vision encoding", alpha=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("time to first token (ms)")
    axes.legend(fontsize=8)


def _plot(figure: Any, first: dict[str, Series], with_vision: dict[str, Series]) -> None:
    axes = figure.subplots()
    bars(axes, first, with_vision)
    axes.set_xscale("log")
