"""What a library of many files costs when the server starts again: time and memory of opening it.

Each opening is a process of its own, after the imports: the time is ``Library.open`` alone, with the reconciliation of
rows and files, and the memory is what the process holds on top of an empty library. The page cache is warm.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from mpic.durable import Files
from mpic.evals.bench.frame import BenchFailed, Report, Ticker, Where, bench
from mpic.kv.chunk import ChunkInputs, ChunkKV, KVKey, Recipe
from mpic.library import Library

_USERS = 20
_MODEL = "00" * 32


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``restart`` bench."""

    files: int = 10_000
    repeats: int = 5


@bench(
    "restart",
    "start-up time and memory of a library of many files, each with its compiled chunk",
    Settings,
    quick={"files": 1_000, "repeats": 3},
    wants={"start_seconds": "< 2", "memory_mib": "< 64"},
    on_cpu=True,
    in_process=False,
)
def run(settings: Settings, where: Where, ticker: Ticker) -> Report:
    """Opened after a clean end, after a kill (with a write-ahead log to replay and leftovers), and empty."""
    ticker.expect(1 + 3 * settings.repeats)
    with tempfile.TemporaryDirectory(prefix="mpic-restart-") as folder:
        full, empty = Path(folder, "full"), Path(folder, "empty")
        Library.open(empty).close()
        with ticker.step(f"storing {settings.files} files"):
            _fill(full, settings.files)
        samples: dict[str, list[dict[str, float]]] = {"empty": [], "clean end": [], "killed": []}
        for _ in range(settings.repeats):
            for name, root in (("empty", empty), ("clean end", full), ("killed", full)):
                with ticker.step(name):
                    samples[name].append(_start(root, kill=name == "clean end"))
        disk = sum(path.stat().st_size for path in full.rglob("*") if path.is_file())
    for sample in (*samples["clean end"], *samples["killed"]):
        if sample["files"] != settings.files or sample["chunks"] != settings.files:
            raise BenchFailed(f"of {settings.files} files a restart found {sample}")
    rows = [_row(name, values, samples["empty"]) for name, values in samples.items()]
    worst = rows[1:]
    headline = {
        "start_seconds": max(row["open_ms"] for row in worst) / 1e3,
        "memory_mib": max(0.1, *(row["memory_mib"] for row in worst)),
    }
    notes = {"page_cache": "warm", "folder_bytes": disk, "users": _USERS}

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar([str(row["start"]) for row in rows], [row["open_ms"] for row in rows])
        axes.set_ylabel("ms to open")
        axes.set_title(f"{settings.files:,} files, {headline['memory_mib']:.1f} MiB")

    return Report(rows, headline, notes, plot)


def child(root: Path, kill: bool) -> None:
    """Open a library in this process, say what it cost, and end: cleanly, or as a killed process does after some
    uploads."""
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    library = Library.open(root)
    opened = time.perf_counter()
    memory = process.memory_info().rss - before
    page = library.files.page("user 0", limit=100).files
    listed = time.perf_counter()
    stats = library.stats()
    result = {
        "open_ms": (opened - start) * 1e3,
        "page_ms": (listed - opened) * 1e3,
        "memory_mib": memory / 2**20,
        "files": stats["files"],
        "chunks": stats["disk"]["chunks"],
        "leftovers": library.recovered["leftovers"],
    }
    print(json.dumps(result), flush=True)
    if kill:
        for file in page[:20]:  # rows in the log, and files that nothing refers to
            library.files.set_state("user 0", file.id, "ready", 16)
            (root / "tmp" / f"{secrets.token_hex(12)}.tmp").write_bytes(b"left")
        os._exit(0)
    library.close()


def _start(root: Path, kill: bool) -> dict[str, float]:
    code = "import sys; from pathlib import Path; from mpic.evals.bench.restart import child; "
    code += "child(Path(sys.argv[1]), sys.argv[2] == 'kill')"
    command = [sys.executable, "-c", code, str(root), "kill" if kill else "close"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchFailed(f"opening the library failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _fill(root: Path, count: int) -> None:
    with Library.open(root, files=_Unsynced()) as library:
        for number in range(count):
            user = f"user {number % _USERS}"
            text = f"document {number} of a library that is opened again and again".encode()
            file = library.files.add(user, text, f"{number}.txt", handle=f"H{number}")
            key = KVKey(user, file.key, _MODEL, Recipe("float32"))
            inputs = ChunkInputs(torch.arange(16), torch.arange(16)[None], 16)
            library.store.save(ChunkKV(key, inputs, torch.zeros(2, 2, 1, 16, 8)))
            library.files.set_state(user, file.id, "ready", 16)


def _row(name: str, values: list[dict[str, float]], empty: list[dict[str, float]]) -> dict[str, str | float]:
    median = lambda key, of: sorted(one[key] for one in of)[len(of) // 2]
    return {
        "start": name,
        "open_ms": round(median("open_ms", values), 1),
        "first_page_ms": round(median("page_ms", values), 2),
        "memory_mib": round(
            median("memory_mib", values) - (name != "empty") * median("memory_mib", empty), 1
        ),
        "leftovers": int(median("leftovers", values)),
    }


class _Unsynced(Files):
    """Does not wait for the disk, to fill a library faster than a user would."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass
