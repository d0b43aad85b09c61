"""A run says which tests this machine cannot run, or refuses to begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import missing
import pytest

ROOT = Path(__file__).parents[1]
BEGIN = """
import sys
import pytest
from xdist.workermanage import NodeManager

class Begin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self):
        pytest.exit("that is all", 0)

sys.path.insert(0, "tests")
import missing
missing.vllm_is_installed = lambda: False
NodeManager.setup_nodes = lambda self, putevent: []
sys.exit(pytest.main(["-n", "1"], plugins=[Begin()]))
"""


@pytest.fixture
def begun():
    """Begins a run that spreads its tests, where neither vLLM nor a browser is installed, and ends it before any
    process is started."""

    def begin(**variables):
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
        return subprocess.run(
            [sys.executable, "-c", BEGIN],
            cwd=ROOT,
            env=environment | {"PATH": "/nowhere"} | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return begin


def test_a_run_in_other_processes_says_at_its_end_what_did_not_run(begun):
    said = begun().stdout
    assert "tests/vllm did not run: vLLM is not installed" in said and "there is no chromium" in said


def test_a_run_that_is_to_test_everything_does_not_begin_where_something_is_missing(begun):
    done = begun(**{missing.STRICT: "1"})
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "vLLM is not installed" in done.stderr and missing.STRICT in done.stderr


@pytest.mark.parametrize(
    "args, told",
    [(["tests"], 1), (["tests/vllm/test_links.py::test_it"], 1), (["tests/link", "tests/kv"], 0)],
)
def test_only_what_a_run_asks_for_is_missing(args, told, monkeypatch):
    monkeypatch.setattr(missing, "vllm_is_installed", lambda: False)
    monkeypatch.setattr(missing, "find_browser", lambda: "chromium")
    config = SimpleNamespace(args=args, invocation_params=SimpleNamespace(dir=ROOT))
    assert len(missing.left_out(config)) == told
