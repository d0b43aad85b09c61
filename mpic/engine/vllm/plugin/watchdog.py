"""Ends a vLLM process when the process that started it has been killed, because nothing else would end it. The vLLM
process ignores Ctrl-C, which a terminal sends to both; its parent ends it."""

from __future__ import annotations

import os
import signal
import threading
import time

SECONDS = 1.0
"""Seconds between checks of the parent."""
PATIENCE = 10.0
"""Seconds that the process has for an orderly end."""


def end_with_parent(parent: int) -> None:
    """Watch the parent of this process from a thread, and end this process when the parent is gone. A process with
    another parent (a Ray actor) is left alone."""
    if os.getppid() not in (parent, 1):  # 1: the parent is gone already
        return
    threading.Thread(target=_watch, args=(parent,), name="mpic-parent", daemon=True).start()


def leave_interrupts_to(parent: int) -> None:
    """Ignore Ctrl-C in a process that ``parent`` started. The parent ends its requests and then this process; vLLM
    would abort what it computes while the parent still lets answers finish. Call it after vLLM has set its handlers."""
    if os.getppid() == parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
