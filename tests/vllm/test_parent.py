"""The engine process does not outlive the process that started it, however that ends."""

from __future__ import annotations

import subprocess
import sys

import psutil

CHILD = """
import os, time
from mpic.engine.vllm.parent import end_with
end_with({})
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def started(parent: str) -> tuple[subprocess.Popen, psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.format(parent)], stdout=subprocess.PIPE, text=True
    )
    return process, psutil.Process(int(process.stdout.readline()))


def test_it_ends_when_its_parent_is_killed():
    parent, child = started("os.getppid()")
    try:
        assert child.is_running()
        parent.kill()
        assert psutil.wait_procs([child], 10)[0] == [child]
    finally:
        parent.wait()
        parent.stdout.close()


def test_a_process_of_another_parent_is_left_alone():
    parent, child = started("os.getppid() + 1")
    try:
        assert psutil.wait_procs([child], 2)[1] == [child]
    finally:
        child.kill()
        parent.wait()
        parent.stdout.close()
