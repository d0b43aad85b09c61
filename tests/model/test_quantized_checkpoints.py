"""Checkpoints that are quantised already: those that transformers can load on a CPU pass the self-test, the others are
refused with the reason before a weight is read."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
import transformers as tf
from chat_models import word_level
from families import TEXT
from safetensors.torch import load_file, save_file

from mpic.errors import ModelRefused
from mpic.model.load import load_model

SIZES = {**TEXT, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8}},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).save_pretrained(folder)
    word_level().save_pretrained(folder)
    return folder


def converted(plain, folder, quantization, convert):
    """A copy of the checkpoint whose projections are stored as ``convert`` makes them."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    stored = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored |= convert(name, weight) if name.endswith("_proj.weight") else {name: weight}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def compressed(name, weight):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    stem = name.removesuffix("weight")
    return {
        f"{stem}weight_packed": pack_to_int32(values, 8),
        f"{stem}weight_scale": scale,
        f"{stem}weight_shape": torch.tensor(weight.shape),
    }


def in_blocks(name, weight):
    rows, columns = weight.shape
    blocks = weight.reshape(rows // 64, 64, columns // 64, 64)
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).reshape(rows, columns)
    return {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def bitsandbytes(plain, folder, **bits):
    quantization = tf.BitsAndBytesConfig(**bits)
    model = tf.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=quantization, dtype=torch.float32
    )
    model.save_pretrained(folder)
    word_level().save_pretrained(folder)
    return str(folder)


LOADED = {
    "compressed-tensors": (
        "compressed_tensors",
        lambda plain, to: converted(plain, to, COMPRESSED, compressed),
    ),
    "fp8": ("accelerate", lambda plain, to: converted(plain, to, FP8, in_blocks)),
    "bitsandbytes 8-bit": ("bitsandbytes", lambda plain, to: bitsandbytes(plain, to, load_in_8bit=True)),
    "bitsandbytes 4-bit": ("bitsandbytes", lambda plain, to: bitsandbytes(plain, to, load_in_4bit=True)),
}


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("name", LOADED)
def test_a_quantised_checkpoint_loads_and_passes_the_self_test(name, plain, tmp_path):
    package, make = LOADED[name]
    pytest.importorskip(package, reason=f"{package} is not installed (the extra 'quantized')")
    quantised, other = load_model(make(plain, tmp_path), device="cpu"), load_model(str(plain), device="cpu")
    assert quantised.info.details["self_test_error"] < 1e-5
    assert quantised.digest != other.digest
    method = name.replace(" 8-bit", "_8bit").replace(" 4-bit", "_4bit")
    assert quantised.info.details["quantization"]["method"] == method
    ids = torch.arange(10, 40)[None]
    with torch.inference_mode():
        logits = [one.model.lm_head(one.model.model.embed_tokens(ids)) for one in (quantised, other)]
    assert torch.equal(*logits), "embeddings and the head are not quantised"


REFUSED = {
    "fbgemm_fp8": (None, "GPU"),
    "gptq": ("optimum", "optimum"),
    "awq": ("gptqmodel", "gptqmodel"),
    "torchao": ("torchao", "torchao"),
    "made-up": (None, "does not know"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_cannot_be_loaded_here_is_refused_before_a_weight_is_read(method, plain, tmp_path, monkeypatch):
    package, reason = REFUSED[method]
    if package is not None and find_spec(package) is not None:
        pytest.skip(f"{package} is installed, so that such a checkpoint is loaded and not refused")
    more = {"quant_type": "int8_weight_only"} if method == "torchao" else {"bits": 4, "group_size": 64}
    folder = converted(plain, tmp_path, {"quant_method": method, **more}, lambda name, weight: {})
    monkeypatch.setattr("mpic.model.load.load_weights", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(ModelRefused, match=f"quantised with '?{method}.*{reason}"):
        load_model(folder, device="cpu")


def test_a_checkpoint_that_lacks_weights_is_refused(plain, tmp_path):
    """transformers fills them with random values and warns."""
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    weights = load_file(plain / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lack 1 .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path), device="cpu")


def test_vllm_knows_a_quantised_checkpoint_by_its_files_whether_transformers_can_load_it_or_not(
    plain, tmp_path
):
    from mpic.model.checkpoint import stored_fingerprint
    from mpic.model.load import load_config

    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    first = converted(plain, tmp_path / "a", quantization, lambda name, weight: {f"{name}_q": weight.char()})
    other = converted(
        plain, tmp_path / "b", quantization, lambda name, weight: {f"{name}_q": weight.char() + 1}
    )
    digests = [stored_fingerprint(path, load_config(path, "auto", False)) for path in (first, first, other)]
    assert digests[0] == digests[1] != digests[2]
