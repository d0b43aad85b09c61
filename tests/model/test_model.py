"""Models that are accepted, models that are refused with the reason, and the identity of a model."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from engine_kit import family
from families import TEXT, VISION_FAMILIES, make_family, random_image

from mpic.errors import ModelRefused
from mpic.kernels.triton import launch, tuning
from mpic.kernels.windows import Window
from mpic.model import hooks, selftest
from mpic.model.image_selftest import image_self_test
from mpic.model.load import choose_device, load_model
from mpic.model.loaded import LoadedModel
from mpic.model.refusals import refuse_on_vllm
from mpic.model.rotary import Unrotated
from mpic.model.selftest import self_test
from mpic.model.triton_attention import TritonAttention, refuse_layers
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import DecoderShape, random_model


def load(model) -> float:
    return self_test(LoadedModel(model.float().eval()))


def llama(**changes):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**TEXT, **changes}))


def rope(kind: str, **more) -> dict:
    return {"rope_type": kind, "rope_theta": 1e4, **more}


GEMMA = {**TEXT, "head_dim": 16}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 512}
SMALL = {"vocab_size": 300, "n_layer": 2, "n_head": 4}
REFUSED = {
    "bloom alibi": (
        lambda: tf.BloomForCausalLM(tf.BloomConfig(**SMALL, hidden_size=64)),
        "no decoder with layers",
    ),
    "dynamic ntk": (lambda: llama(rope_parameters=rope("dynamic", factor=2.0)), "length"),
    "longrope": (lambda: llama(rope_parameters=rope("longrope", factor=2.0, **LONG)), "length"),
    "gpt2 positions": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SMALL, n_embd=64)), "decoder with layers"),
    "mamba": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2)),
        "keep a state",
    ),
}


def test_positions_with_three_axes_are_given_to_a_rotary_embedding_that_has_three(monkeypatch):
    """Earlier versions of transformers do not expand positions with fewer axes."""
    kind = tf.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding
    forward, given = kind.forward, []

    def recorded(self, x, position_ids):
        given.append(tuple(position_ids.shape))
        return forward(self, x, position_ids)

    monkeypatch.setattr(kind, "forward", recorded)
    self_test(make_family("qwen2_5_vl").loaded)
    assert given and all(len(shape) == 3 and shape[0] == 3 for shape in given)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(name):
    build, reason = REFUSED[name]
    with pytest.raises(ModelRefused, match=reason):
        load(build())


@pytest.mark.parametrize(
    "build",
    [
        lambda: tf.CohereForCausalLM(tf.CohereConfig(**TEXT)),
        lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**TEXT, logits_scaling=3.0, embedding_multiplier=2.0)),
        lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**TEXT)),
        lambda: llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=512)),
        lambda: llama(rope_parameters=rope("linear", factor=4.0)),
    ],
    ids=["cohere interleaved", "granite scaled logits", "olmo2", "yarn", "linear"],
)
def test_families_that_are_not_on_the_list_run_if_they_pass_the_self_test(build):
    assert load(build()) < 1e-5


def test_layers_without_a_rotary_embedding_are_served_natively_and_refused_on_vllm_by_name():
    rotated = tf.GraniteSWAConfig(**TEXT)
    refuse_on_vllm(rotated, rotated)
    config = tf.GraniteSWAConfig(**TEXT, layer_rope_theta=[1e4, 0, 1e4])
    loaded = LoadedModel(tf.GraniteSWAForCausalLM(config).float().eval())
    assert self_test(loaded) < 1e-5 and any(isinstance(kind.rotary, Unrotated) for kind in loaded.kinds)
    step = tf.LlamaConfig(**TEXT, use_rope_layers=[True, False, True])
    for refused in (config, step):
        with pytest.raises(ModelRefused, match="some of its layers have no rotary embedding"):
            refuse_on_vllm(refused, refused)


def test_the_self_test_refuses_a_model_whose_shifts_are_wrong(monkeypatch):
    loaded = make_family("qwen2").loaded
    rotary = loaded.kinds[0].rotary
    one, several = rotary.rotation, rotary.rotations
    wrong = lambda base: base + 1 if base else 0
    monkeypatch.setattr(rotary, "rotation", lambda base: one(wrong(base)))
    monkeypatch.setattr(rotary, "rotations", lambda bases: several(list(map(wrong, bases))))
    with pytest.raises(ModelRefused, match="differ"):
        self_test(loaded)


def test_a_model_that_depends_on_absolute_positions_is_refused():
    model = llama()
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden_states, *args, position_ids=None, **kwargs):
        bias = position_ids[..., None].to(hidden_states) * 0.05
        return original(hidden_states + bias, *args, position_ids=position_ids, **kwargs)

    layer.forward = forward
    with pytest.raises(ModelRefused, match="absolute positions"):
        load(model)


def test_a_model_whose_tokens_meet_outside_of_attention_is_refused():
    model = llama()
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden_states, *args, **kwargs):
        return original(hidden_states + 0.1 * hidden_states.roll(1, 1), *args, **kwargs)

    layer.forward = forward
    with pytest.raises(ModelRefused, match="keep a state"):
        load(model)


def test_a_sliding_window_does_not_limit_the_context():
    loaded = family("mistral").loaded
    assert loaded.context_length == 2048 and loaded.kinds[0].window == Window(1024)


def test_what_the_layers_have_is_read_from_the_model():
    def kinds(name: str) -> list[tuple]:
        loaded = family(name).loaded
        return [loaded.kinds[kind] for kind in loaded.kind_of]

    sliding, full, *_ = kinds("gemma3")
    assert sliding.window == Window(7) and full.window is None and sliding.rotary is not full.rotary
    chunked, unrotated, *_ = kinds("llama4")
    assert chunked.window == Window(10, chunked=True) and chunked.rotary.interleaved
    assert isinstance(unrotated.rotary, Unrotated)
    assert {(kind.kv_heads, kind.dim) for kind in kinds("gemma4")} == {(2, 16), (1, 32)}
    assert [(kind.rotary.start, kind.rotary.half, kind.dim) for kind in kinds("deepseek")] == [
        (16, 4, 24)
    ] * 3
    assert [facts.softcap for facts in family("gemma2").loaded.layers] == [True] * 3
    assert [facts.sinks for facts in family("gpt_oss").loaded.layers] == [True] * 3


@pytest.mark.parametrize(
    ("name", "why"),
    [("gemma4", "layers that differ in their heads"), ("deepseek", "heads whose last dimensions turn")],
)
def test_triton_refuses_by_name_the_layers_that_it_does_not_take(name, why):
    with pytest.raises(ModelRefused, match=f"'triton' does not take {why}"):
        refuse_layers(family(name).loaded.kinds)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "llama4"])
def test_triton_takes_windows_capped_scores_and_layers_that_turn_in_different_ways(name):
    refuse_layers(family(name).loaded.kinds)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_the_self_test_with_an_image_passes(name):
    assert image_self_test(family(name).loaded) < 2e-5


def test_images_that_a_model_lays_out_in_another_way_are_refused(monkeypatch):
    loaded = make_family("llava").loaded
    right = loaded.image_inputs

    def mirrored(image):
        inputs = right(image)
        return replace(inputs, embeds=inputs.embeds.flip(0))

    monkeypatch.setattr(loaded, "image_inputs", mirrored)
    with pytest.raises(ModelRefused, match="lays its images out"):
        image_self_test(loaded)


def test_the_digest_changes_with_a_single_weight_and_with_the_configuration():
    digests = {family("llama").loaded.digest, make_family("llama", seed=1).loaded.digest}
    model = make_family("llama").stock
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-3
    digests.add(LoadedModel(model).digest)
    assert len(digests) == 3
    assert make_family("llama").loaded.digest == family("llama").loaded.digest


def test_attention_outside_of_a_step_is_an_error_not_a_wrong_answer():
    with pytest.raises(RuntimeError, match="outside of a step"):
        family("llama").loaded.model(input_ids=torch.tensor([[1, 2]]))


def test_a_mask_that_no_layer_had_when_the_model_was_loaded_is_refused_when_it_arrives():
    step = hooks.Step([], [], [], None)
    q = torch.zeros(1, 2, 1, 8)
    with hooks.running(step), pytest.raises(ModelRefused, match="mask"):
        hooks._attention(torch.nn.Identity(), q, q, q, torch.zeros(1, 1, 1, 1))


def test_a_device_that_is_not_there_is_an_error_and_never_a_fallback():
    if not torch.cuda.is_available():
        with pytest.raises(ModelRefused, match="CUDA"):
            choose_device("cuda")


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ModelRefused, match="no transformers model"):
        load_model(str(tmp_path))


def test_an_unknown_dtype_lists_the_known_ones(tmp_path):
    with pytest.raises(ModelRefused, match=r"float32, bfloat16, float16"):
        load_model(str(tmp_path), dtype="int3")


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_an_images_inputs_have_one_embedding_and_position_a_token(name):
    loaded = family(name).loaded
    inputs = loaded.image_inputs(random_image(3, 48, 32))
    n = len(inputs)
    assert inputs.embeds.shape == (n, 64)
    assert inputs.positions.shape == (loaded.mrope, n)
    assert inputs.rotary_length == int(inputs.positions.max()) + 1
    assert (inputs.rotary_length < n) == (loaded.mrope == 3)
    assert (inputs.deepstack is not None) == (name == "qwen3_vl")


def test_kernels_that_cannot_be_compiled_are_a_refusal_with_the_reason(monkeypatch):
    """Triton raises errors of its own where there is no compiler, or too little shared memory."""
    loaded = family("llama").loaded
    monkeypatch.setattr(launch, "available", lambda device: True)
    monkeypatch.setattr(tuning, "tiles_for", lambda device, dtype, dim: tuning.defaults(dtype, dim))
    fails = Mock(side_effect=RuntimeError("Failed to find C compiler"))
    monkeypatch.setattr(TritonAttention, "_warm_up", fails)
    with pytest.raises(
        ModelRefused, match="cannot be compiled here: RuntimeError: Failed to find C compiler"
    ):
        TritonAttention(
            loaded.shape, loaded.kinds, loaded.kind_of, torch.device("cuda"), torch.bfloat16, {False}
        )


def deep_model(gain: float) -> LoadedModel:
    """Return a random bf16 model of so many layers, with weights so large, that rounding alone moves its logits by 6
    to 10 % of the largest: as much as in 32 random layers of LLaVA-1.6-7B's width on an H100."""
    placement = BenchDevice(torch.device("cpu"), torch.bfloat16)
    decoder = DecoderShape(24, 128, 2, 256, 2, 1000, 512)
    return LoadedModel(random_model(decoder, placement, gain=gain, seed=3), None, "deep")


def test_a_deep_model_is_not_refused_for_what_rounding_alone_makes_of_it():
    loaded = deep_model(6.0)
    assert self_test(loaded) > selftest.TOLERANCE[torch.bfloat16]
    # what rounding may excuse has a limit
    assert selftest.beyond_rounding(loaded, 1e-3) == selftest.MOST * 1e-3


def test_a_deep_model_is_refused_for_keys_that_are_one_position_away(monkeypatch):
    right = selftest._calls

    def wrong(views, at, pattern, segments, base_of, scope):
        moved = [base - (number == 3) for number, base in enumerate(base_of)]
        return right(views, at, pattern, segments, moved, scope)

    monkeypatch.setattr(selftest, "_calls", wrong)
    with pytest.raises(ModelRefused, match="relative position"):
        self_test(deep_model(6.0))


def test_attention_that_is_wrong_everywhere_is_not_taken_for_rounding(monkeypatch):
    loaded = deep_model(6.0)
    right = loaded.partial
    monkeypatch.setattr(loaded, "partial", lambda q, k, v, causal, scale: right(q, k, v, causal, 1.2 * scale))
    monkeypatch.setattr(loaded, "streams", [])
    monkeypatch.setattr(loaded, "block_spans", [])
    with pytest.raises(ModelRefused, match="differ"):
        self_test(loaded)


def test_half_precision_passes_the_self_test_too():
    fam = make_family("llama")
    assert self_test(LoadedModel(fam.stock.bfloat16())) < 6e-2
