"""Multi-head latent attention: what is kept, and that files of the former layout are never taken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_kit import MemoryStore, assert_oracle, family, ids, prompt_of, submit, text_chunk
from families import make_model

from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused
from mpic.kv.chunk import Recipe
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import self_test


def test_a_layer_keeps_one_latent_and_one_turning_part_a_token():
    loaded, config = family("deepseek").loaded, family("deepseek").stock.config
    assert loaded.shape[1:] == (1, config.kv_lora_rank + config.qk_rope_head_dim)
    assert loaded.kinds[0].rotary.start == config.kv_lora_rank
    expanded = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    assert loaded.shape.per_token == 2 * loaded.shape.layers * expanded // 4


def test_a_projection_that_does_not_explain_the_keys_is_left_expanded_and_right():
    model, _ = make_model("deepseek")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.bias = torch.nn.Parameter(
            torch.randn(layer.self_attn.kv_b_proj.out_features)
        )
    loaded = LoadedModel(model)
    assert not loaded.latents and loaded.shape.kv_heads == 4
    assert self_test(loaded) < 2e-5


def test_latents_that_turned_in_the_wrong_place_would_be_refused(monkeypatch):
    loaded = family("deepseek").loaded
    monkeypatch.setattr(loaded.kinds[0].rotary, "start", 0)
    with pytest.raises(ModelRefused, match="more than relative position"):
        self_test(loaded)


def test_a_chunk_of_expanded_keys_is_compiled_again():
    """It has another recipe, so nothing looks at its bytes."""
    loaded, store, chunk = family("deepseek").loaded, MemoryStore(), text_chunk(ids(8, 12))
    prompt = prompt_of(ids(1, 5), chunk, ids(2, 4))
    for tokens in (12, 0, 12):  # compiled; found; compiled again, where only the former layout is stored
        if tokens and store.chunks:
            [(key, kv)] = store.chunks.items()
            assert key.recipe.layout == "latent" and kv.kv.shape == (3, 2, 1, 12, 24)
            former = replace(key, recipe=replace(key.recipe, layout=""))
            store.chunks = {former: replace(kv, key=former, kv=torch.full((3, 2, 4, 12, 24), float("nan")))}
        engine = NativeEngine(loaded, store, pages=64, page_size=8)
        try:
            assert_oracle("deepseek", prompt, "reuse", submit(engine, prompt, "reuse"))
            assert engine.stats()["counters"].get("tokens_compiled", 0) == tokens
        finally:
            engine.close()
    assert len(store.chunks) == 2


def test_other_models_chunks_keep_their_digests():
    assert "layout" not in Recipe("float32").fields()
    assert Recipe("float32").digest == Recipe("float32", layout="").digest
    assert Recipe("float32").digest != Recipe("float32", layout="latent").digest
