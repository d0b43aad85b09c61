"""A run says which tests this machine cannot run, or refuses to begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import missing
import processors
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
    """Begin a run that spreads its tests, where neither vLLM nor a browser is installed, and end it before any
    process is started."""

    def begin(**variables):
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
        return subprocess.run(
            [sys.executable, "-c", BEGIN],
            cwd=ROOT,
            env=environment | {"PATH": "/nowhere"} | variables,
            capture_output=True,
            text=True,
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


def test_the_end_of_a_run_counts_what_did_not_run_by_its_reason():
    def skipped(nodeid, reason):
        return SimpleNamespace(nodeid=nodeid, longrepr=("a.py", 1, f"Skipped: {reason}"))

    reports = [
        skipped("a.py::one", "no unit"),
        skipped("b.py::two", "no curl"),
        skipped("b.py::three", "no unit"),
    ]
    reports.append(SimpleNamespace(nodeid="c.py::expected_to_fail", longrepr="a fault that is known"))
    assert missing.not_run(reports) == [
        "2 not run: no unit: 1 in a.py, 1 in b.py",
        "1 not run: no curl: 1 in b.py",
    ]


SAY_PROCESSOR = """
import sys
sys.path.insert(0, "tests")
import processors
processors.hold_libraries()
import torch
from mpic.kernels import instructions
print(instructions.level(), instructions.pairs(), instructions.unit())
print(*(name for name in processors.PROCESSORS if not processors.why_not(name)))
"""


@pytest.mark.parametrize("name", [*processors.PROCESSORS, "avx10"])
def test_a_run_is_held_to_the_processor_that_it_is_to_stand_for(name):
    variables = {processors.VARIABLE: name}
    done = subprocess.run(
        [sys.executable, "-c", SAY_PROCESSOR],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    if name not in processors.PROCESSORS:
        assert "avx2, avx512, avx512_bf16, amx, not 'avx10'" in done.stderr
        return
    if processors.why_not(name):
        pytest.skip(processors.why_not(name))
    wanted, names = processors.PROCESSORS[name], list(processors.PROCESSORS)
    first, second = done.stdout.splitlines()
    assert first == f"{wanted.level} {wanted.pairs} {wanted.unit}"
    assert second.split() == names[: names.index(name) + 1]
