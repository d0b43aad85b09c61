"""Held-out exact match of a demo model under full attention and under reuse, with a slow obvious oracle.

The oracle runs the whole prompt with a mask (`mpic.train.batch.mask`) in which a chunk's reused tokens see their
own chunk only; a test holds it equal to compile, re-rotate and link. LegoLink-k is MPIC-k here, since no chunk
of these prompts starts at position 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration

from mpic.data.generator import Generator
from mpic.train.batch import Batch, Encoder, Example, collate, embed, hidden_states
from mpic.train.model import load_model

CELLS: dict[str, tuple[int, ...]] = {
    "image": (1, 2, 4, 8), "image named": (1, 2, 4, 8), "caption": (1, 2, 4, 8), "compare": (2, 4, 8),
    "word level": (2,), "few-shot": (2, 4, 8), "card": (1, 2, 4, 8), "card named": (1, 2, 4, 8),
    "needle": (1, 2, 4, 8), "biography": (1, 2, 4, 8), "two-hop": (2, 4, 8), "last person": (1, 2, 4, 8),
    "mixed": (2, 4, 8), "search person": (0, 1, 2, 4, 8), "search thing": (0, 1, 2, 4, 8),
    "search picture": (0, 1, 2, 4, 8),
}  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A way to link: the head length that is recomputed (None: everything) and whether chunk positions shift."""

    name: str
    head: int | None
    shift: bool = True


LINKS = (
    Link("full", None),
    Link("reuse", 0),
    Link("mpic-4", 4),
    Link("mpic-8", 8),
    Link("mpic-16", 16),
    Link("reuse, no shift", 0, shift=False),
    Link("mpic-16, no shift", 16, shift=False),
)


@dataclass
class Score:
    """One question: is everything the model has to say exact, its first piece, and did it call the search."""

    exact: bool
    first: bool
    searched: bool


def score(
    model: LlavaForConditionalGeneration, batch: Batch, examples: list[Example], search_id: int
) -> list[Score]:
    """Teacher-forced first choices, which for exact answers are what greedy decoding says."""
    hidden = hidden_states(model, batch)
    out = []
    for row, example in enumerate(examples):
        exact = []
        for start, end in example.answers:
            choice = model.lm_head(hidden[row, start - 1 : end - 1]).argmax(-1)
            exact.append(bool((choice == batch.ids[row, start:end]).all()))
        opening = model.lm_head(hidden[row, example.answers[0][0] - 1]).argmax()
        out.append(Score(all(exact), exact[0], int(opening) == search_id))
    return out


def questions(encoder: Encoder, task: str, count: int, size: int, seed: int) -> list[Example]:
    """`size` held-out questions of a cell, shortest first."""
    generator = Generator(seed + count, "eval")
    return sorted((encoder(generator.task(task, count)) for _ in range(size)), key=lambda e: len(e.ids))


def recomputed_share(examples: list[Example], head: int | None) -> float:
    """Share of chunk tokens that a link computes anew."""
    lengths = [end - start for e in examples for start, end in e.chunks]
    if not lengths or head is None:
        return 1.0
    return sum(min(head, n) for n in lengths) / sum(lengths)


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


@torch.no_grad()
def evaluate(
    folder: Path,
    size: int = 200,
    links: tuple[Link, ...] = LINKS,
    cells: dict[str, tuple[int, ...]] = CELLS,
    seed: int = 90_000,
    minutes: float | None = None,
    progress: Callable[[Any], Any] = tqdm,
) -> dict[str, Any]:
    """Exact match of every cell and link, `size` questions each.

    Computes in bf16. Stops between cells once `minutes` are spent; cells not reached are missing from the result.
    """
    model, tokenizer = load_model(folder)
    if torch.cuda.is_available():
        model = model.cuda()  # type: ignore[assignment]
    bf16 = torch.autocast(model.device.type, dtype=torch.bfloat16)
    encoder = Encoder(tokenizer)
    search_id = tokenizer.convert_tokens_to_ids("<search>")
    began, rows = time.monotonic(), []
    todo = sorted((count, task) for task, counts in cells.items() for count in counts)
    todo.sort(key=lambda cell: [8, 1, 4, 2, 0].index(cell[0]))
    for count, task in progress(todo):
        if minutes is not None and time.monotonic() - began > minutes * 60:
            break
        examples = questions(encoder, task, count, size, seed)
        for link in links:
            scores: list[Score] = []
            for start in range(0, len(examples), 8):
                part = examples[start : start + 8]
                batch = collate(part, None if link.head is None else [link.head] * len(part), link.shift)
                with bf16:
                    scores += score(model, batch.to(model.device), part, search_id)
            rows.append(
                {
                    "task": task,
                    "chunks": count,
                    "link": link.name,
                    "questions": len(scores),
                    "exact": round(sum(s.exact for s in scores) / len(scores), 4),
                    "searched": round(sum(s.searched for s in scores) / len(scores), 4),
                    "call_exact": round(sum(s.first for s in scores) / len(scores), 4),
                    "recomputed": round(recomputed_share(examples, link.head), 4),
                }
            )
    probe = [e for task in ("image", "card", "biography") for e in questions(encoder, task, 4, 8, seed + 77)]
    return {
        "rows": rows,
        "first_token_share_by_layer": first_token_share(model, probe),
        "seconds": round(time.monotonic() - began),
        "seed": seed,
    }


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
    lines = [f"| task | chunks | n | {' | '.join(links)} |", "|---" * (len(links) + 3) + "|"]
    for task, count in sorted({(r["task"], r["chunks"]) for r in rows}):
        cells = [by.get((task, count, link)) for link in links]
        figures = " | ".join(f"{100 * c['exact']:.1f}" if c else "" for c in cells)
        asked = "/".join(dict.fromkeys(str(c["questions"]) for c in cells if c))
        lines.append(f"| {task} | {count} | {asked} | {figures} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean exact match over tasks against the share of chunk tokens recomputed, one line a checkpoint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, result in results.items():
        figures = summary(result)
        exact, share = figures["exact by link, 1-8 chunks"], figures["recomputed by link"]
        order = [k for k in ("reuse", "mpic-4", "mpic-8", "mpic-16", "full") if k in exact]
        axis.plot([share[k] for k in order], [exact[k] for k in order], marker="o", label=name)
        for k in order:
            axis.annotate(k, (share[k], exact[k]), fontsize=7)
    axis.set(xlabel="chunk tokens recomputed, %", ylabel="exact match, %", ylim=(0, 102))
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def write_report(result: dict[str, Any], folder: Path) -> None:
    """`scores.json` (rows and summary) and `scores.md` beside the weights."""
    (folder / "scores.json").write_text(json.dumps({"summary": summary(result), **result}, indent=1) + "\n")
    (folder / "scores.md").write_text(markdown(result) + "\n")
