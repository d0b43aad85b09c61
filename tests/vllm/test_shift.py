"""How keys move: transformers' rotary modules inside vLLM, and the test that an engine makes of its model's keys."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from mpic.engine.vllm.frontend.shifttest import MOVE, check_shift
from mpic.engine.vllm.plugin import transformers_rotary
from mpic.errors import ModelRefused
from mpic.kernels.attention import rotate

WIDTH = 16


def rotary_of(family: str, **changes) -> nn.Module:
    """Return a transformers rotary module for heads of 16 dimensions."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = next(
        v
        for k, v in vars(module).items()
        if k.endswith("RotaryEmbedding") and v.__module__ == module.__name__
    )
    sizes = {"hidden_size": 4 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": WIDTH}
    return made(AutoConfig.for_model(family, **sizes | changes))


@pytest.mark.parametrize(
    ("family", "interleaved", "turned"),
    [("olmo", False, 16), ("arcee", False, 16), ("seed_oss", False, 16), ("glm", True, 8), ("phi", False, 8)],
)
def test_keys_move_as_transformers_rotates_them(family, interleaved, turned):
    from mpic.engine.vllm.plugin.key_rotation import KeyRotation

    rotary = rotary_of(family)
    rotation = KeyRotation(nn.ModuleList([rotary, nn.Linear(2, 2)]))
    assert rotation.interleaved == interleaved and 2 * len(rotation.frequencies) == turned
    keys = torch.randn(3, 7, WIDTH)
    at, moved = (transformers_rotary.rotated(rotary, keys, first) for first in (4, 4 + MOVE))
    torch.testing.assert_close(rotate(at, rotation.by(MOVE)), moved, atol=1e-5, rtol=1e-5)
    assert torch.equal(at[..., turned:], keys[..., turned:])


def test_different_rotary_modules_and_changing_frequencies_are_refused():
    from mpic.engine.vllm.plugin.key_rotation import KeyRotation

    two = nn.ModuleList([rotary_of("olmo"), rotary_of("glm")])
    with pytest.raises(ModelRefused, match="different rotary embeddings"):
        KeyRotation(two)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelRefused, match="change with the length"):
        KeyRotation(nn.ModuleList([rotary_of("arcee", rope_parameters=dynamic)]))
    with pytest.raises(ModelRefused, match="no rotary embedding"):
        KeyRotation(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_module_that_turns_keys_in_another_way_is_refused(monkeypatch):
    rotary = rotary_of("olmo")
    module = importlib.import_module(type(rotary).__module__)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k * cos))
    with pytest.raises(ModelRefused, match="neither in halves nor in neighbouring pairs"):
        transformers_rotary.find(nn.ModuleList([rotary]))
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos: (q, k))
    with pytest.raises(ModelRefused, match="in an unknown way"):
        transformers_rotary.find(nn.ModuleList([rotary]))
    monkeypatch.delattr(module, "apply_rotary_pos_emb")
    with pytest.raises(ModelRefused, match="does not say how"):
        transformers_rotary.find(nn.ModuleList([rotary]))


def test_keys_that_are_only_rotated_pass_the_engines_test_and_others_are_refused():
    rotary = rotary_of("olmo")
    (frequencies, interleaved), keys = transformers_rotary.find(rotary)[0], torch.randn(3, 7, WIDTH)
    alone, behind = (transformers_rotary.rotated(rotary, keys, first) for first in (0, MOVE))
    check_shift(alone, behind, frequencies.tolist(), interleaved, "float32")
    scale = torch.rand(WIDTH) + 0.5  # as a norm after the rotation has it
    with pytest.raises(ModelRefused, match="does not explain"):
        check_shift(alone * scale, behind * scale, frequencies.tolist(), interleaved, "float32")
    with pytest.raises(ModelRefused, match="does not explain"):
        check_shift(alone, behind.fill_(float("nan")), frequencies.tolist(), interleaved, "float32")
