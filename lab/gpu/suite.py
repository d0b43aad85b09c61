"""The section that needs more than a bare machine: the kernels' test files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mpic_lab.gpu.supervise import SectionRun

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels"
FILES = ("test_spans.py", "test_triton_scatter.py", "test_triton_attention.py")
"""The test files that use the device; the others test kernels for CPUs."""


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
    """Run ``tests/kernels`` on this device, in this process, from the checkout.

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
