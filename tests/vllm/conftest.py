"""Skips all tests of this folder where vLLM is not installed."""

from __future__ import annotations

import pytest
import vllm_kit

collect_ignore_glob = [] if vllm_kit.available() else ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str | None:
    if vllm_kit.available():
        return None
    return "vLLM is not installed: the tests in tests/vllm do not run (make setup-vllm)"
