"""The demo MLLM's training: batches, the PIC mask, saving, and a bounded run that learns."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from small_models import SMALL
from train_tools import hidden_states
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from mpic_lab.generator import Generator, messages
from mpic_lab.train import cli
from mpic_lab.train.batch import Encoder, collate, collate_branches, embed
from mpic_lab.train.initial_weights import structured_init
from mpic_lab.train.mllm import Settings, initial_model, train_mllm
from mpic_lab.train.model import build_model, load_model, save_model


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, layers=4)
    structured_init(model, tokenizer)
    return model.eval()


@pytest.fixture(scope="module")
def example(tokenizer):
    return Encoder(tokenizer)(Generator(2, "eval").task("mixed", 3))


def _rotate(model, keys, distance):
    cos, sin = model.model.language_model.rotary_emb(keys, torch.tensor([[distance]]))
    half = keys.shape[-1] // 2
    return keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin


def _linked(model, example, head, shift, begins=0):
    """Compile each chunk alone, move its keys, append what is reused to the cache; the rest is computed in order."""
    lm, embeds = model.model.language_model, embed(model, collate([example]))
    cache, out, done = DynamicCache(), [], 0

    def run(start, end):
        positions = torch.arange(start, end)[None]
        if end > start:
            out.append(lm(inputs_embeds=embeds[:, start:end], position_ids=positions, past_key_values=cache))

    for start, end in [*example.chunks, (len(example.ids), len(example.ids))]:
        run(done, min(start + head, end) if start < end else end)
        compiled = DynamicCache()
        if start < end:
            alone = torch.cat([embeds[:, :1].expand(-1, begins, -1), embeds[:, start:end]], 1)
            lm(inputs_embeds=alone, past_key_values=compiled)
        for layer, own in zip(cache.layers, compiled.layers, strict=False):
            keys = _rotate(model, own.keys, start - begins) if shift else own.keys
            layer.keys = torch.cat([layer.keys, keys[:, :, begins + head :]], 2)
            layer.values = torch.cat([layer.values, own.values[:, :, begins + head :]], 2)
        done = end
    return torch.cat([o.last_hidden_state for o in out], 1)[0]


@pytest.mark.parametrize(
    ("head", "shift", "begins"), [(0, True, 0), (4, True, 0), (16, True, 0), (16, False, 0), (0, True, 4)]
)
def test_pic_mask_equals_compile_move_and_link(model, example, head, shift, begins):
    with torch.no_grad():
        batch = collate_branches([[example]], [head], shift, begins)
        masked = hidden_states(model, batch)[0]
        linked = _linked(model, example, head, shift, begins)
    computed = torch.ones(len(example.ids), dtype=torch.bool)
    for start, end in example.chunks:
        computed[min(start + head, end) : end] = False
    torch.testing.assert_close(masked[computed], linked, atol=2e-3, rtol=1e-3)


def test_recomputing_every_token_is_plain_causal_attention(model, example):
    with torch.no_grad():
        everything = hidden_states(model, collate([example], [10_000]))
        plain = hidden_states(model, collate([example]))
    torch.testing.assert_close(everything, plain, atol=2e-3, rtol=1e-3)


def test_padding_and_neighbours_do_not_change_a_sample(model, tokenizer, example):
    other = Encoder(tokenizer)(Generator(5, "eval").task("card", 4))
    with torch.no_grad():
        alone = hidden_states(model, collate([example]))[0]
        together = hidden_states(model, collate([example, other]))[0, : len(example.ids)]
    torch.testing.assert_close(alone, together, atol=2e-3, rtol=1e-3)


def test_saved_model_loads_unchanged_with_names_for_vllm_and_processor_ids_are_training_ids(
    model, tokenizer, tmp_path
):
    save_model(model, tokenizer, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "vision_tower.vision_model.embeddings.class_embedding" in names
    assert "language_model.model.embed_tokens.weight" in names and "language_model.lm_head.weight" in names
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value.bfloat16().float())
    processor = AutoProcessor.from_pretrained(tmp_path)
    conversation = Generator(4, "eval").task("mixed", 3)
    text = processor.apply_chat_template(messages(conversation)[:-1], add_generation_prompt=True)
    images = [p.pixels for p in conversation.turns[0].user if hasattr(p, "pixels")]
    ids = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    example = Encoder(tokenizer)(conversation)
    assert ids["input_ids"][0].tolist() == example.ids[: ids["input_ids"].shape[1]]
    with torch.no_grad():
        theirs = loaded.model(**{k: ids[k] for k in ("input_ids", "pixel_values")}).last_hidden_state
        ours = hidden_states(loaded, collate([example]))[:, : theirs.shape[1]]
    torch.testing.assert_close(theirs, ours, atol=2e-2, rtol=1e-2)
    assert (tmp_path / "model.safetensors").stat().st_size < 30e6


@pytest.mark.parametrize("command", ["mllm", "clip"])
def test_a_device_that_does_not_exist_is_refused_instead_of_using_the_cpu(command, tmp_path, monkeypatch):
    monkeypatch.setattr(f"mpic_lab.train.{command}.train_{command}", lambda settings: None)
    done = CliRunner().invoke(cli.app, [command, "--device", "gpu", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "gpu" in done.output


def test_a_run_with_a_tower_begins_with_that_tower_and_a_language_model_of_its_own(tokenizer, tmp_path):
    tower, _ = load_model(SMALL)
    begun = initial_model(Settings(tmp_path, tower=SMALL), tokenizer)
    fresh = initial_model(Settings(tmp_path), tokenizer)
    for name, value in begun.model.vision_tower.state_dict().items():
        assert torch.equal(value, tower.model.vision_tower.state_dict()[name])
    mine, other = (m.model.language_model.embed_tokens.weight for m in (begun, fresh))
    assert torch.equal(mine, other)
    assert not torch.equal(mine, tower.model.language_model.embed_tokens.weight)


@pytest.mark.parametrize("option", ["tower", "start"])
def test_a_model_of_another_generation_is_not_begun_with(option, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="is not a model of generation 2"):
        initial_model(Settings(tmp_path, generation=2, **{option: SMALL}), tokenizer)


def test_a_tower_for_a_run_that_goes_on_is_refused(tmp_path):
    arguments = ["mllm", "--out", str(tmp_path), "--start", str(SMALL), "--tower", str(SMALL)]
    done = CliRunner().invoke(cli.app, arguments)
    words = done.output.replace("│", " ").split()  # in a box, whose lines break anywhere
    assert done.exit_code == 2 and "keeps its own tower" in " ".join(words)


def test_a_short_run_learns_resumes_and_leaves_both_checkpoints(tmp_path, few_conversations):
    settings = Settings(tmp_path, steps=20, workers=1, tokens=512, quiet=True, device="cpu", watched=1)
    train_mllm(settings)
    log = json.loads((tmp_path / "curves.json").read_text())
    losses = [e["loss"] for e in log if e["stage"] == "base" and "loss" in e]
    assert losses[-1] < losses[0] - 0.5
    for name in ("plain", "pic"):
        assert (tmp_path / name / "model.safetensors").exists()
    assert (tmp_path / "curves.png").exists()
    before = (tmp_path / "pic" / "model.safetensors").read_bytes()
    train_mllm(dataclasses.replace(settings, resume=True))
    assert (tmp_path / "pic" / "model.safetensors").read_bytes() == before
