"""Checks many families, each in a separate process with a time limit, so that a crash or hang of one does not affect
the others."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from mpic_lab.models.check import Row

SECONDS = 300.0
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment of processes with vLLM, set before anything is imported: nothing is to be fetched, and other processes
may run beside them."""
_PRELOAD = ["torch", "transformers", "mpic_lab.models.child"]


def sweep(
    wanted: Sequence[tuple[str, str]],
    workers: int = 2,
    seconds: float = SECONDS,
    tell: Callable[[Row], None] = lambda row: None,
    engine: str = "native",
) -> list[Row]:
    """Check families ``(family, kind)`` and return their rows in the same order.

    Args:
        workers: processes at a time.
        seconds: a family may take.
        tell: called with every row as soon as it is known.
        engine: native or vllm.
    """
    rows: dict[tuple[str, str], Row] = {}
    for row in _rows(wanted, workers, seconds, engine):
        rows[row.family, row.kind] = row
        tell(row)
    return [rows[name] for name in wanted]


def _rows(wanted: Sequence[tuple[str, str]], workers: int, seconds: float, engine: str) -> Iterator[Row]:
    from time import monotonic

    is_daemon = engine == "native"  # vLLM starts processes, which a daemonic process may not do
    preload = list(_PRELOAD)
    if engine == "vllm":
        preload.append("mpic_lab.models.vllm_imported")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    queue = list(reversed(wanted))
    running: dict[Connection, tuple[tuple[str, str], multiprocessing.process.BaseProcess, float]] = {}
    with tempfile.TemporaryDirectory(
        prefix="mpic-families-"
    ) as scratch:  # also remove what a killed process leaves
        while queue or running:
            while queue and len(running) < workers:
                from mpic_lab.models import child

                name = queue.pop()
                receive, send = context.Pipe(duplex=False)
                process = context.Process(
                    target=child.run, args=(send, *name, engine, scratch), daemon=is_daemon
                )
                process.start()
                send.close()
                running[receive] = (name, process, monotonic() + seconds)
            first = min(deadline for _, _, deadline in running.values())
            for receive in wait(list(running), timeout=max(0.0, first - monotonic())):
                name, process, _ = running.pop(receive)
                try:
                    yield Row(*receive.recv())
                except EOFError:
                    process.join()
                    yield Row(*name, "failed", f"its process ended with {process.exitcode}")
                _end(process)
            for receive, (name, process, deadline) in list(running.items()):
                if monotonic() > deadline:
                    running.pop(receive)
                    _end(process, 0)
                    yield Row(*name, "failed", f"took more than {seconds:.0f} s")


def _end(process: multiprocessing.process.BaseProcess, seconds: float = 60.0) -> None:
    """Wait for a process, and kill it after ``seconds``."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
