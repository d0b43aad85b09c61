"""``ttft`` on the vLLM engine: links inside vLLM against vLLM alone, and the effect of links on other running answers.

The two engines of ``vllm_pair`` take turns. The floor of a link is vLLM alone, with everything that the link reuses in
its prefix cache. Decoding is counted over a window in which all of some long answers are being generated, with nothing
beside them and while prompts with images arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from mpic.engine.base import GenerationUsage
from mpic_lab.bench import ttft
from mpic_lab.bench.harness import (
    BenchDevice,
    BenchFailed,
    Report,
    Row,
    Series,
    Ticker,
    bench,
    interleave,
    paired,
)
from mpic_lab.bench.vllm_pair import (
    ALONE,
    DISK,
    FLOOR,
    HOST,
    LINK,
    PAGES,
    Ours,
    Settings,
    VllmAlone,
    both_engines,
)

NOTHING, PREFILLED, CACHED, LINKS = (
    "nothing",
    "the same prompts, prefilled",
    "the same prompts, all cached",
    "links",
)
ONE_BY_ONE, AT_ONCE = "one after the other", "at once"


@bench(
    "ttft",
    "time to first token of a prompt with 8 images inside vLLM, against vLLM alone",
    Settings,
    quick=ttft.QUICK | {"decode_repeats": 1, "tokens": 64, "gap": 0.3},
    wants={
        "prefix_over_mpic32": ">= 5",
        "mpic32_over_floor": "<= 1.25",
        "questions_one_by_one_over_at_once": ">= 1",
        "decode_idle_over_vllm": ">= 0.95",
        "decode_while_linking_over_vllm": ">= 0.95",
    },
    engine="vllm",
    in_process=False,
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure first tokens, then decoding; the two engines take turns."""
    prompts = ttft.Prompts(settings)
    with both_engines(settings, placement, ticker) as engines:
        linked = Ours(settings, engines.ours, prompts, engines.library)
        alone = VllmAlone(settings, engines.plain, prompts)
        first, vision = _first_tokens(settings, alone, linked, ticker)
        questions = _questions(settings, linked, ticker)
        decoding = _decoding(settings, alone, linked, ticker)
    rows = _rows("vision encoding left out", first, settings, linked.usage)
    rows += _rows("vision encoding in the request", vision, settings, linked.usage)
    rows += [
        {"table": "questions", "sent": name, "questions": settings.questions, **series.row()}
        for name, series in questions.items()
    ]
    rows += [
        {"table": "decoding", "engine": side, "arrives meanwhile": what, **series.row("tokens_s")}
        for (side, what), series in decoding.items()
    ]
    idle, while_linking = decoding[LINK, NOTHING], decoding[LINK, LINKS]
    headline = {
        "prefix_over_mpic32": paired(first[ALONE], first[HOST]),
        "mpic32_over_floor": paired(first[HOST], first[FLOOR]),
        "questions_one_by_one_over_at_once": paired(questions[ONE_BY_ONE], questions[AT_ONCE]),
        "decode_idle_over_vllm": paired(idle, decoding[ALONE, NOTHING]),
        "decode_while_linking_over_vllm": paired(while_linking, decoding[ALONE, PREFILLED]),
    }
    notes = {
        **engines.notes,
        "prefix_over_mpic32_from_page_cache": round(paired(first[ALONE], first[PAGES]), 3),
        "prefix_over_mpic32_from_disk": round(paired(first[ALONE], first[DISK]), 3),
        "decode_while_linking_over_all_cached": round(paired(while_linking, decoding[ALONE, CACHED]), 3),
        **_notes(settings),
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, first, vision, decoding))


def _notes(settings: Settings) -> dict[str, Any]:
    return {
        "prompt_tokens": settings.length,
        "image_tokens": settings.tower.tokens,
        ALONE: "a prompt of fresh text as long as the one with images, so that no vision encoder runs",
        FLOOR: f"the {settings.length - settings.cached} last tokens of such a prompt are computed",
        "host memory": "the connector has the files in memory, verified; a worker in a process of its own maps them "
        "from the page cache; keys are rotated and copied into the cache's blocks in every column",
        "decoding": f"{settings.answers} answers of {settings.tokens} tokens at once; {settings.arrivals} prompts "
        f"arrive, one every {settings.gap} s; tokens/s of the answers while all of them are being generated",
        "questions": f"{settings.questions} prompts about the same images: sent one after the other, the sum of their "
        "times to the first token; sent at once, the time until all of them have it",
        "headline": "median over rounds of the ratio within a round",
    }


# ---- measuring


def _first_tokens(
    settings: Settings, alone: VllmAlone, linked: Ours, ticker: Ticker
) -> tuple[dict[str, Series], dict[str, Series]]:
    """Return the times to the first token without and with the vision encoder."""
    columns = {
        ALONE: alone.first,
        FLOOR: alone.first_cached,
        HOST: linked.first,
        PAGES: linked.first_from_pages,
        DISK: linked.first_from_disk,
    }
    encoded = {ALONE: alone.first_encoded, HOST: linked.first}
    ticker.expect((settings.repeats + 1) * len(columns) + settings.vision_repeats * len(encoded))
    first = interleave(columns, settings.repeats, ticker)
    return first, interleave(encoded, settings.vision_repeats, ticker, cold=False)


def _questions(settings: Settings, linked: Ours, ticker: Ticker) -> dict[str, Series]:
    """Return the times until several questions about the same images have their first tokens. Links of one user,
    policy and set of images have one salt; they are computed in the same steps."""
    columns = {ONE_BY_ONE: linked.one_by_one, AT_ONCE: linked.at_once}
    ticker.expect(settings.vision_repeats * len(columns))
    return interleave(columns, settings.vision_repeats, ticker, cold=False)


def _decoding(
    settings: Settings, alone: VllmAlone, linked: Ours, ticker: Ticker
) -> dict[tuple[str, str], Series]:
    """Return the rates of running answers by engine and by the prompts that arrive meanwhile."""

    def cached() -> float:
        alone.prime()
        return _rate(settings, alone.answer, alone.arrive_cached)

    columns: dict[tuple[str, str], Callable[[], float]] = {
        (ALONE, NOTHING): lambda: _rate(settings, alone.answer),
        (LINK, NOTHING): lambda: _rate(settings, linked.answer),
        (ALONE, PREFILLED): lambda: _rate(settings, alone.answer, alone.arrive),
        (ALONE, CACHED): cached,
        (LINK, LINKS): lambda: _rate(settings, linked.answer, linked.arrive),
    }
    ticker.expect(settings.decode_repeats * len(columns))
    names = {f"{side} | {what}": run for (side, what), run in columns.items()}
    measured = interleave(names, settings.decode_repeats, ticker, cold=False)
    return dict(zip(columns, measured.values(), strict=True))


def _rate(
    settings: Settings,
    answer: Callable[[list[float]], Future[Any]],
    arrive: Callable[[], Future[Any]] | None = None,
) -> float:
    """Return the tokens per second of all answers, from the time at which all are being generated until the first one
    ends.

    Args:
        answer: generates an answer and adds the times of its tokens to the list.
        arrive: sends a prompt with images.
    """
    times_of: list[list[float]] = [[] for _ in range(settings.answers)]
    running = [answer(times) for times in times_of]
    while not all(times_of) and not any(one.done() for one in running):
        time.sleep(0.002)
    began = time.perf_counter()
    for number in range(settings.arrivals if arrive is not None else 0):
        time.sleep(max(0.0, began + number * settings.gap - time.perf_counter()))
        running.append(arrive())
    for one in running:
        one.result()
    return rate(times_of)


def rate(times_of: Sequence[Sequence[float]]) -> float:
    """Return the tokens per second over the time that all answers share, given the times of each one's tokens."""
    begin, end = max(times[0] for times in times_of), min(times[-1] for times in times_of)
    if end <= begin:
        raise BenchFailed("the answers were not generated at the same time")
    return sum(begin < at <= end for times in times_of for at in times) / (end - begin)


# ---- the report


def _rows(
    table: str, measured: dict[str, Series], settings: Settings, usages: dict[str, GenerationUsage]
) -> list[Row]:
    rows = []
    for name, series in measured.items():
        usage = usages.get(name)
        reused = settings.length - settings.computed if usage else settings.cached if name == FLOOR else 0
        load = {"load_ms": round(usage.load_ms, 3)} if usage else {"load_ms": 0.0}
        rows.append(
            {"table": table, "column": name, "computed": settings.length - reused, "reused": reused}
            | series.row()
            | load
        )
    return rows


def _plot(
    figure: Any, first: dict[str, Series], vision: dict[str, Series], decoding: dict[tuple[str, str], Series]
) -> None:
    left, right = figure.subplots(2, 1)
    ttft.bars(left, first, vision)
    right.barh([" | ".join(name) for name in decoding], [series.median for series in decoding.values()])
    right.invert_yaxis()
    right.set_xlabel("tokens/s of the running answers")
    for axes in (left, right):
        axes.tick_params(labelsize=8)
