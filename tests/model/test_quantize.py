"""Quantising plain weights while they are loaded: effects, invariants and refusals."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from chat_models import word_level
from families import TEXT, make_model
from torch import nn

from mpic.config import ConfigError, load_config
from mpic.errors import ModelRefused
from mpic.model.identity import fingerprint, weights_digest
from mpic.model.load import load_model
from mpic.model.quantize import GROUP, METHODS, Int4Linear, Int8Linear, quantize_weights, refuse_quantize

CPU = torch.device("cpu")
KINDS = {"int8": Int8Linear, "int4": Int4Linear}


def linear(inputs: int = 96, outputs: int = 48, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs).to(dtype)


def rounded(weight: torch.Tensor, method: str) -> torch.Tensor:
    """Return the rounded weights, computed in plain arithmetic."""
    if method == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round() * scale
    groups = weight.reshape(len(weight), -1, GROUP)
    low = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - low) / 15
    return (((groups - low) / scale).round() * scale + low).reshape(weight.shape)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_multiplies_with_its_rounded_weights(method, rows):
    layer, x = linear(), torch.randn(2, rows, 96)
    expected = nn.functional.linear(x, rounded(layer.weight, method), layer.bias)
    torch.testing.assert_close(KINDS[method](layer)(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("method", METHODS)
def test_in_bfloat16_it_is_as_close_as_bfloat16_is(method, rows):
    layer, x = linear(dtype=torch.bfloat16), torch.randn(rows, 96)
    expected = nn.functional.linear(x, rounded(layer.weight.float(), method), layer.bias.float())
    got = KINDS[method](layer)(x.bfloat16())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_in_float16_many_rows_of_large_outputs_are_as_finite_as_few(method):
    layer = nn.Linear(1024, 16, bias=False)
    with torch.no_grad():
        layer.weight.uniform_(0.005, 0.015)
    x = torch.full((17, 1024), 20.0) + torch.randn(17, 1024)
    exact, made = nn.functional.linear(x, rounded(layer.weight, method)), KINDS[method](layer.half())
    many, few = made(x.half()), made(x.half()[:16])
    assert exact.mean() > 190 and many.dtype == torch.float16
    torch.testing.assert_close(many.float(), exact, atol=0, rtol=0.01)
    torch.testing.assert_close(many[:16], few, atol=0, rtol=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_all_equal_stay_what_they_are(method):
    layer = linear()
    with torch.no_grad():
        layer.weight[0], layer.weight[1] = 0.0, 0.25
    x = torch.randn(3, 96)
    torch.testing.assert_close(KINDS[method](layer)(x)[:, :2], layer(x)[:, :2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_only_linear_layers_of_the_decoder_are_replaced_and_the_fingerprint_tells(method):
    model, _ = make_model("llava")
    plain, packet = fingerprint(model), weights_digest(model)
    found = quantize_weights(model, method)
    kinds = {type(module) for module in model.model.language_model.layers.modules()}
    assert KINDS[method] in kinds and nn.Linear not in kinds
    assert type(model.lm_head) is nn.Linear
    assert nn.Linear in {type(module) for module in model.model.vision_tower.modules()}
    assert found["layers"] == 3 * 7 and found["layers_not_quantized"] == 0
    assert found["bytes"] < found["bytes_before"]
    assert fingerprint(model) != plain
    assert weights_digest(model) == packet, "an adapter that was trained with the plain weights fits"


def test_layers_whose_sizes_do_not_fit_are_counted():
    text = {**TEXT, "intermediate_size": 72}
    found = quantize_weights(tf.LlamaForCausalLM(tf.LlamaConfig(**text)), "int4")
    assert (found["layers"], found["layers_not_quantized"]) == (3 * 4, 3 * 3)


@pytest.mark.parametrize("method", METHODS)
def test_projections_that_expand_latents_stay_plain_and_are_counted(method):
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
    model, _ = make_model("deepseek", text=sizes)
    before = [layer.self_attn.kv_b_proj.weight.clone() for layer in model.model.layers]
    found = quantize_weights(model, method)
    left = [layer.self_attn.kv_b_proj for layer in model.model.layers]
    assert [type(one) for one in left] == [nn.Linear] * 3 and found["layers_of_latents"] == 3
    assert all(torch.equal(one.weight, weight) for one, weight in zip(left, before, strict=True))
    attention = model.model.layers[0].self_attn
    rounded = (attention.q_a_proj, attention.q_b_proj, attention.kv_a_proj_with_mqa, attention.o_proj)
    assert {type(one) for one in rounded} == {KINDS[method]} and found["layers_not_quantized"] == 0
    assert quantize_weights(make_model("llama")[0], method)["layers_of_latents"] == 0


def mixture(experts: int) -> nn.Module:
    sizes = {**TEXT, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": experts}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**sizes, num_experts_per_tok=1, decoder_sparse_step=3))


@pytest.mark.parametrize("method", METHODS)
def test_experts_stay_plain_which_the_details_and_a_warning_say(method, caplog):
    model = mixture(2)
    found = quantize_weights(model, method)
    experts = model.model.layers[2].mlp.experts
    assert found["other_weights"] == 2
    assert found["other_bytes"] == experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    assert "2 weights of the decoder" in caplog.text
    assert quantize_weights(make_model("llama")[0], method)["other_weights"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_mixture_that_consists_of_experts_for_the_most_part_is_refused_and_left_as_it_is(method):
    model = mixture(64)
    before = fingerprint(model)
    with pytest.raises(ModelRefused, match="of a mixture's experts, which stay plain"):
        quantize_weights(model, method)
    assert fingerprint(model) == before


def test_a_model_without_linear_layers_is_refused():
    text = {**TEXT, "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**text, "intermediate_size": 40}))
    with pytest.raises(ModelRefused, match="no linear layer"):
        quantize_weights(model, "int4")


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_is_quantised_while_it_is_loaded_runs_in_bfloat16_and_says_what_it_is(method, tmp_path):
    tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)).save_pretrained(tmp_path)
    word_level().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", quantize=method)
    other = load_model(str(tmp_path), device="cpu", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16 and loaded.digest != other.digest
    assert loaded.info.details["quantization"]["method"] == method
    assert loaded.info.details["parameters"] == other.info.details["parameters"]


def test_what_cannot_be_quantised_is_refused_with_the_reason():
    with pytest.raises(ModelRefused, match="runs on the CPU only"):
        refuse_quantize("int8", torch.device("cuda"), None)
    with pytest.raises(ModelRefused, match="quantised already"):
        refuse_quantize("int8", CPU, {"quant_method": "gptq"})
    with pytest.raises(ModelRefused, match="available: int8, int4"):
        refuse_quantize("int3", CPU, None)


def test_the_configuration_refuses_other_methods_and_the_other_engine():
    assert load_config(flags={"quantize": "int4"}).engine.quantize == "int4"
    with pytest.raises(ConfigError, match="available: int8, int4"):
        load_config(flags={"quantize": "fp8"})
    with pytest.raises(ConfigError, match="quantize has no effect with engine = vllm"):
        load_config(flags={"quantize": "int8", "engine": "vllm"})
