"""Cancelling long work on a thread once nobody waits for its result.

A thread cannot be interrupted from outside, so work whose length a client chooses calls ``checkpoint`` between its
steps. The caller that starts the work sets with ``until`` when it is to end, for example when the client's connection
closes. The signal travels in the context of the thread, so the functions in between need no parameter for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_signal: ContextVar[threading.Event | None] = ContextVar("mpic_cancel", default=None)


class Cancelled(Exception):
    """The work was cancelled, because nobody waits for its result any more."""


@contextmanager
def until(signal: threading.Event) -> Iterator[None]:
    """Make ``checkpoint`` raise inside the block as soon as ``signal`` is set."""
    token = _signal.set(signal)
    try:
        yield
    finally:
        _signal.reset(token)


def checkpoint() -> None:
    """Raise Cancelled if the work that calls it is to end. Without ``until`` it does nothing."""
    signal = _signal.get()
    if signal is not None and signal.is_set():
        raise Cancelled
