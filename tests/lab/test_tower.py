"""Training of a vision tower on a language model that stays as it is, and the model that comes of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoProcessor, LlamaConfig, LlamaForCausalLM, LlavaForConditionalGeneration
from typer.testing import CliRunner

from mpic import preflight
from mpic.data import published
from mpic.errors import IntegrityError, ModelRefused
from mpic.model import gguf_model
from mpic.model.graft import folder_of
from mpic.model.load import load_model
from mpic_lab.eval.flops import shapes_of
from mpic_lab.generator.scenes import draw_picture, render
from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.train import tower_stages as training
from mpic_lab.train.cli import app
from mpic_lab.train.tower import TowerTrainer
from mpic_lab.train.tower_export import export
from mpic_lab.train.tower_model import to_pixels
from mpic_lab.train.tower_prompts import TOKENS, Writer, collate
from mpic_lab.train.tower_run import STEPS, Settings, TowerRefused, checkpoint


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A small random language model in a folder."""
    folder, tokenizer = tmp_path_factory.mktemp("language") / "tiny", build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make every batch small: the tower has a picture, the language model a question."""
    monkeypatch.setattr(
        training, "draw_batch", lambda writer, rng, count: collate([writer.sample(rng, 1, 1)])
    )
    monkeypatch.setattr(training, "pictures_of", few(training.pictures_of))


def few(drawn):
    return lambda rng, count, most=None: drawn(rng, min(count, 2), most)


@pytest.fixture
def settings(tmp_path, language):
    steps = dict.fromkeys(STEPS, 2)
    return Settings(tmp_path / "run", language, steps=steps, width=128, layers=2, heads=2)


@pytest.fixture(scope="module")
def finished(language, tmp_path_factory):
    """The folder of a run that is done."""
    out = tmp_path_factory.mktemp("run")
    steps = dict.fromkeys(STEPS, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "draw_batch", lambda writer, rng, count: collate([writer.sample(rng, 1, 1)]))
        patch.setattr(training, "pictures_of", few(training.pictures_of))
        assert TowerTrainer(Settings(out, language, steps=steps, width=128, layers=2, heads=2)).run()
    return out


def begun(name, settings, finished):
    """Return a stage before its first step, the stages before it done."""
    settings.out.mkdir(exist_ok=True)
    for before in STEPS:
        if before == name:
            break
        (settings.out / f"{before}.safetensors").write_bytes(
            (finished / f"{before}.safetensors").read_bytes()
        )
    return TowerTrainer(settings, print)._stage(name)


def test_a_question_behind_others_is_answered_as_alone(language):
    reader = training.Reader(language)
    sample = Writer(reader.writer.tokenizer).sample(random.Random(1), 2, 3)
    images = torch.randn(2, TOKENS, 32)
    together = reader.logits(collate([sample]), images)
    alone = [reader.logits(collate([replace(sample, asked=[one])]), images) for one in sample.asked]
    assert len(alone) == 6
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STEPS)
def test_steps_lower_the_loss(name, settings, finished):
    stage = begun(name, replace(settings, steps=settings.steps | {name: 200}), finished)
    for group in stage.optimizer.param_groups:
        group["base"] *= 5
    before = stage.loss(random.Random("x")).item()
    drawn, stage.loss = stage.loss, lambda rng: drawn(random.Random("x"))
    for _ in range(8):
        stage._learn()
    assert drawn(random.Random("x")).item() < before - 0.01


@pytest.mark.parametrize("name", STEPS)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(name, settings, finished, tmp_path):
    whole = begun(name, settings, finished)
    whole.run(float("inf"), print)
    first = begun(name, replace(settings, out=tmp_path / "again"), finished)
    first._learn()
    first._save()
    second = begun(name, first.settings, finished)
    assert second.run(float("inf"), print) and second.step == 2
    for key, one in checkpoint(settings.out, name)[1].items():
        assert torch.equal(one, checkpoint(first.settings.out, name)[1][key]), key


def test_a_run_out_of_time_leaves_a_checkpoint_and_says_that_it_is_not_done(settings):
    assert not TowerTrainer(replace(settings, minutes=1e-9, stages=("sight",))).run()
    assert checkpoint(settings.out, "sight")[0]["step"] == 0


def test_another_tower_does_not_go_on_from_a_checkpoint(settings, finished):
    with pytest.raises(TowerRefused, match="another seed, tower or language model"):
        begun("words", replace(settings, seed=1, out=finished), finished).run(float("inf"), print)


def test_a_stage_waits_for_the_one_before(settings):
    with pytest.raises(TowerRefused, match=r"sight in .* has not begun"):
        TowerTrainer(replace(settings, stages=("join",))).run()


def test_the_language_model_stays_as_it_is(settings, language, finished):
    trainer = TowerTrainer(settings)
    assert trainer.run()
    stock = LlamaForCausalLM.from_pretrained(language).state_dict()
    for name, weight in trainer.reader.model.state_dict().items():
        assert torch.equal(weight, stock[name]), name
    with torch.no_grad():
        trainer.reader.model.model.norm.weight += 1
    with pytest.raises(IntegrityError, match="changed the language model"):
        trainer.run()


def test_the_command_goes_on_in_the_folder_it_is_given(tmp_path, language):
    command = ["tower", "--out", str(tmp_path), "--language-model", language, "--stage", "words"]
    for _ in range(2):
        result = CliRunner().invoke(app, [*command, "--minutes", "1e-9"])
        assert (result.exit_code, result.stdout) == (0, f"words: step 0 of {STEPS['words']}\n")
    result = CliRunner().invoke(app, ["tower-export", str(tmp_path), str(tmp_path / "graft")])
    assert isinstance(result.exception, TowerRefused) and "answers" in str(result.exception)


@pytest.fixture
def graft(finished, language, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_model, "converted_folder", lambda: tmp_path / "cache")
    export(finished, tmp_path / "graft", language)
    return tmp_path / "graft"


def test_an_exported_tower_is_a_llava_of_stock_transformers(graft, finished, language):
    assert not any("language" in path.name for path in graft.glob("*.safetensors"))
    folder = folder_of(str(graft), "float32")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    pixels = render(draw_picture(random.Random(0)), random.Random(0)).copy()
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]}],
        add_generation_prompt=True,
    )
    assert text.endswith("Image 1:<image>\nWhat do you see?<|im_end|>\n<|im_start|>assistant\n")
    inputs = processor(text=text, images=[pixels], return_tensors="pt")
    assert (inputs.input_ids == model.config.image_token_id).sum() == TOKENS
    torch.testing.assert_close(inputs.pixel_values, to_pixels([pixels]), rtol=0, atol=1e-6)
    tower = TowerTrainer(Settings(finished, language, width=128, layers=2, heads=2))._tower()
    tower.load_state_dict(checkpoint(finished, "answers")[1], strict=False)
    tower.bfloat16().float()  # as its weights are stored
    made = model.get_image_features(inputs.pixel_values).pooler_output[0]
    torch.testing.assert_close(made, tower(inputs.pixel_values)[0], rtol=1e-4, atol=1e-4)
    stock = LlamaForCausalLM.from_pretrained(language)
    assert torch.equal(model.get_input_embeddings().weight, stock.get_input_embeddings().weight)


def test_an_exported_tower_is_served(graft):
    preflight.check_model(str(graft))
    loaded = load_model(str(graft), device="cpu", dtype="float32")
    assert loaded.has_vision and loaded.info.name == "graft"


def test_a_bundled_tower_is_served_by_its_name(graft, monkeypatch):
    monkeypatch.setattr(published, "BUNDLED", graft.parent)
    assert folder_of("graft") == folder_of(str(graft))
    assert sum(p.numel() for p in shapes_of("graft").parameters()) > 400_000


def test_a_graft_is_joined_once(graft):
    first = folder_of(str(graft))
    (graft / "graft.json").touch()
    assert folder_of(str(graft)) != first
    assert folder_of(str(graft)) == folder_of(str(graft))


def test_a_graft_refuses_another_language_model(graft, language):
    config = graft / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    with pytest.raises(ModelRefused, match="hidden_size is 64, not 32"):
        folder_of(str(graft))


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_graft_that_names_no_language_model_is_refused(graft, content):
    (graft / "graft.json").write_text(content)
    with pytest.raises(ModelRefused, match=r"graft.json names no language model"):
        preflight.check_model(str(graft))
