"""The demo CLIP: loads as any open_clip folder does, finds held-out things, and its training learns and resumes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

import mpic.data
from mpic.config import ConfigError
from mpic_lab.generator.pairs import Pair, Pairs
from mpic_lab.generator.worlds import FIRST, SECOND, WORLDS
from mpic_lab.train import clip_model
from mpic_lab.train.clip import ClipTrainer, PairLoss, Settings, answered, encode_text, pixels, train_clip
from mpic_lab.train.clip_scores import (
    image_features,
    picture_score,
    recall,
    score,
    score_references,
    search_recall,
    text_features,
)

BUNDLED = Path(mpic.data.__file__).parent / "models" / "clip"
TINY = {"width": 64, "layers": 1, "text_layers": 1, "images": 16, "texts": 8, "warmup": 2, "quiet": True}


@pytest.fixture(scope="module")
def bundled():
    return clip_model.load(BUNDLED)


def test_open_clip_loads_the_folder_alone_without_a_network():
    code = (
        f"import open_clip; name = 'local-dir:{BUNDLED}'; m, _, p = open_clip.create_model_and_transforms(name); "
        "t = open_clip.get_tokenizer(name); print(m.encode_text(t(['a red circle top left'])).shape[1])"
    )
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | offline, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "128"


def test_the_folder_is_small_and_tells_no_paths():
    assert (BUNDLED / clip_model.WEIGHTS).stat().st_size <= 10_000_000
    for path in BUNDLED.glob("*.json"):
        assert "/home/" not in path.read_text() and "/tmp/" not in path.read_text()


def test_embeddings_are_the_same_every_time_and_of_length_one(bundled):
    model, preprocess, tokenize = bundled
    image = preprocess(Image.fromarray(Pairs(1, "eval").captioned().entry))[None]
    for features in (image_features(model, image), text_features(model, tokenize, ["code of lamp"])):
        assert features.shape == (1, 128) and torch.allclose(features.norm(dim=1), torch.ones(1))
    assert torch.equal(image_features(model, image), image_features(model, image))
    lamp = "code of lamp"
    alone, among = (text_features(model, tokenize, texts)[0] for texts in ([lamp], [lamp, "x" * 400]))
    assert torch.allclose(alone, among, atol=1e-5)


def test_images_of_other_sizes_and_shapes_are_taken(bundled):
    model, preprocess, _ = bundled
    pixels = Pairs(2, "eval").captioned().entry
    near = Image.fromarray(pixels).resize((500, 300), Image.Resampling.NEAREST)
    a, b = (image_features(model, preprocess(i)[None])[0] for i in (Image.fromarray(pixels), near))
    assert a @ b > 0.8


@pytest.mark.parametrize("world", [FIRST, SECOND])
def test_training_sees_images_as_preprocessing_gives_them(bundled, world):
    image = Pairs(3, "eval", [world]).captioned().entry
    assert image.shape[0] == world.size
    assert torch.allclose(pixels([image])[0], bundled[1](Image.fromarray(image)), atol=1e-5)


@pytest.fixture(scope="module")
def shown(bundled):
    return lambda images: torch.stack([bundled[1](Image.fromarray(i)) for i in images])


def test_recall_over_held_out_items_is_what_the_card_promises(bundled, shown):
    model, _, tokenize = bundled
    scores = json.loads((BUNDLED / "scores.json").read_text())
    promised = scores["held out: recall@1 over 200 items, five draws"]
    for name, value in score(model, tokenize, shown, seed=77).items():
        assert value >= promised[name]["lowest"] - 0.07, name


@pytest.mark.parametrize("generation", WORLDS)
def test_recall_over_the_reference_set(bundled, generation):
    scores = score_references(*bundled, generation)
    kept = json.loads((BUNDLED / "scores.json").read_text())[picture_score("reference set", generation)]
    assert scores.keys() == kept.keys()
    for name, values in scores.items():
        assert abs(values["recall@1"] - kept[name]["recall@1"]) < 0.04, name


@pytest.mark.parametrize("generation", WORLDS)
def test_a_search_for_one_object_finds_its_picture_in_libraries_the_model_was_not_chosen_on(
    bundled, shown, generation
):
    model, _, tokenize = bundled

    assert search_recall(model, tokenize, shown, 78, generation, libraries=3) > 0.9


def test_recall_counts_the_true_entry_among_the_best():
    entries = torch.eye(3)
    queries = torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.5, 1.0]])
    assert recall(queries, entries, torch.tensor([0, 1])) == 0.5
    assert recall(queries, entries, torch.tensor([1, 0]), k=2) == 0.5


def test_an_entry_that_answers_a_query_as_well_is_not_pushed_away_from_it():
    red, both, other = (frozenset(words) for words in (["red ring"], ["red ring", "blue star"], ["red star"]))
    claims = [frozenset({str(number)}) for number in range(3)]
    pairs = [
        Pair("picture with a red ring", "", claims[0], red, red),
        Pair("a red ring top left, a blue star top right", "", claims[1], shows=both),
        Pair("picture with a red star", "", claims[2], other, other),
    ]
    also = answered(pairs)
    assert also.nonzero().tolist() == [[1, 0]]  # the second entry answers the first query

    queries, scale = torch.eye(3), torch.tensor(10.0)
    loss = PairLoss()
    loss.also = also
    losses = {}
    for name, near in (("the one that answers", 1), ("another", 2)):
        entries = torch.eye(3)
        entries[near] = torch.nn.functional.normalize(queries[near] + queries[0], dim=0)
        entries.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(entries, queries, scale), entries)
        losses[name] = gradient[near, 0].item()
    assert losses["the one that answers"] == 0.0 < losses["another"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return ClipTrainer(Settings(tmp_path_factory.mktemp("clip"), steps=25, **TINY))


def test_text_without_padding_gives_the_same_embedding(tiny):
    ids = tiny.tokenize(["lamp", "picture with a red circle", "a blue star top left, " * 9])
    with torch.no_grad():
        assert torch.allclose(encode_text(tiny.model, ids), tiny.model.encode_text(ids), atol=1e-4)


def test_a_tiny_run_learns(tiny):
    losses = [tiny.train_step() for _ in range(25)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch):
    class Interrupted(ClipTrainer):
        def train_step(self) -> float:
            if self.step == 4:
                raise KeyboardInterrupt
            return super().train_step()

    monkeypatch.setattr(ClipTrainer, "evaluate", lambda self: {})
    whole, halved = (Settings(tmp_path / n, steps=6, evaluate_every=3, **TINY) for n in ("whole", "halved"))
    reference = ClipTrainer(whole)
    reference.run()
    with pytest.raises(KeyboardInterrupt):
        Interrupted(halved).run()
    resumed = ClipTrainer(dataclasses.replace(halved, resume=True))
    assert resumed.step == 3
    resumed.run()
    for a, b in zip(reference.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_clip_run_is_not_resumed_as_another_one_nor_overwritten(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ClipTrainer, "evaluate", lambda self: {})
    settings = Settings(tmp_path, steps=2, evaluate_every=1, **TINY)
    with pytest.raises(ConfigError, match="nothing to resume"):
        ClipTrainer(dataclasses.replace(settings, resume=True))
    assert list(tmp_path.iterdir()) == []
    ClipTrainer(settings).run()
    with pytest.raises(ConfigError, match="earlier run"):
        ClipTrainer(settings)
    other = dataclasses.replace(settings, resume=True, seed=1, adam_lr=1e-3, start=tmp_path / "start")
    with pytest.raises(ConfigError, match="other settings than these: adam_lr, seed, start"):
        ClipTrainer(other)
    assert ClipTrainer(dataclasses.replace(settings, resume=True, threads=1)).step == 2


def test_training_leaves_a_folder_that_loads_and_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ClipTrainer, "evaluate", lambda self: {"text to image": 0.0})
    summary = train_clip(Settings(tmp_path, steps=2, evaluate_every=1, **TINY))
    assert len(summary["log"]) == 2 and (tmp_path / "training.png").exists()
    with pytest.raises(ConfigError, match="holds a finished model: give another --out"):
        ClipTrainer(Settings(tmp_path, steps=2, evaluate_every=1, **TINY))
    assert not (tmp_path / "run").exists() and str(tmp_path) not in (tmp_path / "training.json").read_text()
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    assert model.logit_scale.item() <= np.log(100) + 1e-6
