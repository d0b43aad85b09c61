"""Links in vLLM's second model runner, whose Triton kernels run in the interpreter; everything else is vLLM's own code.
vLLM looks for Triton when it is imported, so these engines run in processes of their own. What needs no engine is in
``test_runner.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOME = "cut_into_steps or preempted_while_it_answers or in_the_same_steps or before_it_serves or until_they_are_read"
WHOLE = ("test_links.py", "test_link_pressure.py", "test_faults.py")
WHOLE += ("test_bad_files.py", "test_beside_forward.py")


def run(*names: str) -> int:
    """Run tests in a process of its own and return how many have passed; none fails."""
    options = ["-x", "-p", "no:cacheprovider", "--timeout", "850"]
    command = [sys.executable, "-m", "pytest", *options, *names]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    said = done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and passed, said
    return int(passed[1])


@pytest.mark.timeout(900)
def test_links_cut_into_steps_preempted_and_in_one_batch_are_right_in_the_second_runner():
    assert run("test_link_pressure.py", "-k", SOME) == len(SOME.split(" or "))


@pytest.mark.parity
@pytest.mark.parametrize("name", WHOLE)
def test_every_test_of_links_holds_in_the_second_runner(name):
    run(name, "--parity", "--timeout", "1800")
