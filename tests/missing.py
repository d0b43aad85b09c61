"""Finds out what some tests need and a machine lacks, and tells it at the end of a run."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from browsing import find_browser

TESTS = Path(__file__).parent
STRICT = "MPIC_TEST_EVERYTHING"
"""With this variable set nothing is left out: what is missing is an error."""


def vllm_is_installed() -> bool:
    """Return whether vLLM is installed. The folder ``tests/vllm`` looks like a package, too, but has no origin."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def left_out(config: pytest.Config) -> list[str]:
    """Return a line for each folder of tests that the run asks for and this machine cannot run.

    Raises:
        pytest.UsageError: there is one, and ``STRICT`` is set.
    """
    lines = []
    if not vllm_is_installed() and _asked(config, TESTS / "vllm"):
        lines.append("tests/vllm did not run: vLLM is not installed (make setup-vllm)")
    if find_browser() is None and _asked(config, TESTS / "webui"):
        lines.append("tests in a browser did not run: there is no chromium (tools/get_chromium.sh)")
    if lines and os.environ.get(STRICT):
        raise pytest.UsageError("\n".join([*lines, f"{STRICT} is set, so that nothing is left out"]))
    return lines


def not_run(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each reason for which tests did not run: how many, why, and in which files."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for report in skipped:
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            files[reason][report.nodeid.partition("::")[0]] += 1
    return [
        f"{counts.total()} not run: {reason}: {', '.join(f'{count} in {file}' for file, count in counts.items())}"
        for reason, counts in files.items()
    ]


def _asked(config: pytest.Config, folder: Path) -> bool:
    paths = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in paths)
