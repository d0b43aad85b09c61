"""``/metrics`` for Prometheus: times of answers as histograms, and counters of the engine and the library, which are
read on each request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import MPICError
from mpic.http.errors import shown_for

if TYPE_CHECKING:
    from mpic.engine.base import Engine, GenerationUsage
    from mpic.library import Library

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TIMES = {
    "ttft": ("time_to_first_token", "From arrival to the first token"),
    "queue": ("queue", "Waiting for a place in the batch"),
    "load": ("load", "Reading compiled chunks into the pool"),
    "link": ("link", "Recomputing and linking, up to the first token"),
    "total": ("answer", "From arrival to the last token"),
}
TOKENS = ("requested", "reused", "recomputed", "prefix_hit", "computed", "compiled")


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine, library: Library) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._times = {
            name: Histogram(f"mpic_{metric}_seconds", description, registry=self.registry, buckets=SECONDS)
            for name, (metric, description) in TIMES.items()
        }
        self._responses = Counter(
            "mpic_http_responses", "Responses by status", ["status"], registry=self.registry
        )
        self.registry.register(_StateCollector(engine, library))

    def answered(self, usage: GenerationUsage) -> None:
        """Count an answer that has ended, unless it ended before its first token."""
        if usage.ttft_ms:
            for name, histogram in self._times.items():
                histogram.observe(getattr(usage, f"{name}_ms") / 1e3)

    def responded(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return the exposition format. It may wait for the catalogue, so it runs on a thread."""
        return generate_latest(self.registry)


class ResponseCounter:
    """ASGI middleware that counts responses by status. An exception counts as the response that it is answered with,
    because the framework's middleware that answers stands outside of all others."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.responded(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except Exception as error:
            if not started:
                self.metrics.responded(shown_for(error).status)
            raise


class _StateCollector:
    """Collects the counters of the engine and the library."""

    def __init__(self, engine: Engine, library: Library) -> None:
        self.engine = engine
        self.library = library

    def collect(self) -> Iterator[Metric]:
        try:
            engine = self.engine.stats()
        except MPICError:
            engine = {}
        yield from _engine(engine)
        tiers = {"device": _device(engine), **self.library.stats()["tiers"]}
        yield from _tiers(tiers)


def _by(kind: type, name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a metric with one value for each value of a label."""
    metric = kind(name, description, labels=[label])
    for label_value, value in values.items():
        metric.add_metric([label_value], value)
    return metric


def _engine(stats: dict[str, Any]) -> Iterator[Metric]:
    counters, pages = stats.get("counters", {}), stats.get("pages", {})
    for name in ("running", "waiting"):
        yield GaugeMetricFamily(f"mpic_requests_{name}", f"Requests {name}", value=stats.get(name, 0))
    ends = {end: counters.get(f"finished_{end}", 0) for end in ("stop", "length", "abort")}
    ends["error"] = counters.get("failed", 0)
    yield _by(CounterMetricFamily, "mpic_requests", "Requests by how they ended", "end", ends)
    tokens = {state: counters.get(f"tokens_{state}", 0) for state in TOKENS}
    described = "Tokens of prompts by where they came from"
    yield _by(CounterMetricFamily, "mpic_prompt_tokens", described, "state", tokens)
    yield CounterMetricFamily("mpic_generated_tokens", "Tokens generated", value=counters.get("generated", 0))
    yield CounterMetricFamily(
        "mpic_preemptions", "Requests that were preempted", value=counters.get("preemptions", 0)
    )
    held = {state: pages.get(state, 0) for state in ("free", "chunks", "prefix", "running")}
    yield _by(GaugeMetricFamily, "mpic_pages", "Pages of the pool by state", "state", held)
    yield GaugeMetricFamily("mpic_page_bytes", "Bytes of one page", value=pages.get("page_bytes", 0))


def _device(stats: dict[str, Any]) -> dict[str, int]:
    """Return the counters of the page pool under the names the other tiers use."""
    counters, pages = stats.get("counters", {}), stats.get("pages", {})
    return {
        "requested": counters.get("chunk_requests", 0),
        "hits": counters.get("chunk_hits", 0),
        "chunks": stats.get("chunks_resident", 0),
        "bytes": pages.get("chunks", 0) * pages.get("page_bytes", 0),
        "budget": pages.get("total", 0) * pages.get("page_bytes", 0),
        "evicted_room": counters.get("evicted_chunks", 0),
        "evicted_prefix": counters.get("evicted_prefixes", 0),
    }


def _tiers(tiers: dict[str, dict[str, int]]) -> Iterator[Metric]:
    for kind, name, description in (
        (GaugeMetricFamily, "chunks", "Compiled chunks of a tier"),
        (GaugeMetricFamily, "bytes", "Bytes of compiled chunks of a tier"),
        (GaugeMetricFamily, "budget", "Most bytes of a tier"),
        (CounterMetricFamily, "requested", "Chunks looked for in a tier"),
        (CounterMetricFamily, "hits", "Chunks found in a tier"),
    ):
        counted = {tier: counts.get(name, 0) for tier, counts in tiers.items()}
        yield _by(kind, f"mpic_tier_{name}", description, "tier", counted)
    evictions = CounterMetricFamily(
        "mpic_evictions", "Evictions by tier and reason", labels=["tier", "reason"]
    )
    for tier, counts in tiers.items():
        for name, count in counts.items():
            if name.startswith("evicted_"):
                evictions.add_metric([tier, name.removeprefix("evicted_")], count)
    yield evictions
    for kind, name, description in (
        (GaugeMetricFamily, "up", "Whether a remote tier answers"),
        (GaugeMetricFamily, "bytes_per_second", "Bandwidth of a remote tier, measured"),
        (GaugeMetricFamily, "latency_us", "Time of a remote tier's first answer, measured, in microseconds"),
        (
            CounterMetricFamily,
            "slower",
            "Chunks that were computed because a remote tier would have taken longer",
        ),
        (CounterMetricFamily, "failed_reads", "Reads that a remote tier has failed"),
        (GaugeMetricFamily, "uploads_waiting", "Chunks that wait to be copied to a remote tier"),
        (GaugeMetricFamily, "deletions_waiting", "Deletions of which a remote tier has yet to be told"),
    ):
        counted = {tier: counts[name] for tier, counts in tiers.items() if name in counts}
        yield _by(kind, f"mpic_tier_{name}", description, "tier", counted)
