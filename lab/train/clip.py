"""`mpic train clip`: open_clip's own contrastive loss over images and texts of the generated world.

One batch holds pictures, each with a query (a caption, a search call, a question), and text-text pairs (a question or
a search call and the fact that answers it). Both kinds share one loss matrix, so a query learns to find its entry in a
library of images and facts together. A search for one object is answered by every picture that shows it: of those, only
its own is in the loss.
Every batch is drawn from the seed and its own number: a resumed run sees the same data as one that never stopped.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip.loss import ClipLoss
from PIL import Image
from torch.nn import functional as F
from tqdm import tqdm

from mpic.config import ConfigError
from mpic_lab.generator.images import SIZE
from mpic_lab.generator.pairs import Pair, Pairs
from mpic_lab.generator.worlds import WORLDS
from mpic_lab.train import clip_model
from mpic_lab.train.checkpoint import may_start
from mpic_lab.train.clip_scores import score
from mpic_lab.train.curves import plot
from mpic_lab.train.optim import Optimizers

BUCKETS = (12, 18, 26, 36, clip_model.CONTEXT)  # lengths that texts of a batch are computed at
CHECKPOINT = "checkpoint.pt"
CURVES = "training.png"
MAY_DIFFER = ("out", "threads", "device", "evaluate_every", "resume", "quiet")
"""Settings that a resumed run need not share with the original run."""
MAX_SCALE = math.log(100.0)  # as in open_clip's own training, the temperature never falls below 0.01


@dataclass(frozen=True)
class Settings:
    """Options of `mpic train clip`."""

    out: Path
    steps: int = 1300
    images: int = 96  # pictures with a query each a step
    texts: int = 40  # text-text pairs a step
    muon_lr: float = 0.02  # learning rate of the matrices inside the transformers
    adam_lr: float = 2e-3  # learning rate of everything else
    warmup: int = 20
    width: int = 128
    layers: int = 3
    text_layers: int = 2
    threads: int = 0  # 0: as many as torch likes
    seed: int = 0
    generations: tuple[int, ...] = (1, 2)  # of the pictures
    device: str = "auto"
    precision: str = "fp32"
    evaluate_every: int = 100
    start: Path | None = None  # a model to go on from, instead of random weights
    resume: bool = False
    quiet: bool = False


def encode_text(model: open_clip.CLIP, ids: torch.Tensor) -> torch.Tensor:
    """Returns `model.encode_text` without the work on padding: texts of like length together, each cut to its
    bucket."""
    lengths = (ids != 0).sum(1)
    out = ids.new_zeros(len(ids), model.text_projection.shape[1], dtype=torch.float32)
    low = 0
    for high in BUCKETS:
        rows = ((lengths > low) & (lengths <= high)).nonzero().squeeze(1)
        low = high
        if len(rows):
            cut = ids[rows, :high]
            x = model.token_embedding(cut) + model.positional_embedding[:high]
            x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:high, :high]))
            pooled = x[torch.arange(len(rows), device=ids.device), lengths[rows] - 1]
            out = out.index_copy(0, rows, (pooled @ model.text_projection).float())
    return out


def pixels(images: Sequence[np.ndarray]) -> torch.Tensor:
    """Returns generated images as the model's preprocessing gives them."""
    size = (SIZE, SIZE)
    fitted = [
        i if i.shape[:2] == size else np.asarray(Image.fromarray(i).resize(size, Image.Resampling.BICUBIC))
        for i in images
    ]
    batch = torch.from_numpy(np.stack(fitted)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (clip_model.MEAN, clip_model.STD))
    return (batch - mean) / std


class PairLoss(ClipLoss):
    """open_clip's loss, in which an entry that answers another pair's query as well is no negative of it."""

    also: torch.Tensor  # bool [n, n], entry x query: not to be distinguished

    def get_logits(self, *features: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns open_clip's logits, with minus infinity where `also` is set."""
        logits, _ = super().get_logits(*features, **options)
        logits = logits.masked_fill(self.also, -math.inf)
        return logits, logits.T


def answered(pairs: Sequence[Pair]) -> torch.Tensor:
    """Returns bool `[n, n]`, entry x query: whether the entry answers the query of another pair."""
    also = [[q is not e and q.answered_by(e) for q in pairs] for e in pairs]
    return torch.tensor(also)


class ClipTrainer:
    """A training run: model, optimizer, data and log.

    Raises:
        ConfigError: a checkpoint exists but is not to be resumed, or is of another run; or none exists to resume; or a
            finished model is there.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = s = settings
        cuda = s.device == "cuda" or (s.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        torch.manual_seed(s.seed)
        if s.threads:
            torch.set_num_threads(s.threads)
        self.work = s.out / "run"
        saved = self._saved()
        may_start(s.out, saved and saved["settings"], _decisive(s), s.resume)
        if (s.out / clip_model.WEIGHTS).exists() and not s.resume:
            raise ConfigError(f"{s.out} holds a finished model: give another --out", param="out")
        self.work.mkdir(parents=True, exist_ok=True)
        if s.start and not s.resume:
            self.model = clip_model.copy(s.start, s.out)
        else:
            self.model = clip_model.create(s.out, s.width, s.layers, s.text_layers)
        self.model.to(self.device).train()
        self.tokenize = open_clip.get_tokenizer(f"local-dir:{s.out}")
        self.loss = PairLoss()
        inner = {n: p for n, p in self.model.named_parameters() if "resblocks" in n and p.ndim == 2}
        others = [p for n, p in self.model.named_parameters() if n not in inner]
        self.optimizers = Optimizers(list(inner.values()), [(others, 1.0)], s.muon_lr, s.adam_lr)
        self.step, self.seconds, self.processor = 0, 0.0, 0.0
        self.log: list[dict[str, Any]] = []
        if saved:
            self._restore(saved)

    def _saved(self) -> dict[str, Any] | None:
        path = self.work / CHECKPOINT
        return torch.load(path, map_location=self.device, weights_only=True) if path.exists() else None

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizers.load_state_dict(saved["optimizers"])
        self.step, self.log = saved["step"], saved["log"]
        self.seconds, self.processor = saved["seconds"], saved["processor"]

    def _checkpoint(self) -> None:
        temporary = self.work / f"{CHECKPOINT}.tmp"
        state = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}
        state |= {"step": self.step, "log": self.log, "settings": _decisive(self.settings)}
        torch.save({**state, "seconds": self.seconds, "processor": self.processor}, temporary)
        temporary.replace(self.work / CHECKPOINT)

    def _scale(self) -> float:
        """Returns the scale of the learning rates: linear warm-up, then a cosine to zero."""
        s = self.settings
        if self.step < s.warmup:
            return (self.step + 1) / s.warmup
        return 0.5 * (1 + math.cos(math.pi * (self.step - s.warmup) / max(1, s.steps - s.warmup)))

    def features(self, pictures: list[Pair], texts: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns L2-normalised features of entries and of queries, in the same order."""
        seen = self.model.encode_image(pixels([p.entry for p in pictures]).to(self.device))  # type: ignore[misc]
        queries = [p.query for p in (*pictures, *texts)]
        ids = self.tokenize([*queries, *(str(p.entry) for p in texts)]).to(self.device)
        texts_seen = encode_text(self.model, ids)
        entries = torch.cat([seen.float(), texts_seen[len(queries) :]])
        return F.normalize(entries, dim=-1), F.normalize(texts_seen[: len(queries)], dim=-1)

    def train_step(self) -> float:
        """Trains on one batch; returns the loss."""
        s = self.settings
        worlds = [WORLDS[generation] for generation in s.generations]
        batch = Pairs(s.seed * 1_000_003 + self.step, "train", worlds).batch(s.images, s.texts)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=s.precision == "bf16"):
            entries, queries = self.features(*batch)
        self.loss.also = answered([*batch[0], *batch[1]]).to(self.device)
        loss = self.loss(entries, queries, self.model.logit_scale.exp())
        loss.backward()
        self.optimizers.step(self._scale())
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, MAX_SCALE)
        self.step += 1
        return loss.item()

    def run(self) -> list[dict[str, Any]]:
        """Trains to the end, saving a checkpoint with every evaluation; returns the log."""
        s = self.settings
        started = time.monotonic() - self.seconds, time.process_time() - self.processor
        with tqdm(total=s.steps, initial=self.step, disable=s.quiet, unit="step") as bar:
            while self.step < s.steps:
                entry: dict[str, Any] = {"step": self.step + 1, "loss": round(self.train_step(), 4)}
                self.seconds = time.monotonic() - started[0]
                self.processor = time.process_time() - started[1]
                entry["seconds"] = round(self.seconds, 1)
                if self.step % s.evaluate_every == 0 or self.step == s.steps:
                    entry["scores"] = self.evaluate()
                    bar.write(_line(entry)) if not s.quiet else None
                self.log.append(entry)
                bar.update()
                bar.set_postfix(loss=f"{entry['loss']:.3f}")
                if "scores" in entry:
                    self._checkpoint()
                    _plot(self.log, s.out / CURVES)
        return self.log

    def evaluate(self) -> dict[str, float]:
        """Returns recall@1 over 200 held-out pairs of each kind."""
        self.model.eval()
        scores = score(self.model, self.tokenize, pixels, seed=1, device=self.device)
        self.model.train()
        return scores


def _decisive(settings: Settings) -> dict[str, Any]:
    """Returns the settings that the weights depend on, as a checkpoint keeps them."""
    kept = {k: v for k, v in asdict(settings).items() if k not in MAY_DIFFER}
    return kept | {"start": settings.start and str(settings.start)}


def train_clip(settings: Settings) -> dict[str, Any]:
    """Trains, saves the model into `settings.out`, scores it, and returns the content of `training.json`."""
    trainer = ClipTrainer(settings)
    trainer.run()
    clip_model.save(trainer.model, settings.out)
    summary = {
        "started from": "another run" if settings.start else "random weights",
        "settings": {
            k: v for k, v in asdict(settings).items() if k not in ("out", "start", "resume", "quiet")
        },
        "device": trainer.device.type,
        "wall minutes": round(trainer.seconds / 60, 1),
        "processor minutes": round(trainer.processor / 60, 1),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "log": trainer.log,
    }
    text = json.dumps(summary, indent=1)
    (settings.out / "training.json").write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(trainer.work)
    return summary


def _line(entry: dict[str, Any]) -> str:
    scores = "  ".join(f"{name} {100 * value:.1f} %" for name, value in entry["scores"].items())
    return f"step {entry['step']:5d}  loss {entry['loss']:.3f}  {scores}"


def _plot(log: list[dict[str, Any]], path: Path) -> None:
    losses = {"loss": [(e["step"], e["loss"]) for e in log]}
    scored = [e for e in log if "scores" in e]
    names = scored[-1]["scores"] if scored else {}
    scores = {name: [(e["step"], e["scores"][name]) for e in scored] for name in names}
    plot(path, losses, scores, "step", "contrastive loss", "recall@1 over 200 held-out items, %")
