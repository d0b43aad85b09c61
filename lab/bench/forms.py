"""Decoding speed of answers in a form against free ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpic.config import EngineConfig
from mpic.data.bundled import model_folder
from mpic.engine import load_engine
from mpic.engine.base import Engine
from mpic.engine.grammar import Grammar
from mpic.prompt.segments import Prompt, TextSegment
from mpic_lab.bench.decode import plot_rates
from mpic_lab.bench.harness import BenchDevice, Report, Series, Ticker, bench, interleave, paired
from mpic_lab.bench.workload import request_of

PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "member": {"type": "boolean"}}
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": PERSON, "required": list(PERSON)},
    "minItems": 1000,
    "x-guidance": {"whitespace_flexible": False},
}
"""A form whose answers do not end within a bench."""


MODEL = model_folder()


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``forms`` bench."""

    model: Path = MODEL
    batches: tuple[int, ...] = (1, 8)
    text: int = 64
    tokens: int = 128
    repeats: int = 5


@bench(
    "forms",
    "tokens a second of answers in a form, over those of free ones, on a bundled model",
    Settings,
    quick={"tokens": 32, "repeats": 3},
    wants={"batch1_form_over_free": ">= 0.9", "batch8_form_over_free": ">= 0.9"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure each batch size free, with one in two answers in a form, and with all of them."""
    lark = f"start: %json {json.dumps(SCHEMA)}"
    grammar = Grammar(lark, (("response_format", lark),))
    config = EngineConfig(
        model=str(settings.model),
        device=str(placement.device),
        dtype=str(placement.dtype).removeprefix("torch."),
    )
    engine, _ = load_engine(config)
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    plots: dict[int, dict[str, Series]] = {}
    ticker.expect(len(settings.batches) * 3 * (settings.repeats + 1))
    try:
        for batch in settings.batches:
            kinds = {"free": [None] * batch, "form": [grammar] * batch}
            kinds["mixed"] = [grammar if i % 2 else None for i in range(batch)]
            columns = {name: decoded(engine, settings, forms) for name, forms in kinds.items()}
            samples = plots[batch] = interleave(columns, settings.repeats, ticker)
            for name, sample in samples.items():
                rows.append({"table": f"batch {batch}", "answers": name} | sample.row("tokens_per_s"))
            headline[f"batch{batch}_form_over_free"] = paired(samples["form"], samples["free"])
    finally:
        engine.close()
    notes = {
        "model": settings.model.name,
        "schema": SCHEMA,
        "rate": "tokens of all answers over the time from the first delta to the last",
    }
    return Report(rows, headline, notes, lambda figure: plot_rates(figure, plots))


def decoded(engine: Engine, settings: Settings, forms: list[Grammar | None]) -> Callable[[], float]:
    """Return the tokens a second of a batch of answers."""

    def measure() -> float:
        requests = []
        for i, form in enumerate(forms):
            ids = [3 + (7 * i + j) % 200 for j in range(settings.text)]
            request = request_of(Prompt((TextSegment(tuple(ids)),)), "prefix", settings.tokens)
            sampling = replace(request.sampling, temperature=1.0, seed=i, ignore_eos=form is None)
            requests.append(replace(request, sampling=sampling, grammar=form))
        streams = [engine.submit(request) for request in requests]
        next(iter(streams[0]))
        began = time.perf_counter()
        tokens = sum(stream.result().usage.completion_tokens for stream in streams)
        return tokens / (time.perf_counter() - began)

    return measure
