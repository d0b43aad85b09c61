"""A model whose weights were quantised when it was loaded links as the stock model with the same weights does."""

from __future__ import annotations

import copy

import engine_kit
import pytest
from engine_kit import TOKENS, assert_oracle, ids, logits_of, prompt_of, submit
from extend_kit import chunks_of
from families import Family, Sizes, make_model

from mpic.engine.native.engine import NativeEngine
from mpic.kv.chunk import KVShape
from mpic.model.loaded import LoadedModel
from mpic.model.quantize import quantize_weights
from mpic.model.selftest import self_test

LATENTS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
LATENTS |= {"qk_rope_head_dim": 16, "v_head_dim": 16}
"""Sizes of multi-head latent attention that 4 bits a weight fit."""


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantised(request):
    return quantised_family("llama", request.param)


def quantised_family(name: str, method: str, sizes: Sizes | None = None) -> Family:
    model, _ = make_model(name, text=sizes)
    quantize_weights(model, method)
    stock = copy.deepcopy(model)
    return Family(name, LoadedModel(model, None, name), stock)


@pytest.fixture(scope="module")
def engine(quantised):
    engine = NativeEngine(quantised.loaded, None, pages=128, page_size=8, check_when_idle=True)
    yield engine
    engine.close()


def test_the_self_test_passes(quantised):
    assert self_test(quantised.loaded) < 1e-5


@pytest.mark.parametrize("policy", ["full", "prefix", "reuse", "mpic-5", "legolink-0", "cacheblend-25"])
def test_every_policy_equals_the_oracle(policy, quantised, engine, monkeypatch):
    monkeypatch.setattr(engine_kit, "family", lambda name: quantised)
    a, b, c = chunks_of("llama")
    prompt = prompt_of(ids(1, 5), a, ids(2, 3), b, ids(3, 2), c, ids(4, 4))
    assert_oracle("llama", prompt, policy, submit(engine, prompt, policy))


def test_recomputing_every_token_equals_full(engine):
    a, b, _ = chunks_of("llama")
    prompt = prompt_of(ids(5, 6), a, ids(6, 3), b, ids(7, 4))
    full, linked = (logits_of(submit(engine, prompt, policy), TOKENS) for policy in ("full", "mpic-1000000"))
    engine_kit.assert_same(linked, full)


@pytest.fixture(scope="module", params=["int8", "int4"])
def latents(request):
    """A model with multi-head latent attention, all of whose linear layers could be rounded to 4 bits."""
    return quantised_family("deepseek", request.param, LATENTS)


@pytest.mark.parametrize("policy", ["full", "reuse", "mpic-5", "legolink-0", "cacheblend-25", "a3-25"])
def test_latents_are_kept_and_every_policy_equals_the_oracle(policy, latents, monkeypatch):
    loaded = latents.loaded
    assert len(loaded.latents) == 3 and loaded.shape == KVShape(3, 1, 32 + 16, parts=1)
    assert self_test(loaded) < 2e-5
    a, b, c = chunks_of("deepseek")
    monkeypatch.setattr(engine_kit, "family", lambda name: latents)
    prompt = prompt_of(ids(1, 5), a, ids(2, 3), b, ids(3, 2), c, ids(4, 4))
    engine = NativeEngine(loaded, None, pages=128, page_size=8, check_when_idle=True)
    try:
        assert_oracle("deepseek", prompt, policy, submit(engine, prompt, policy))
    finally:
        engine.close()
