"""Sections that need more than the bare report: the kernels' test files, and the bench of links inside vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mpic_lab.bench.harness import Row
from mpic_lab.gpu.supervise import SectionRun

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels"
FILES = ("test_spans.py", "test_triton_scatter.py", "test_triton_attention.py")
"""Those that use the device; the others are of kernels for CPUs."""


class _TestRows:
    """A pytest plugin that writes one row per test."""

    def __init__(self, run: SectionRun) -> None:
        self._run = run

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            more = {} if report.passed else {"error": str(report.longrepr)[-1500:]}
            name = report.nodeid.removeprefix(f"{FOLDER}/")
            if not report.skipped:
                seconds = round(report.duration, 3)
                self._run.row("test", name, report.when, seconds, "s", ok=bool(report.passed), **more)


def tests(run: SectionRun) -> None:
    """Runs ``tests/kernels`` on this device, in this process, from the checkout.

    Raises:
        RuntimeError: pytest could not collect them.
    """
    import pytest

    os.chdir(ROOT)
    chosen = ["-k", "log_sum_exp"] if run.quick else []
    arguments = [*(f"{FOLDER}/{name}" for name in FILES), "-q", "-p", "no:cacheprovider", *chosen]
    status = pytest.main(arguments, plugins=[_TestRows(run)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")


def figure_of(row: Row) -> tuple[float | None, str]:
    """Returns the median of a bench's row and its unit, None and nothing if it has no median."""
    for name, value in row.items():
        if name.startswith("median_"):
            return value, name.removeprefix("median_").replace("tokens_s", "tokens/s")
    return None, ""


def vllm(run: SectionRun) -> None:
    """Runs ``mpic bench ttft --engine vllm``, of which the tiny form still takes minutes: links from each tier, several
    questions at once, answers while prompts arrive."""
    from mpic_lab.bench import ttft, ttft_vllm  # noqa: F401 - each registers itself
    from mpic_lab.bench.harness import BENCHES, Ticker
    from mpic_lab.bench.workload import DecoderShape
    from mpic_lab.gpu.context import Context

    context = Context(run)
    if run.quick:
        context.left_out(
            "first token inside vLLM", "tiny", "starting vLLM twice takes minutes; use `mpic bench ttft`"
        )
        return
    entry = BENCHES["ttft"].on("vllm")
    settings = entry.configured(decoder=DecoderShape(24, 2048, 16, 5504, context=8192))
    report = entry.run(settings, context.placement, Ticker())
    for row in report.rows:
        value, unit = figure_of(row)
        names = (row[name] for name in ("column", "engine", "sent", "arrives meanwhile") if name in row)
        run.row("inside vLLM", str(row.get("table", "")), " | ".join(names), value, unit, columns=row)
    for name, value in report.headline.items():
        goal = entry.wants.get(name, "")
        run.row("headline", "inside vLLM", "vllm", round(value, 3), "", headline=f"vllm_{name}", goal=goal)
