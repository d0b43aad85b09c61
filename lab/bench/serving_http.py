"""The ``serving`` bench over HTTP: a whole server under vLLM's own load generator.

The generator is the unchanged ``vllm.benchmarks.serve``, on ``/v1/chat/completions``. Its dataset is a file of texts:
the images were uploaded once, and a prompt names them by handle (``IMAGE#BENCH3``), some of a pool in a random order
behind fresh text; the policy travels in ``--extra-body``. The policies take turns with their backlogs. Then requests
arrive at a share of the policy's own peak and at the rate that the slowest policy sustains.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpic.client import MPIC
from mpic.engine.vllm.frontend.options import prepare_environment
from mpic_lab.bench import checkpoint
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench
from mpic_lab.bench.serving import (
    ARRIVALS,
    BACKLOG,
    backlog_size,
    in_turns,
    of_rounds,
    peak_ratio,
    plot,
)
from mpic_lab.bench.workload import BENCH_DECODER, BENCH_TOWER, DecoderShape, Ids, TowerShape, random_image
from mpic_lab.demo import running_server

BASE, LINK = "prefix", "mpic-32"
POLICIES = (BASE, LINK)
MODEL = "bench"


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``serving`` bench over HTTP.

    Args:
        pool, linked: number of images on the server, and of those in a request.
        text, answer: tokens of a request's own text and of its answer.
        backlog: seconds of work in a policy's backlog, as estimated from one request.
        repeats: backlogs of each policy.
        seconds: duration of the random arrivals.
        share: rate of the arrivals, as a share of the peak.
        room: number of requests whose whole KV fits into the engine's pool.
    """

    decoder: DecoderShape = BENCH_DECODER
    tower: TowerShape = BENCH_TOWER
    pool: int = 8
    linked: int = 4
    text: int = 64
    answer: int = 8
    backlog: float = 12.0
    repeats: int = 3
    seconds: float = 30.0
    share: float = 0.7
    room: int = 10
    seed: int = 0


SUMMARY = "our server under vLLM's load generator: peak throughput and 99th percentile of the first token"
QUICK = {
    "decoder": DecoderShape(layers=4, hidden=256, heads=4, intermediate=512, vocabulary=2_000, context=8192),
    "tower": TowerShape(layers=2, hidden=128, heads=2, size=224, patch=14),
    "backlog": 1.5,
    "repeats": 1,
    "seconds": 2.0,
}
WANTS = {"mpic32_over_prefix": "> 1", "p99_prefix_over_mpic32": "> 1"}


def _on(name: str, engine: str) -> None:
    @bench("serving", SUMMARY, Settings, QUICK, WANTS, engine=name, in_process=False)
    def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
        return _run(engine, settings, placement, ticker)


_on("native-http", "native")
_on("vllm", "vllm")


def _run(engine: str, settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    prepare_environment()  # the generator is vLLM's, whichever engine runs
    ticker.expect(1 + settings.repeats * len(POLICIES) + 3)
    with tempfile.TemporaryDirectory(prefix="mpic-serving-") as folder:
        model = Path(folder, MODEL)
        described = checkpoint.save_random(settings.decoder, placement, settings.tower, settings.seed, model)
        data = Path(folder, "data")
        data.mkdir()
        ticker.say("starting the server")
        server = running_server(data, str(model), *_flags(engine, settings, placement))
        with server as (url, seconds), MPIC(url) as client:
            with ticker.step("uploading"):
                _upload(client, settings, Path(folder))
            load = _PoolLoad(settings, url, model, Path(folder))
            backlog = partial(load.backlog, client)
            backlogs = in_turns(backlog, POLICIES, settings.repeats, ticker, "backlog")
            rows = [of_rounds(found) for found in backlogs.values()]
            peaks = {row["policy"]: row["requests_per_s"] for row in rows}
            rates = {policy: settings.share * peaks[policy] for policy in POLICIES}
            common = min(rates.values())
            offered = [(BASE, common), (LINK, common), *((p, r) for p, r in rates.items() if r > common)]
            for policy, rate in offered:
                with ticker.step(f"{policy}: {rate:.2f} requests/s"):
                    rows.append(load.arrivals(policy, rate))
    p99 = {row["policy"]: row["ttft_p99_ms"] for row in rows[len(POLICIES) : len(POLICIES) + 2]}
    headline = {
        "mpic32_over_prefix": peak_ratio(backlogs, LINK, BASE),
        "p99_prefix_over_mpic32": p99[BASE] / p99[LINK],
    }
    notes = {
        "engine": engine,
        "model": described,
        "image_tokens": settings.tower.tokens,
        "prompt_tokens": settings.linked * settings.tower.tokens + settings.text,
        "generator": "vllm.benchmarks.serve, backend openai-chat, dataset custom",
        "peak": "requests finished a second while all of a backlog has been sent at once: median, least and most of "
        "the backlogs, which the policies get in turn; the ratio is the median over rounds",
        "arrivals": "Poisson, the generator's own; p99_prefix_over_mpic32 is at the same rate for both",
        "p99": "over the requests in the row: of few it is nearly the slowest",
        "start_seconds": round(seconds, 1),
    }
    return Report(rows, headline, notes, lambda figure: plot(figure, rows, f"requests/s, {engine}", "p99"))


def _flags(engine: str, settings: Settings, placement: BenchDevice) -> list[str]:
    length = settings.linked * settings.tower.tokens + 2 * settings.text + settings.answer + 256
    tokens = max(
        settings.room * length + settings.pool * settings.tower.tokens, settings.decoder.context + 256
    )
    dtype = str(placement.dtype).removeprefix("torch.")
    pool = tokens * settings.decoder.token_bytes(placement.dtype)
    flags = {"engine": engine, "device": placement.device.type, "dtype": dtype, "pool-bytes": pool}
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def _upload(client: MPIC, settings: Settings, folder: Path) -> None:
    """Upload the pool; every image is compiled when this returns."""
    made = []
    for number in range(settings.pool):
        path = folder / f"{number}.png"
        random_image(settings.seed + number, settings.tower.size).save(path)
        made.append(client.files.create(path, _handle(number)))
    for file in made:
        client.files.wait(file.id)


def _handle(number: int) -> str:
    return f"BENCH{number}"


class _PoolLoad:
    """Makes prompts over the pool, and sends them with vLLM's generator."""

    def __init__(self, settings: Settings, url: str, model: Path, folder: Path) -> None:
        self._settings, self._url, self._model, self._folder = settings, url, model, folder
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self._rng = random.Random(settings.seed)

    def prompt(self) -> str:
        """Return a prompt of fresh text with images of the pool in random order."""
        linked, text = self._settings.linked, self._settings.text
        between = text // (2 * linked)
        parts = [self._ids.fresh(text // 2)] + [self._ids.fresh(between) for _ in range(linked - 1)]
        parts.append(self._ids.fresh(text - sum(map(len, parts))))
        chosen = self._rng.sample(range(self._settings.pool), linked)
        named = (f"IMAGE#{_handle(number)}" for number in chosen)
        return " ".join(
            piece for part in parts for piece in (checkpoint.words(part), next(named, "")) if piece
        )

    def backlog(self, client: MPIC, policy: str) -> Row:
        """Send enough requests at once to keep the server busy for a while."""
        for _ in range(2):  # the first request may load and warm up what later ones use
            asked = client.chat.completions.create(
                self.prompt(), max_tokens=self._settings.answer, mpic={"policy": policy, "ignore_eos": True}
            )
        alone = asked.usage.mpic.ms.total / 1e3
        count = backlog_size(self._settings.backlog, alone)
        result = self._send(policy, count, "inf", 10 * self._settings.backlog)
        return {
            "table": BACKLOG,
            "policy": policy,
            "requests": count,
            "alone_ms": round(1e3 * alone, 1),
            "requests_per_s": round(result["request_throughput"], 3),
            "tokens_per_s": round(result["total_token_throughput"]),
        }

    def arrivals(self, policy: str, rate: float) -> Row:
        """Send requests at random times."""
        count = max(3, round(rate * self._settings.seconds))
        result = self._send(policy, count, str(rate), 10 * self._settings.seconds)
        return {
            "table": ARRIVALS,
            "policy": policy,
            "offered_per_s": round(rate, 3),
            "served_per_s": round(result["request_throughput"], 3),
            "requests": count,
            "ttft_p50_ms": round(float(result["median_ttft_ms"]), 1),
            "ttft_p99_ms": round(float(result["p99_ttft_ms"]), 1),
        }

    def _send(self, policy: str, count: int, rate: str, seconds: float) -> dict[str, Any]:
        """Run the generator. Raise BenchFailed if a request fails, or it takes far longer than it should."""
        path = self._folder / "prompts.jsonl"
        prompts = [self.prompt() for _ in range(count)]
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        arguments = {
            "backend": "openai-chat",
            "endpoint": "/v1/chat/completions",
            "base-url": self._url,
            "model": MODEL,
            "tokenizer": self._model,
            "dataset-name": "custom",
            "dataset-path": path,
            "custom-output-len": self._settings.answer,
            "num-prompts": count,
            "request-rate": rate,
            "seed": self._settings.seed,
            "temperature": 0,
            "metric-percentiles": "50,99",
            "ready-check-timeout-sec": 0,
            "extra-body": json.dumps({"mpic": {"policy": policy, "ignore_eos": True}}),
        }
        given = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        result = generate([*given, "--skip-chat-template", "--disable-tqdm", "--save-detailed"], 60 + seconds)
        if result["failed"] or result["completed"] != count:
            why = next((error for error in result["errors"] if error), "no reason")
            raise BenchFailed(f"{policy}: {result['failed']} of {count} requests failed: {why}")
        return result


def generate(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run ``vllm bench serve`` in this process and return its result; its output is dropped.

    Raises:
        BenchFailed: it did not end in time.
    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    given = parser.parse_args(list(arguments))
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return asyncio.run(asyncio.wait_for(main_async(given), seconds))
        except TimeoutError:
            raise BenchFailed(f"the load generator did not end in {seconds:.0f} s") from None
