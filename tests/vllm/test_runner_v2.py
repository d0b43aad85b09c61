"""Links in vLLM's second model runner. vLLM reads at import which runner there is, so its engines run in processes of their
own; tests that need no engine are in ``test_runner.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WHOLE = ("test_links.py", "test_link_pressure.py", "test_faults.py", "test_bad_files.py")


def run(*names: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names]
    done = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_links_cut_into_steps_preempted_and_in_one_batch_are_right_in_the_second_runner():
    run("v2_links.py")


@pytest.mark.parity
@pytest.mark.parametrize("name", WHOLE)
def test_every_test_of_links_holds_in_the_second_runner(name):
    run(name, "--parity", "--timeout", "1800")
