"""Held-out exact match of a demo model over every task, chunk count and link: a resumable run, and its report."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration

from mpic.config import ConfigError
from mpic_lab.generator.wordings import Asking
from mpic_lab.train.batch import Encoder
from mpic_lab.train.generations import Generation, generation_at, generation_of
from mpic_lab.train.model import load_model
from mpic_lab.train.scoring import BRANCHES, LinkVariant, first_token_share, questions, score_cell


@dataclass(frozen=True)
class ScoringRun:
    """The settings that the figures of a run depend on: those of another run are not mixed in."""

    weights: str  # SHA-256
    size: int
    seed: int
    links: tuple[str, ...]
    asking: str = "eval"
    branches: int = BRANCHES


def _stem(asking: str) -> str:
    """Returns the stem of the files that hold the scores."""
    return "scores" if asking == "eval" else f"scores-{asking}"


class Partial:
    """Cells done so far, in a file beside the weights; replaced whole after every cell."""

    def __init__(self, folder: Path, run: ScoringRun, resume: bool) -> None:
        self.path, self.run = folder / f"{_stem(run.asking)}.part.json", json.loads(json.dumps(asdict(run)))
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0
        if resume and self.path.exists():
            state = json.loads(self.path.read_text())
            if state["run"] != self.run:
                differs = [k for k, v in self.run.items() if state["run"].get(k) != v]
                raise ConfigError(
                    f"{self.path} is of a run with other {', '.join(differs)}; score without --resume",
                    param="resume",
                )
            self.rows, self.seconds = state["rows"], state["seconds"]

    def has(self, task: str, count: int) -> bool:
        """Returns whether the cell is done."""
        return any(r["task"] == task and r["chunks"] == count for r in self.rows)

    def add(self, rows: list[dict[str, Any]], seconds: float) -> None:
        """Keeps the rows of a cell."""
        self.rows += rows
        temporary = self.path.with_suffix(".tmp")
        state = {"run": self.run, "seconds": round(self.seconds + seconds), "rows": self.rows}
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(self.path)


_LONGEST_FIRST = (8, 1, 4, 2, 0)
"""Numbers of chunks in the order in which cells are begun."""
_loaded: tuple[LlavaForConditionalGeneration, Encoder]  # state of a worker process


def _load(folder: Path, threads: int) -> None:
    global _loaded
    if threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    model, tokenizer = load_model(folder)
    if torch.cuda.is_available():
        model = model.cuda()  # type: ignore[assignment]
    _loaded = model, generation_of(model).encoder(tokenizer)


def _cell(
    count: int, task: str, size: int, seed: int, links: tuple[LinkVariant, ...], asking: Asking
) -> list[dict[str, Any]]:
    return score_cell(*_loaded, task, count, size, seed, links, asking, generation_of(_loaded[0]).world)


def evaluate(
    folder: Path,
    size: int = 200,
    links: tuple[LinkVariant, ...] | None = None,
    cells: dict[str, tuple[int, ...]] | None = None,
    seed: int = 90_000,
    minutes: float | None = None,
    workers: int = 0,
    resume: bool = False,
    asking: Asking = "eval",
    progress: Callable[..., Iterable[list[dict[str, Any]]]] = tqdm,
) -> dict[str, Any]:
    """Returns the exact match of every cell and link (the generation's unless given), over `size` questions each.

    Computes in bf16. Cells are spread over `workers` processes of one thread (0: one a core, up to four; on a GPU one).
    Every cell that is done is kept in FOLDER/scores.part.json, where `resume` finds it. No cell is begun once `minutes`
    are spent; cells not reached are missing from the result. `asking` names a list of wordings; files of another
    list than `eval` carry its name.

    Raises:
        ConfigError: no model there; or to resume, but the file is of other weights or settings.
    """
    weights = _digest(folder)
    generation = generation_at(folder)
    links, cells = links or generation.scored, cells or generation.cells
    partial = Partial(
        folder, ScoringRun(weights, size, seed, tuple(link.name for link in links), asking), resume
    )
    every = sorted(
        ((count, task) for task, counts in cells.items() for count in counts),
        key=lambda cell: (_LONGEST_FIRST.index(cell[0]), cell[1]),
    )
    todo = [(count, task) for count, task in every if not partial.has(task, count)]
    workers = workers or (1 if torch.cuda.is_available() else min(4, os.cpu_count() or 1))
    began = time.monotonic()

    def jobs() -> Iterator[tuple[Any, ...]]:
        for count, task in todo:
            if minutes is not None and time.monotonic() - began > minutes * 60:
                return
            yield count, task, size, seed, links, asking

    for rows in progress(_spread(folder, jobs(), workers), total=len(todo)):
        partial.add(rows, time.monotonic() - began)
    order = {cell: i for i, cell in enumerate(every)}
    return {
        "rows": sorted(partial.rows, key=lambda r: order[r["chunks"], r["task"]]),
        "unfinished": [[task, count] for count, task in every if not partial.has(task, count)],
        "first_token_share_by_layer": _probe(folder, generation, seed + 77),
        "seconds": round(partial.seconds + time.monotonic() - began),
        "seed": seed,
        "wordings": asking,
    }


def _digest(folder: Path) -> str:
    try:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"no model to score: {error}", param="folder") from error


def _probe(folder: Path, generation: Generation, seed: int) -> list[float]:
    """Returns the first token's share of attention over a few prompts."""
    _load(folder, 0)
    model, encoder = _loaded
    chunks = (
        4 if generation.design.context <= 2048 else 1
    )  # eager attention of a long prompt takes much memory
    tasks = ("image", "card", "biography")
    asked = [questions(encoder, task, chunks, 8, seed, generation.world) for task in tasks]
    return first_token_share(model, [example for group in asked for example in group])


def _spread(folder: Path, jobs: Iterator[tuple[Any, ...]], workers: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each job when it is done; with one worker, in this process."""
    if workers == 1:
        _load(folder, 0)
        yield from (_cell(*job) for job in jobs)
        return
    spawn = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _load, (folder, 1)) as pool:
        running = {pool.submit(_cell, *job) for job in itertools.islice(jobs, workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                running |= {pool.submit(_cell, *job) for job in itertools.islice(jobs, 1)}
                yield future.result()


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures a model card quotes, from the rows of one checkpoint."""
    rows = result["rows"]
    by = {(r["task"], r["chunks"], r["link"]): r for r in rows}
    links = list(dict.fromkeys(r["link"] for r in rows))

    def mean(values: list[float]) -> float | None:
        return round(100 * sum(values) / len(values), 1) if values else None

    plain = [r for r in rows if not r["task"].startswith("search") and r["link"] == "full"]
    seeking = [r for r in rows if r["task"].startswith("search") and r["link"] == "full"]
    over = {k: [r for r in rows if r["link"] == k and r["chunks"]] for k in links}
    lost: dict[str, list[float]] = {}
    for (task, count, link), row in by.items():
        if link == "reuse" and count > 1:
            lost.setdefault(task, []).append(by[task, count, "full"]["exact"] - row["exact"])
    return {
        "exact by chunks, full": {
            n: mean([r["exact"] for r in plain if r["chunks"] == n]) for n in (1, 2, 4, 8)
        },
        "exact by link, 1-8 chunks": {k: mean([r["exact"] for r in found]) for k, found in over.items()},
        "recomputed by link": {k: mean([r["recomputed"] for r in found]) for k, found in over.items()},
        "search made when needed": mean([r["searched"] for r in seeking]),
        "search not made otherwise": mean([1 - r["searched"] for r in plain]),
        "points lost under reuse, 2-8 chunks": {task: mean(values) for task, values in lost.items()},
        "first token share by layer": result["first_token_share_by_layer"],
    }


def markdown(result: dict[str, Any]) -> str:
    """Returns the table of one checkpoint, with one row per cell and one column per link."""
    rows = result["rows"]
    links = list(dict.fromkeys(r["link"] for r in rows))
    by = {(r["task"], r["chunks"], r["link"]): r for r in rows}
    lines = [f"| task | chunks | n | conversations | {' | '.join(links)} |", "|---" * (len(links) + 4) + "|"]
    for task, count in sorted({(r["task"], r["chunks"]) for r in rows}):
        cells = [by.get((task, count, link)) for link in links]
        figures = " | ".join(f"{100 * c['exact']:.1f}" if c else "" for c in cells)
        asked = "/".join(dict.fromkeys(str(c["questions"]) for c in cells if c))
        groups = "/".join(dict.fromkeys(str(c.get("conversations", c["questions"])) for c in cells if c))
        lines.append(f"| {task} | {count} | {asked} | {groups} | {figures} |")
    return "\n".join(lines)


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Writes `scores.json` (rows and summary) and `scores.md` beside the weights; a whole result replaces the file for
    resuming."""
    stem = _stem(result["wordings"])
    (folder / f"{stem}.json").write_text(json.dumps({"summary": summary(result), **result}, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(markdown(result) + "\n")
    if not result["unfinished"]:
        (folder / f"{stem}.part.json").unlink(missing_ok=True)
