"""Scores of a CLIP: recall at k over held-out pairs and over the bundled reference sets, by generation of the pictures.

python -m mpic_lab.train.clip_scores data/models/clip        (writes scores.json there; a minute)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F

from mpic_lab.generator import references
from mpic_lab.generator.pairs import Pair, Pairs
from mpic_lab.generator.worlds import WORLDS
from mpic_lab.train import clip_model

ITEMS = 200


def recall(queries: torch.Tensor, entries: torch.Tensor, truth: torch.Tensor, k: int = 1) -> float:
    """Returns the share of queries whose true entry is among the `k` most similar (features are L2-normalised)."""
    best = (queries @ entries.T).topk(k, dim=1).indices
    return (best == truth[:, None]).any(1).float().mean().item()


@torch.no_grad()
def text_features(model: Any, tokenize: Callable, texts: Sequence[str], device: Any = "cpu") -> torch.Tensor:
    """Returns L2-normalised `[n, d]`."""
    rows = [
        model.encode_text(tokenize(list(texts[i : i + 256])).to(device)) for i in range(0, len(texts), 256)
    ]
    return F.normalize(torch.cat(rows).float(), dim=-1)


@torch.no_grad()
def image_features(model: Any, images: torch.Tensor, device: Any = "cpu") -> torch.Tensor:
    """Returns L2-normalised `[n, d]`."""
    rows = [model.encode_image(part.to(device)) for part in images.split(256)]
    return F.normalize(torch.cat(rows).float(), dim=-1)


def held_out(seed: int, generation: int = 1) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Returns 200 pictures with captions, 200 facts with queries, 200 pairs of captions; no two answer the same
    query."""
    pairs = Pairs(seed, "eval", [WORLDS[generation]])
    seen: set[str] = set()
    pictures = pairs.distinct([pairs.captioned], ITEMS, seen)
    facts = pairs.distinct([pairs.fact, pairs.same_person], ITEMS, seen)
    return pictures, facts, pairs.distinct([pairs.paraphrase], ITEMS, set())


def score(
    model: Any, tokenize: Callable, pixels: Callable, seed: int = 1, device: Any = "cpu"
) -> dict[str, float]:
    """Returns recall@1 over `held_out(seed)`, each kind among its own 200 entries, and `search_recall`; of pictures by
    generation."""
    truth = torch.arange(ITEMS, device=device)
    scores = {}
    for generation in WORLDS:
        pictures, _, _ = held_out(seed, generation)
        images = image_features(model, pixels([p.entry for p in pictures]), device)
        captioned = text_features(model, tokenize, [p.query for p in pictures], device)
        searched = search_recall(model, tokenize, pixels, seed, generation, device)
        for name, value in (
            ("text to image", recall(captioned, images, truth)),
            ("image to text", recall(images, captioned, truth)),
            ("search to picture", searched),
        ):
            scores[picture_score(name, generation)] = value
    _, facts, captions = held_out(seed)
    for name, group in (("question to fact", facts), ("caption to caption", captions)):
        asked = text_features(model, tokenize, [p.query for p in group], device)
        scores[name] = recall(
            asked, text_features(model, tokenize, [str(p.entry) for p in group], device), truth
        )
    return {name: round(value, 4) for name, value in scores.items()}


def picture_score(name: str, generation: int) -> str:
    """Returns the name of a score of pictures of a generation."""
    return name if generation == 1 else f"{name}, generation {generation}"


def search_recall(
    model: Any,
    tokenize: Callable,
    pixels: Callable,
    seed: int,
    generation: int = 1,
    device: Any = "cpu",
    libraries: int = 5,
) -> float:
    """Returns recall@1 of one-object searches ("picture with a red circle") in libraries made as the bundled one is.

    Thirty searches in each of `libraries` reference sets that are drawn from other seeds than the bundled one; the one
    right picture competes with the other 89 and with 110 texts.
    """
    found = []
    for number in range(libraries):
        library = references.ReferenceSet(1000 * seed + number, generation)
        shown = [e for e in library.entries if e["kind"] == "image"]
        texts = [e for e in library.entries if e["kind"] == "text"]
        entries = torch.cat(
            [
                image_features(model, pixels([library.pixels[e["path"]] for e in shown]), device),
                text_features(model, tokenize, [e["text"] for e in texts], device),
            ]
        )
        where = {entry["id"]: i for i, entry in enumerate((*shown, *texts))}
        asked = [q for q in library.queries if (q["task"], q["form"]) == ("text->image", "search")]
        truth = torch.tensor([where[q["truth"]] for q in asked], device=device)
        found.append(
            recall(text_features(model, tokenize, [q["text"] for q in asked], device), entries, truth)
        )
    return sum(found) / len(found)


def score_references(
    model: Any, preprocess: Callable, tokenize: Callable, generation: int = 1
) -> dict[str, dict[str, float]]:
    """Returns recall over a bundled reference set by task and form: among all 200 entries, and among the right kind
    only."""
    entries, queries = references.load(references.REFERENCES[generation])

    def features(rows: list[dict[str, Any]]) -> torch.Tensor:
        out = torch.empty(len(rows), model.text_projection.shape[1])
        shown = [i for i, row in enumerate(rows) if "path" in row]
        texts = [i for i, row in enumerate(rows) if "text" in row]
        if shown:
            images = torch.stack([preprocess(Image.open(rows[i]["path"]).convert("RGB")) for i in shown])
            out[shown] = image_features(model, images)
        if texts:
            out[texts] = text_features(model, tokenize, [rows[i]["text"] for i in texts])
        return out

    library, where = features(entries), {entry["id"]: i for i, entry in enumerate(entries)}
    pictures = torch.tensor([entry["kind"] == "image" for entry in entries])
    scores: dict[str, dict[str, float]] = {}
    for task, form in dict.fromkeys((q["task"], q["form"]) for q in queries):
        rows = [q for q in queries if (q["task"], q["form"]) == (task, form)]
        asked, truth = features(rows), torch.tensor([where[q["truth"]] for q in rows])
        other = pictures if task.endswith("text") else ~pictures
        among = torch.where(other[:, None], torch.zeros_like(library), library)
        scores[f"{task} ({form})"] = {
            "queries": len(rows),
            "recall@1": round(recall(asked, library, truth), 4),
            "recall@5": round(recall(asked, library, truth, 5), 4),
            "recall@1 of its kind": round(recall(asked, among, truth), 4),
        }
    return scores


def evaluate(folder: Path, seeds: Sequence[int] = (1, 2, 3, 4, 5)) -> dict[str, Any]:
    """Returns every figure of the model card, from the saved model as anyone would load it."""
    model, preprocess, tokenize = clip_model.load(folder)

    def shown(images: Sequence[Any]) -> torch.Tensor:
        return torch.stack([preprocess(Image.fromarray(i)) for i in images])

    runs = [score(model, tokenize, shown, seed) for seed in seeds]
    held_out = {
        name: {
            "mean": round(sum(run[name] for run in runs) / len(runs), 4),
            "lowest": min(run[name] for run in runs),
            "highest": max(run[name] for run in runs),
        }
        for name in runs[0]
    }
    return {
        "held out: recall@1 over 200 items, five draws": held_out,
        **{
            picture_score("reference set", generation): score_references(
                model, preprocess, tokenize, generation
            )
            for generation in WORLDS
        },
    }


def write(folder: Path) -> dict[str, Any]:
    """Writes the result of `evaluate` to FOLDER/scores.json and returns it."""
    scores = evaluate(folder)
    (folder / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Score a CLIP on held-out data and on the reference set.")
    parser.add_argument("folder", type=Path)
    print(json.dumps(write(parser.parse_args().folder), indent=2))
