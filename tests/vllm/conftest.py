"""Skips all tests of this folder where vLLM is not installed."""

from __future__ import annotations

from typing import Any

import vllm_kit

collect_ignore_glob = [] if vllm_kit.available() else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not vllm_kit.available():
        terminalreporter.write_line("tests/vllm did not run: vLLM is not installed (make setup-vllm)")
