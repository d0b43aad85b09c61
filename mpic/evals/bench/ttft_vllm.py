"""``ttft`` on the vLLM engine: links inside vLLM against vLLM alone, and what links do to the answers beside them.

Two engines on the same checkpoint, both with their own processes, take turns: *vllm* is vLLM as it is, *ours* the same
vLLM with our connector, scheduler and worker. Floor of a link: vLLM alone with everything that the link reuses in its
prefix cache. Decoding is counted over a window in which all of some long answers are being said, with nothing beside
them and while prompts with images arrive.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.engine.base import Usage
from mpic.engine.vllm.options import prepare_environment
from mpic.evals.bench import checkpoint
from mpic.evals.bench.disk import drop_from_cache, fresh_library
from mpic.evals.bench.drive import (
    BENCH_DECODER,
    BENCH_TOWER,
    Decoder,
    Tower,
    compile_all,
    first_token,
    image_chunk,
    in_words,
    prompt_of,
    random_image,
    random_model,
    request_of,
)
from mpic.evals.bench.frame import BenchFailed, Report, Row, Sample, Ticker, Where, bench, interleave, paired
from mpic.evals.bench.plain_vllm import Heard, PlainVLLM
from mpic.evals.bench.ttft import Prompts
from mpic.kv.chunk import Chunk
from mpic.library import Library

K = 32
LINK = f"mpic-{K}"
HOST, PAGES, DISK = (f"{LINK}: {where}" for where in ("host memory", "page cache", "disk"))
ALONE, FLOOR = "vllm: prefix caching", "vllm: all in its prefix cache"


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``ttft`` bench on vLLM.

    Args:
        answers, tokens: long answers that are said while prompts arrive, and the tokens of each.
        arrivals, gap: how many prompts with images arrive meanwhile, and the seconds between them.
        block: tokens of a block of vLLM's cache.
    """

    decoder: Decoder = BENCH_DECODER
    tower: Tower = BENCH_TOWER
    images: int = 8
    system: int = 40
    text: int = 160
    repeats: int = 4
    vision_repeats: int = 2
    decode_repeats: int = 3
    answers: int = 4
    tokens: int = 96
    arrivals: int = 3
    gap: float = 1.0
    block: int = 128
    seed: int = 0

    @property
    def image_tokens(self) -> int:
        return self.images * self.tower.tokens

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return self.image_tokens + self.system + self.text

    @property
    def computed(self) -> int:
        """Tokens that a link computes."""
        return self.system + self.text + K * self.images

    @property
    def cached(self) -> int:
        """Tokens that the floor finds in vLLM's prefix cache: at least as many as a link reuses, in whole blocks."""
        return -(-(self.length - self.computed) // self.block) * self.block


@bench(
    "ttft",
    "time to first token of a prompt with 8 images inside vLLM, against vLLM alone",
    Settings,
    quick={
        "decoder": Decoder(layers=4, hidden=384, heads=6, intermediate=1024, context=8192),
        "tower": Tower(layers=2, hidden=128, heads=2, size=336, patch=14),
        "repeats": 3,
        "vision_repeats": 1,
        "decode_repeats": 1,
        "tokens": 64,
        "gap": 0.3,
    },
    wants={
        "prefix_over_mpic32": ">= 5",
        "mpic32_over_floor": "<= 1.25",
        "decode_idle_over_vllm": ">= 0.95",
        "decode_while_linking_over_vllm": ">= 0.95",
    },
    engine="vllm",
    in_process=False,
)
def run(settings: Settings, where: Where, ticker: Ticker) -> Report:
    """First tokens, then decoding; the two engines in turns."""
    model = random_model(settings.decoder, where, settings.tower, seed=settings.seed)
    described = in_words(model, settings.decoder)
    prompts = Prompts(settings)
    with tempfile.TemporaryDirectory(prefix="mpic-bench-") as folder, fresh_library() as library:
        ticker.say("starting vLLM, twice")
        checkpoint.save(model, settings.decoder, settings.tower, Path(folder, "bench"))
        del model
        with _engines(settings, where, str(Path(folder, "bench")), library) as (plain, ours):
            linked = _Ours(settings, ours, prompts, library)
            alone = _Alone(settings, plain, prompts)
            columns = {
                ALONE: alone.first,
                FLOOR: alone.first_cached,
                HOST: linked.first,
                PAGES: linked.first_from_pages,
                DISK: linked.first_from_disk,
            }
            encoded = {ALONE: alone.first_encoded, HOST: linked.first}
            beside = {
                (ALONE, "nothing"): lambda turn: _rate(settings, alone.answer),
                (LINK, "nothing"): lambda turn: _rate(settings, linked.answer),
                (ALONE, "the same prompts, prefilled"): lambda turn: _rate(
                    settings, alone.answer, alone.arrive
                ),
                (ALONE, "the same prompts, all cached"): lambda turn: (
                    alone.prime() or _rate(settings, alone.answer, alone.arrive_cached)
                ),
                (LINK, "links"): lambda turn: _rate(settings, linked.answer, linked.arrive),
            }
            ticker.expect((settings.repeats + 1) * len(columns) + settings.vision_repeats * len(encoded))
            ticker.expect(settings.decode_repeats * len(beside))
            first = interleave(columns, settings.repeats, ticker)
            vision = interleave(encoded, settings.vision_repeats, ticker, cold=False)
            names = {f"{side} | {what}": run for (side, what), run in beside.items()}
            decode = interleave(names, settings.decode_repeats, ticker, cold=False)
    decoding = dict(zip(beside, decode.values(), strict=True))
    rows = _rows("vision encoding left out", first, settings, linked.usage)
    rows += _rows("vision encoding in the request", vision, settings, linked.usage)
    rows += [
        {"table": "decoding", "engine": side, "arrives meanwhile": what, **sample.row("tokens_s")}
        for (side, what), sample in decoding.items()
    ]
    idle, while_linking = decoding[LINK, "nothing"], decoding[LINK, "links"]
    headline = {
        "prefix_over_mpic32": paired(first[ALONE], first[HOST]),
        "mpic32_over_floor": paired(first[HOST], first[FLOOR]),
        "decode_idle_over_vllm": paired(idle, decoding[ALONE, "nothing"]),
        "decode_while_linking_over_vllm": paired(
            while_linking, decoding[ALONE, "the same prompts, prefilled"]
        ),
    }
    notes = {
        "engine": "vllm",
        "vllm": linked.version,
        "model": described,
        "prompt_tokens": settings.length,
        "image_tokens": settings.tower.tokens,
        "prefix_over_mpic32_from_page_cache": round(paired(first[ALONE], first[PAGES]), 3),
        "prefix_over_mpic32_from_disk": round(paired(first[ALONE], first[DISK]), 3),
        "decode_while_linking_over_all_cached": round(
            paired(while_linking, decoding[ALONE, "the same prompts, all cached"]), 3
        ),
        ALONE: "a prompt of fresh text as long as the one with images, so that no vision encoder runs",
        FLOOR: f"the {settings.length - settings.cached} last tokens of such a prompt are computed",
        "host memory": "the connector has the files in memory, verified; a worker in a process of its own maps them "
        "from the page cache; keys are turned and copied into the cache's blocks in every column",
        "decoding": f"{settings.answers} answers of {settings.tokens} tokens at once; {settings.arrivals} prompts "
        f"arrive, one every {settings.gap} s; tokens/s of the answers from when all are being said until one ends",
        "headline": "median over rounds of the ratio within a round",
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, first, vision, decoding))


@contextmanager
def _engines(
    settings: Settings, where: Where, model: str, library: Library
) -> Iterator[tuple[PlainVLLM, Any]]:
    """vLLM alone and ours, started side by side."""
    cpu = prepare_environment()
    from mpic.engine.vllm.model import describe  # imports vLLM, which reads its environment then

    config = _config(settings, where, model)
    described = describe(config, cpu)
    host = int((settings.images + 0.5) * settings.tower.tokens * settings.decoder.token_bytes(where.dtype))
    with ExitStack() as engines, ThreadPoolExecutor(1) as starter:
        starting = starter.submit(PlainVLLM, config, described, cpu)
        starting.add_done_callback(lambda one: one.exception() or engines.callback(one.result().close))
        ours = engines.enter_context(closing(load_engine(config, library.store, host)[0]))
        yield starting.result(), ours


def _config(settings: Settings, where: Where, model: str) -> EngineConfig:
    """Of both engines: room for what runs at once and for the floor's prefix, and, as vLLM wants it, for one prompt as
    long as the model's context."""
    tokens = (settings.arrivals + 1) * (settings.length + settings.block)
    tokens += settings.answers * (settings.system + settings.tokens + settings.block)
    tokens = max(tokens, settings.decoder.context + settings.block)
    return EngineConfig(
        engine="vllm",
        model=model,
        device=where.device.type,
        dtype=str(where.dtype).removeprefix("torch."),
        pool_bytes=tokens * settings.decoder.token_bytes(where.dtype),
        vllm_args=f'{{"block_size": {settings.block}}}',
    )


# ---- the two sides


class _Alone:
    """vLLM alone. Where no vision encoder is to run, a prompt is text of the same length."""

    def __init__(self, settings: Settings, engine: PlainVLLM, prompts: Prompts) -> None:
        self._settings, self._engine, self._prompts = settings, engine, prompts
        self._prefix = prompts.ids.fresh(settings.cached)

    def first(self, turn: int) -> float:
        return self._checked(self.arrive().result(), 0).first_ms

    def first_cached(self, turn: int) -> float:
        self.prime()
        return self._checked(self.arrive_cached().result(), self._settings.cached).first_ms

    def first_encoded(self, turn: int) -> float:
        """The same images as another user brings them: they have to be encoded."""
        prompt = self._prompts.make(self._prompts.again())
        parts = [getattr(segment, "chunk", None) or segment.token_ids for segment in prompt.segments]
        return self._checked(self._engine.ask(parts, 2).result(), 0).first_ms

    def prime(self) -> None:
        """Have the shared prefix in the prefix cache."""
        self.arrive_cached().result()

    def arrive(self) -> Future[Heard]:
        return self._engine.ask([self._prompts.ids.fresh(self._settings.length)], 2)

    def arrive_cached(self) -> Future[Heard]:
        fresh = self._prompts.ids.fresh(self._settings.length - self._settings.cached)
        return self._engine.ask([(*self._prefix, *fresh)], 2)

    def answer(self, times: list[float]) -> Future[Any]:
        return self._engine.ask(
            [self._prompts.ids.fresh(self._settings.system)], self._settings.tokens, times
        )

    def _checked(self, heard: Heard, cached: int) -> Heard:
        if (heard.prompt, heard.cached) != (self._settings.length, cached):
            raise BenchFailed(
                f"vLLM found {heard.cached} of {heard.prompt} tokens in its prefix cache, not {cached}"
            )
        return heard


class _Ours:
    """Links in our engine. The connector's memory holds one set of images and not two, so a link of the other set
    sends the first one back to its files."""

    def __init__(self, settings: Settings, engine: Any, prompts: Prompts, library: Library) -> None:
        self._settings, self._engine, self._prompts = settings, engine, prompts
        side, n = settings.tower.size, settings.images
        others = [random_image(settings.seed + n + i, side) for i in range(n)]
        self._others = [image_chunk(image) for image in others]
        compile_all(engine, [*prompts.chunks, *self._others])
        self._files = [library.store.path(engine.chunks.key(chunk, 0)) for chunk in prompts.chunks]
        self._readers = ThreadPoolExecutor(settings.answers + settings.arrivals, "bench-read")
        self.usage: dict[str, Usage] = {}
        self.version: str = engine.info.details["vllm"]

    def first(self, turn: int) -> float:
        self._link(self._prompts.chunks)
        return self._measured(HOST)

    def first_from_pages(self, turn: int) -> float:
        self._link(self._others)
        return self._measured(PAGES)

    def first_from_disk(self, turn: int) -> float:
        self._link(self._others)
        drop_from_cache(self._files)
        return self._measured(DISK)

    def _measured(self, column: str) -> float:
        elapsed, self.usage[column] = self._link(self._prompts.chunks)
        return elapsed

    def _link(self, chunks: list[Chunk]) -> tuple[float, Usage]:
        elapsed, usage = first_token(self._engine, request_of(self._prompts.make(chunks), LINK, 2))
        late = [use.reason for use in usage.chunks if use.tier != "disk"]
        if usage.computed != self._settings.computed or late:
            raise BenchFailed(f"{LINK} computed {usage.computed} of {self._settings.computed} tokens {late}")
        return elapsed, usage

    def arrive(self) -> Future[Any]:
        return self._readers.submit(self._link, self._prompts.chunks)

    def answer(self, times: list[float]) -> Future[Any]:
        prompt = prompt_of(self._prompts.ids.fresh(self._settings.system))
        stream = self._engine.submit(request_of(prompt, "prefix", self._settings.tokens))
        return self._readers.submit(
            lambda: times.extend(time.perf_counter() for delta in stream for _ in delta.token_ids)
        )


# ---- decoding


def _rate(
    settings: Settings,
    answer: Callable[[list[float]], Future[Any]],
    arrive: Callable[[], Future[Any]] | None = None,
) -> float:
    """Tokens a second of all answers, from when all are being said until the first one ends.

    Args:
        answer: has an answer said; the times of its tokens are put into the list as they come.
        arrive: sends a prompt with images.
    """
    said: list[list[float]] = [[] for _ in range(settings.answers)]
    running = [answer(times) for times in said]
    while not all(said) and not any(one.done() for one in running):
        time.sleep(0.002)
    began = time.perf_counter()
    for number in range(settings.arrivals if arrive is not None else 0):
        time.sleep(max(0.0, began + number * settings.gap - time.perf_counter()))
        running.append(arrive())
    for one in running:
        one.result()
    return rate(said)


def rate(said: Sequence[Sequence[float]]) -> float:
    """Tokens a second over the time that all answers share, given the times of each one's tokens."""
    begin, end = max(times[0] for times in said), min(times[-1] for times in said)
    if end <= begin:
        raise BenchFailed("the answers were not said at the same time")
    return sum(begin < at <= end for times in said for at in times) / (end - begin)


# ---- the report


def _rows(table: str, samples: dict[str, Sample], settings: Settings, usages: dict[str, Usage]) -> list[Row]:
    rows = []
    for name, sample in samples.items():
        usage = usages.get(name)
        reused = settings.length - settings.computed if usage else settings.cached if name == FLOOR else 0
        load = {"load_ms": round(usage.load_ms, 3)} if usage else {"load_ms": 0.0}
        rows.append(
            {"table": table, "column": name, "computed": settings.length - reused, "reused": reused}
            | sample.row()
            | load
        )
    return rows


def _plot(
    figure: Any, first: dict[str, Sample], vision: dict[str, Sample], decoding: dict[tuple[str, str], Sample]
) -> None:
    left, right = figure.subplots(2, 1)
    names = list(first)
    left.barh(names, [first[n].median for n in names], label="vision encoding left out")
    extra = [max(0.0, vision[n].median - first[n].median) if n in vision else 0.0 for n in names]
    left.barh(names, extra, left=[first[n].median for n in names], label="vision encoding", alpha=0.5)
    left.set_xlabel("time to first token (ms)")
    left.legend(fontsize=8)
    right.barh([" | ".join(name) for name in decoding], [sample.median for sample in decoding.values()])
    right.set_xlabel("tokens/s of the running answers")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
