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
from mpic.data.generator.wordings import Asking
from mpic.figure import save_png
from mpic.train.batch import Encoder, Example, collate, embed
from mpic.train.model import load_model
from mpic.train.recipe import recipe_at, recipe_of
from mpic.train.scoring import BRANCHES, Link, questions, score_cell


@torch.no_grad()
def first_token_share(model: LlavaForConditionalGeneration, examples: list[Example]) -> list[float]:
    """Per layer, the mean share of attention on the prompt's first token (queries from the 17th token on)."""
    implementation = model.config.text_config._attn_implementation
    model.set_attn_implementation({"text_config": "eager"})
    shares = torch.zeros(model.config.text_config.num_hidden_layers)
    for example in examples:
        batch = collate([example]).to(model.device)
        out = model.model.language_model(
            inputs_embeds=embed(model, batch), output_attentions=True, use_cache=False
        ).attentions
        shares += torch.tensor([float(a[0, :, 16:, 0].float().mean()) for a in out])
    model.set_attn_implementation({"text_config": implementation})
    return [round(float(s), 4) for s in shares / len(examples)]


@dataclass(frozen=True)
class Run:
    """What the figures of a run depend on: those of another are not mixed in."""

    weights: str  # SHA-256
    size: int
    seed: int
    links: tuple[str, ...]
    asking: str = "eval"
    branches: int = BRANCHES


def _stem(asking: str) -> str:
    """Of the files that hold the scores."""
    return "scores" if asking == "eval" else f"scores-{asking}"


class Partial:
    """Cells done so far, in a file beside the weights; replaced whole after every cell."""

    def __init__(self, folder: Path, run: Run, resume: bool) -> None:
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
        """Whether the cell is done."""
        return any(r["task"] == task and r["chunks"] == count for r in self.rows)

    def add(self, rows: list[dict[str, Any]], seconds: float) -> None:
        """Keeps a cell."""
        self.rows += rows
        temporary = self.path.with_suffix(".tmp")
        state = {"run": self.run, "seconds": round(self.seconds + seconds), "rows": self.rows}
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(self.path)


_loaded: tuple[LlavaForConditionalGeneration, Encoder]  # of a worker process


def _load(folder: Path, threads: int) -> None:
    global _loaded
    if threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    model, tokenizer = load_model(folder)
    if torch.cuda.is_available():
        model = model.cuda()  # type: ignore[assignment]
    _loaded = model, recipe_of(model).encoder(tokenizer)


def _cell(
    count: int, task: str, size: int, seed: int, links: tuple[Link, ...], asking: Asking
) -> list[dict[str, Any]]:
    return score_cell(*_loaded, task, count, size, seed, links, asking, recipe_of(_loaded[0]).world)


def evaluate(
    folder: Path,
    size: int = 200,
    links: tuple[Link, ...] | None = None,
    cells: dict[str, tuple[int, ...]] | None = None,
    seed: int = 90_000,
    minutes: float | None = None,
    workers: int = 0,
    resume: bool = False,
    asking: Asking = "eval",
    progress: Callable[..., Iterable[list[dict[str, Any]]]] = tqdm,
) -> dict[str, Any]:
    """Exact match of every cell and link (those of the model's generation unless given), `size` questions each.

    Computes in bf16. Cells are spread over `workers` processes of one thread (0: one a core, up to four; on a GPU one).
    Every cell that is done is kept in FOLDER/scores.part.json, where `resume` finds it. No cell is begun once `minutes`
    are spent; cells not reached are missing from the result. `asking` names a list of wordings; files of another
    list than `eval` carry its name.

    Raises:
        ConfigError: no model there; or to resume, but the file is of other weights or settings.
    """
    try:
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"no model to score: {error}", param="folder") from error
    recipe = recipe_at(folder)
    links, cells = links or recipe.scored, cells or recipe.cells
    partial = Partial(folder, Run(weights, size, seed, tuple(link.name for link in links), asking), resume)
    every = sorted((count, task) for task, counts in cells.items() for count in counts)
    every.sort(key=lambda cell: [8, 1, 4, 2, 0].index(cell[0]))
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
    _load(folder, 0)
    model, encoder = _loaded
    probed = (
        4 if recipe.design.context <= 2048 else 1
    )  # chunks: eager attention of a long prompt takes much memory
    probe = [
        e
        for task in ("image", "card", "biography")
        for e in questions(encoder, task, probed, 8, seed + 77, recipe.world)
    ]
    order = {cell: i for i, cell in enumerate(every)}
    return {
        "rows": sorted(partial.rows, key=lambda r: order[r["chunks"], r["task"]]),
        "unfinished": [[task, count] for count, task in every if not partial.has(task, count)],
        "first_token_share_by_layer": first_token_share(model, probe),
        "seconds": round(partial.seconds + time.monotonic() - began),
        "seed": seed,
        "wordings": asking,
    }


def _spread(folder: Path, jobs: Iterator[tuple[Any, ...]], workers: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of each job as it is done; with one worker, in this process."""
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
    """The figures a model card quotes, from the rows of one checkpoint."""
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
    """Tables of one checkpoint: a row a cell, a column a link."""
    rows = result["rows"]
    links = list(dict.fromkeys(r["link"] for r in rows))
    by = {(r["task"], r["chunks"], r["link"]): r for r in rows}
    lines = [f"| task | chunks | n | conversations | {' | '.join(links)} |", "|---" * (len(links) + 4) + "|"]
    for task, count in sorted({(r["task"], r["chunks"]) for r in rows}):
        cells = [by.get((task, count, link)) for link in links]
        figures = " | ".join(f"{100 * c['exact']:.1f}" if c else "" for c in cells)
        asked = "/".join(dict.fromkeys(str(c["questions"]) for c in cells if c))
        told = "/".join(dict.fromkeys(str(c.get("conversations", c["questions"])) for c in cells if c))
        lines.append(f"| {task} | {count} | {asked} | {told} | {figures} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean exact match over tasks against the share of chunk tokens recomputed, one line a checkpoint."""
    save_png(path, lambda figure: _draw(figure, results), (7, 4.5))


def _draw(figure: Any, results: dict[str, dict[str, Any]]) -> None:
    axis = figure.subplots()
    for name, result in results.items():
        figures = summary(result)
        exact, share = figures["exact by link, 1-8 chunks"], figures["recomputed by link"]
        order = [
            k
            for k in ("reuse", "mpic-2", "mpic-4", "mpic-8", "mpic-16", "mpic-32", "mpic-64", "full")
            if k in exact
        ]
        axis.plot([share[k] for k in order], [exact[k] for k in order], marker="o", label=name)
        for k in order:
            axis.annotate(k, (share[k], exact[k]), fontsize=7)
    axis.set(xlabel="chunk tokens recomputed, %", ylabel="exact match, %", ylim=(0, 102))
    axis.legend()


def write_report(result: dict[str, Any], folder: Path) -> None:
    """`scores.json` (rows and summary) and `scores.md` beside the weights, in place of what a run kept for resuming."""
    stem = _stem(result["wordings"])
    (folder / f"{stem}.json").write_text(json.dumps({"summary": summary(result), **result}, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(markdown(result) + "\n")
    if not result["unfinished"]:
        (folder / f"{stem}.part.json").unlink(missing_ok=True)
