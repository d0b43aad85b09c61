"""Measures how long ``mpic serve`` takes until it answers.

Every start is a process of its own. CPU seconds are compared, because other work on the machine changes them less than
wall-clock time. A server takes turns with a script that only imports the libraries and loads the model with
transformers, which any server built from them has to do, too. The first round is not counted: it fills the page cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mpic.config import bundled_model
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench
from mpic_lab.demo import server_process

SERVER = "server"
BARE = "libraries and model alone, no server"
SCRIPT = """
import sys, time
import fastapi, psutil, torch, uvicorn
from transformers import AutoModelForImageTextToText, AutoProcessor
began, model = float(sys.argv[1]), sys.argv[2]
kept = AutoModelForImageTextToText.from_pretrained(model), AutoProcessor.from_pretrained(model)
process = psutil.Process()
times = process.cpu_times()
print(times.user, times.system, time.time() - began, process.memory_info().rss / 2**20)
"""
"""Loads a model, and prints processor seconds of the user and the system, seconds since it was started, and MiB."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``start`` bench.

    Args:
        model: folder of the model; empty: the bundled one.
        uncounted: rounds before those that count.
    """

    model: str = ""
    uncounted: int = 1
    repeats: int = 5


@dataclass(frozen=True)
class Start:
    """Seconds until a server's ``/health/ready`` answers, or until a script without one has loaded the model: the
    processor's in all, in the system, and the clock's; and the memory that the process then holds, MiB."""

    processor: float
    system: float
    clock: float
    mib: float


@bench(
    "start",
    "seconds until `mpic serve` answers",
    Settings,
    quick={"repeats": 1},
    wants={
        "ready_processor_seconds": "< 2.5",
        "ready_over_libraries": "near 1: little beside the libraries",
    },
    in_process=False,
    on_cpu=True,
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Make a row for the server, and one for the script."""
    ticker.expect(2 * (settings.uncounted + settings.repeats))
    served: list[Start] = []
    bare: list[Start] = []
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(settings.uncounted + settings.repeats):
            with ticker.step(SERVER), started(settings.model, Path(folder) / SERVER) as start:
                pass
            with ticker.step(BARE):
                loaded = _loaded(settings.model)
            if round_number >= settings.uncounted:
                served.append(start)
                bare.append(loaded)
    table = [_row(way, starts) for way, starts in {SERVER: served, BARE: bare}.items()]
    headline = {
        "ready_processor_seconds": statistics.median(one.processor for one in served),
        "ready_over_libraries": statistics.median(
            ours.processor / theirs.processor for ours, theirs in zip(served, bare, strict=True)
        ),
    }
    notes = {
        "model": Path(settings.model or bundled_model()).name,
        "libraries": "a script that imports torch, transformers, FastAPI and uvicorn, and loads the model and its "
        "processor with transformers",
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch chooses"),
    }
    return Report(table, headline, notes, lambda figure: _plot(figure, table))


@contextmanager
def started(model: str, data_dir: Path, *options: str) -> Iterator[Start]:
    """Start a server, wait until it is ready, yield the cost of the start, and end the server.

    Raises:
        StartFailed: the server does not start.
    """
    data_dir.mkdir(exist_ok=True)
    flags = ["--device", "cpu", "--dtype", "float32", "--model", model or bundled_model(), *options]
    began = time.perf_counter()
    with server_process(data_dir, *flags) as server:
        with urllib.request.urlopen(f"{server.url}/health/ready", timeout=60) as answer:
            answer.read()
        clock = time.perf_counter() - began
        process = psutil.Process(server.pid)
        times, held = process.cpu_times(), process.memory_info().rss
        user, system = times.user + times.children_user, times.system + times.children_system
        yield Start(user + system, system, clock, held / 2**20)


def _loaded(model: str) -> Start:
    """Measure a process that imports the libraries and loads a model with transformers, without a server.

    Raises:
        BenchFailed: it did not load the model; the message holds the end of its output.
    """
    command = [sys.executable, "-c", SCRIPT, str(time.time()), model or bundled_model()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"transformers alone did not load the model:\n{done.stderr[-2000:]}")
    user, system, clock, mib = map(float, done.stdout.splitlines()[-1].split())
    return Start(user + system, system, clock, mib)


def _row(way: str, starts: list[Start]) -> Row:
    seconds = [one.processor for one in starts]
    return {
        "table": "until it is ready",
        "start": way,
        "processor_s": round(statistics.median(seconds), 2),
        "least_s": round(min(seconds), 2),
        "of_it_system_s": round(statistics.median(one.system for one in starts), 2),
        "clock_s": round(statistics.median(one.clock for one in starts), 2),
        "mib": round(statistics.median(one.mib for one in starts)),
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    axes.barh([row["start"] for row in rows], [row["processor_s"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("processor seconds until it is ready")
    axes.grid(alpha=0.3)
