"""The engine process ends when the process that started it has ended, however that ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import psutil
import pytest

CHILD = """
import os, time
import signal
from mpic.engine.vllm.plugin import watchdog
watchdog.PATIENCE = 0.5
{}
watchdog.end_with_parent({})
watchdog.leave_interrupts_to(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@contextmanager
def started(parent: str, first: str = ""):
    """A process that has started another, which is watched."""
    command = [sys.executable, "-c", PARENT, CHILD.format(first, parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        try:
            yield process, child
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_it_ends_when_its_parent_is_killed(first):
    with started("os.getppid()", first) as (parent, child):
        assert child.is_running()
        parent.kill()
        _, alive = psutil.wait_procs([child], 30)
        # whoever adopted it may not look after it
        assert all(p.status() == psutil.STATUS_ZOMBIE for p in alive)


def test_a_process_of_another_parent_is_left_alone():
    with started("os.getppid() + 1") as (_, child):
        assert psutil.wait_procs([child], 2)[1] == [child]


def test_ctrl_c_is_left_to_the_parent_which_still_ends_it():
    """vLLM's own handler, as ``EngineCore`` sets it, would end what is being computed."""
    with started("os.getppid()", "signal.signal(signal.SIGINT, lambda *_: os._exit(1))") as (_, child):
        child.send_signal(signal.SIGINT)
        assert psutil.wait_procs([child], 2)[1] == [child]
        child.terminate()
        assert psutil.wait_procs([child], 30)[1] == [] or child.status() == psutil.STATUS_ZOMBIE
