"""Threads of tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def started(work: Callable, *arguments: Any, **options: Any) -> threading.Thread:
    """Start a thread that runs ``work`` with the arguments; the options are the thread's."""
    thread = threading.Thread(target=work, args=arguments, **options)
    thread.start()
    return thread


def in_threads(work: Callable, arguments: Iterable[Any]) -> list[Any]:
    """Run ``work`` with each of the arguments, all at once; raise the exception of one of them."""
    arguments = list(arguments)
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))
