"""The end of vLLM's processes when the one that started them has been killed: nobody would ever end them."""

from __future__ import annotations

import os
import signal
import threading
import time

SECONDS = 1.0
PATIENCE = 10.0
"""Seconds to end in an orderly way."""


def end_with(parent: int) -> None:
    """Watch the parent of this process from a thread, and end this one when it is gone. A process that was started by
    another one (a Ray actor) is left alone."""
    if os.getppid() not in (parent, 1):  # 1: it is gone already
        return
    threading.Thread(target=_watch, args=(parent,), name="mpic-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
