"""Extracts the server's figures for the page from the text of ``/metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PERCENTILES = (50, 90, 99)


class Figures:
    """Samples of Prometheus' exposition format, by name and labels."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def get(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        wanted = labels.items()
        return sum(value for has, value in self._samples[name] if wanted <= has.items())

    def values(self, name: str, label: str) -> list[str]:
        """Return the values of a label, in the order of the samples."""
        return [has[label] for has, _ in self._samples[name]]

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Return the upper bounds of a histogram, with the number of values at or below each."""
        return sorted((float(has["le"]), value) for has, value in self._samples[f"{name}_bucket"])


def figures(text: str) -> dict[str, Any]:
    """Return the figures for the administrator's panel. Times are in milliseconds; None before the first answer."""
    found = Figures(text)
    buckets = found.buckets("mpic_time_to_first_token_seconds")
    requested = found.get("mpic_prompt_tokens_total", state="requested")
    reused = sum(found.get("mpic_prompt_tokens_total", state=state) for state in ("reused", "prefix_hit"))
    seconds = {f"p{p}": percentile(buckets, p) for p in PERCENTILES}
    return {
        "running": int(found.get("mpic_requests_running")),
        "waiting": int(found.get("mpic_requests_waiting")),
        "first_token_ms": {name: None if s is None else 1e3 * s for name, s in seconds.items()},
        "prompt_tokens": int(requested),
        "reused_tokens": int(reused),
        "evictions": int(found.get("mpic_evictions_total")),
        "tiers": [
            {
                "tier": tier,
                **{n: int(found.get(f"mpic_tier_{n}", tier=tier)) for n in ("bytes", "budget", "chunks")},
            }
            for tier in found.values("mpic_tier_budget", "tier")
            if found.get("mpic_tier_budget", tier=tier) or found.get("mpic_tier_chunks", tier=tier)
        ],
    }


def percentile(buckets: Sequence[tuple[float, float]], percent: float) -> float | None:
    """Estimate a percentile of a histogram as Prometheus does: linear inside a bucket, and the last finite bound
    above it.

    Args:
        buckets: cumulative, ascending, the last one unbounded.

    Returns:
        None when nothing was counted.
    """
    if not buckets or not buckets[-1][1]:
        return None
    rank, below, start = buckets[-1][1] * percent / 100, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return start
            return start + (bound - start) * ((rank - below) / (count - below) if count > below else 1.0)
        below, start = count, bound
    return start
