"""Finds out which of the programs that some tests need are missing on a machine, and tells it at the end of a run."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from browsing import find_browser

TESTS = Path(__file__).parent
STRICT = "MPIC_TEST_EVERYTHING"
"""With this variable set nothing is left out: what is missing is an error."""


def vllm_is_installed() -> bool:
    """Returns whether vLLM is installed. The folder ``tests/vllm`` looks like a package, too, but has no origin."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def left_out(config: pytest.Config) -> list[str]:
    """Returns a line for each folder of tests that the run asks for and this machine cannot run.

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


def _asked(config: pytest.Config, folder: Path) -> bool:
    paths = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in paths)
