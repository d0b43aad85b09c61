"""The four stages of a tower's training."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpic.model.identity import fingerprint
from mpic_lab.generator.scenes import SPOKEN, WORDS, Picture, draw_picture, render
from mpic_lab.train.tower_model import Caption, Tower, numbers, sight_loss, sight_scores, to_pixels
from mpic_lab.train.tower_prompts import IMAGE, Batch, Writer, collate
from mpic_lab.train.tower_run import Settings, Stage

_HELD_OUT = 10_000_000
"""Seeds from here on belong to held-out pictures."""


class Reader:
    """The language model, which answers and never changes."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").requires_grad_(False).eval()
        self.writer = Writer(AutoTokenizer.from_pretrained(folder))
        self.embeddings = self.model.get_input_embeddings().weight
        self.before = fingerprint(self.model)

    def table(self) -> torch.Tensor:
        """Return the embeddings of `WORDS`, `[words, width]`."""
        ids = [self.writer.ids(word if word == "\n" else f" {word}")[0] for word in WORDS]
        return self.embeddings[torch.tensor(ids)].float()

    def logits(self, batch: Batch, images: torch.Tensor) -> torch.Tensor:
        """Return logits before each token of the answers, `[n, vocabulary]`.

        Args:
            images: the image tokens of all pictures, `[pictures, 196, width]`.
        """
        embedded = F.embedding(batch.ids.clamp(min=0), self.embeddings)
        image = (batch.ids == IMAGE)[..., None]
        embedded = embedded.masked_scatter(image, images.to(embedded.dtype))
        states = self.model.model(
            inputs_embeds=embedded,
            attention_mask=batch.mask.to(embedded.dtype),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        return self.model.lm_head(states[batch.where[:, 0], batch.where[:, 1]]).float()

    def loss(self, batch: Batch, images: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over tokens of answers, by their weights."""
        losses = F.cross_entropy(self.logits(batch, images), batch.answers, reduction="none")
        return (losses * batch.weights).sum() / batch.weights.sum()

    @torch.no_grad()
    def scores(self, batches: Iterator[Batch], images: Callable[[Batch], torch.Tensor]) -> dict[str, float]:
        """Return the share of questions by kind whose deciding word is right, and of all of them (`key`)."""
        hits = defaultdict(list)
        for batch in batches:
            right = self.logits(batch, images(batch)).argmax(-1) == batch.answers
            for kind, key in batch.asked:
                if kind != "describe":
                    hits[kind].append(bool(right[key.start : key.stop].all()))
        found = {kind: sum(hit) / len(hit) for kind, hit in sorted(hits.items())}
        return {"key": sum(map(sum, hits.values())) / sum(map(len, hits.values())), **found}


def draw_batch(writer: Writer, rng: random.Random, count: int) -> Batch:
    """Return two samples of one picture or one of more: about a thousand tokens."""
    questions = {1: 12, 2: 8}.get(count, 6)
    return collate([writer.sample(rng, count, questions) for _ in range(max(1, 2 // count))])


def held_out(writer: Writer, count: int, batches: int) -> Iterator[Batch]:
    """Return the same batches every time; nothing is trained on them."""
    for i in range(batches):
        yield draw_batch(writer, random.Random(_HELD_OUT + 100 * count + i), count)


def pictures_of(
    rng: random.Random, count: int, most: int | None = None
) -> tuple[list[Picture], torch.Tensor]:
    """Return drawn pictures and their pixels `[count, 3, 224, 224]`."""
    pictures = [draw_picture(rng, most or rng.choice((4, 9))) for _ in range(count)]
    return pictures, pixels_of(pictures, rng)


def pixels_of(pictures: list[Picture], rng: random.Random) -> torch.Tensor:
    """Return the pixels of pictures, `[n, 3, 224, 224]`."""
    return to_pixels([render(picture, rng) for picture in pictures])


def how_many(rng: random.Random, progress: float) -> int:
    """Return the number of pictures of a step: one at first, then up to four."""
    return 1 if progress < 0.3 else rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]


def under(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by name, below a name."""
    return {f"{name}.{key}": p for key, p in module.named_parameters()}


class WordStage(Stage):
    """Stage 1: vectors of words that the language model reads."""

    def __init__(self, settings: Settings, reader: Reader) -> None:
        self.reader, self.caption = reader, Caption(reader.table())
        mix = {"mix.weight", "mix.bias"}
        named = dict(self.caption.named_parameters())
        super().__init__(
            settings,
            "words",
            [
                ({name: p for name, p in named.items() if name not in mix}, 4e-3),
                ({name: named[name] for name in sorted(mix)}, 2e-3),
            ],
        )

    def loss(self, rng: random.Random) -> torch.Tensor:
        batch = draw_batch(self.reader.writer, rng, how_many(rng, self.step / self.steps))
        return self.reader.loss(batch, self.caption(numbers(batch.pictures)))

    def scores(self) -> dict[str, float]:
        return scores_by_count(self.reader, lambda batch: self.caption(numbers(batch.pictures)))


def scores_by_count(
    reader: Reader, images: Callable[[Batch], torch.Tensor], batches: int = 4
) -> dict[str, float]:
    """Return scores by kind about one picture, and over all kinds about two and four."""
    found = reader.scores(held_out(reader.writer, 1, batches), images)
    for count in (2, 4):
        found[f"key_{count}"] = reader.scores(held_out(reader.writer, count, batches), images)["key"]
    return found


class Sight(Stage):
    """Stage 2: what patches show."""

    def __init__(self, settings: Settings, tower: Tower, pictures: int = 32) -> None:
        self.tower, self.pictures = tower, pictures
        learnt = {**under("vision", tower.vision), **under("covering", tower.covering)}
        super().__init__(settings, "sight", [(learnt | under("saying", tower.saying), 8e-4)])

    def loss(self, rng: random.Random) -> torch.Tensor:
        pictures, pixels = pictures_of(rng, self.pictures)
        with torch.autocast("cpu", torch.bfloat16):
            return sight_loss(self.tower, pixels, pictures)[0]

    def scores(self) -> dict[str, float]:
        pictures, pixels = pictures_of(random.Random(_HELD_OUT), 64, 4)
        with torch.autocast("cpu", torch.bfloat16):
            return sight_scores(self.tower, pixels, pictures)


class Join(Stage):
    """Stage 3: the tower says the vectors of the first stage."""

    def __init__(
        self, settings: Settings, tower: Tower, caption: Caption, reader: Reader, pictures: int = 24
    ) -> None:
        self.tower, self.caption, self.reader, self.pictures = tower, caption, reader, pictures
        rest = {**under("vision", tower.vision), **under("covering", tower.covering)}
        super().__init__(
            settings,
            "join",
            [(rest | under("saying", tower.saying), 4e-4), (under("projector", tower.projector), 1e-3)],
        )
        with torch.no_grad():
            target = self._targets(pictures_of(random.Random(_HELD_OUT), 64, 4)[0])
            self.variance = target.var()
            tower.projector.linear_2.weight.mul_(self.variance.sqrt())
            tower.projector.linear_2.bias.copy_(target.mean((0, 1)))

    @torch.no_grad()
    def _targets(self, pictures: list[Picture]) -> torch.Tensor:
        return self.caption(numbers(pictures))

    def loss(self, rng: random.Random) -> torch.Tensor:
        pictures, pixels = pictures_of(rng, self.pictures)
        target = self._targets(pictures)
        with torch.autocast("cpu", torch.bfloat16):
            sight, last = sight_loss(self.tower, pixels, pictures)
            made = self.tower.projector(last).float()
        error = (made - target).square().mean(-1) / self.variance
        spoken = torch.full(error.shape[1:], 0.2)
        spoken[list(SPOKEN)] = 1.0
        return sight + 3 * (error * spoken).mean()

    def scores(self) -> dict[str, float]:
        return tower_scores(self.reader, self.tower, 2)


class Answers(Stage):
    """Stage 4: tower and projector through the language model."""

    def __init__(self, settings: Settings, tower: Tower, reader: Reader, pictures: int = 8) -> None:
        self.tower, self.reader, self.pictures = tower, reader, pictures
        rest = {**under("vision", tower.vision), **under("covering", tower.covering)}
        super().__init__(
            settings,
            "answers",
            [(rest | under("saying", tower.saying), 2e-4), (under("projector", tower.projector), 4e-4)],
        )

    def loss(self, rng: random.Random) -> torch.Tensor:
        batch = draw_batch(self.reader.writer, rng, how_many(rng, self.step / self.steps))
        more, more_pixels = pictures_of(rng, self.pictures)
        pixels = torch.cat([pixels_of(batch.pictures, rng), more_pixels])
        with torch.autocast("cpu", torch.bfloat16):
            sight, last = sight_loss(self.tower, pixels, batch.pictures + more)
            images = self.tower.projector(last[: len(batch.pictures)])
        return self.reader.loss(batch, images) + 0.3 * sight

    def scores(self) -> dict[str, float]:
        return tower_scores(self.reader, self.tower, 4)


def tower_scores(reader: Reader, tower: Tower, batches: int) -> dict[str, float]:
    """Return scores by kind through the language model, and those of sight as `see_KIND`."""

    def images(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tower(pixels_of(batch.pictures, random.Random(0)))

    found = scores_by_count(reader, images, batches)
    pictures, pixels = pictures_of(random.Random(_HELD_OUT), 32, 4)
    with torch.autocast("cpu", torch.bfloat16):
        seen = sight_scores(tower, pixels, pictures)
    return found | {f"see_{name}": value for name, value in seen.items()}
