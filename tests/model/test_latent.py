"""Multi-head latent attention: the kept latents, and that files of the former layout are never used for them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_kit import MemoryStore, assert_oracle, family, ids, prompt_of, submit, text_chunk, until
from families import make_model

from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused
from mpic.kv.chunk import KVShape, Recipe
from mpic.kv.file import BLOCK, ChunkFile, write
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import self_test


def test_a_layer_keeps_one_latent_and_one_turning_part_a_token():
    loaded, config = family("deepseek").loaded, family("deepseek").stock.config
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    assert loaded.shape == KVShape(3, 1, numbers, parts=1) and loaded.layout == "latent-once"
    assert loaded.shape.per_token == 3 * numbers, (
        "a layer keeps of a token its latent and the part that turns, once"
    )
    assert loaded.kinds[0].rotary.start == config.kv_lora_rank
    expanded = 2 * config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    assert loaded.shape.per_token == 3 * expanded // 8


@pytest.mark.parametrize("policy", ["full", "reuse", "mpic-5", "legolink-0", "cacheblend-25", "a3-25"])
def test_links_of_chunks_read_from_files_equal_the_oracle(policy, tmp_path):
    """A file holds the latents of a chunk once."""
    loaded, files = family("deepseek").loaded, FileStore(tmp_path)
    a, b = text_chunk(ids(8, 37)), text_chunk(ids(9, 29))
    prompt = prompt_of(ids(1, 5), a, ids(2, 4), b, ids(3, 2), a, ids(4, 3))
    uses = policy != "full"
    for is_first in (True, False):
        with closing(NativeEngine(loaded, files, pages=64, page_size=8, check_when_idle=True)) as engine:
            assert_oracle("deepseek", prompt, policy, submit(engine, prompt, policy))
            compiled = engine.stats()["counters"].get("tokens_compiled", 0)
            assert compiled == (37 + 29 if uses and is_first else 0)
            if uses and not is_first:  # a load may be reported after the answer that followed it
                until(lambda: engine.device.counters["chunks_from_disk"])
            assert bool(engine.device.counters["chunks_from_disk"]) == (uses and not is_first)
    assert len(list(tmp_path.iterdir())) == (2 if uses else 0)
    for path in tmp_path.iterdir():
        file = ChunkFile(path)
        kv = file.tokens * 3 * (16 + 8) * 4
        assert file.shape == loaded.shape and file.key.recipe.layout == "latent-once"
        assert kv < path.stat().st_size <= kv + 3 * BLOCK, (
            "a header and the inputs beside it, in whole blocks"
        )


def test_single_rows_of_many_requests_and_blocks_of_rows_share_latents():
    with closing(
        NativeEngine(family("deepseek").loaded, None, pages=128, page_size=8, check_when_idle=True)
    ) as engine:
        chunk = text_chunk(ids(8, 37))
        prompts = [prompt_of(ids(1, 5 + i), chunk, ids(2 + i, 3)) for i in range(4)]
        streams = [submit(engine, prompt, "mpic-5") for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert_oracle("deepseek", prompt, "mpic-5", stream)


def test_where_one_layer_keeps_heads_all_keep_keys_and_values():
    model, _ = make_model("deepseek")
    projection = model.model.layers[1].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.randn(projection.out_features))
    loaded = LoadedModel(model)
    assert sorted(loaded.latents) == [0, 2] and loaded.layout == "latent"
    assert loaded.shape == KVShape(3, 4, 24, parts=2)
    assert self_test(loaded) < 2e-5


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


@pytest.mark.parametrize(("layout", "heads"), [("", 4), ("latent", 1)])
def test_a_chunk_of_a_former_layout_is_compiled_again(layout, heads):
    """Such a file holds every head's keys and values, or latents twice. It has another recipe, so nothing reads its
    bytes."""
    loaded, store, chunk = family("deepseek").loaded, MemoryStore(), text_chunk(ids(8, 12))
    prompt = prompt_of(ids(1, 5), chunk, ids(2, 4))
    for tokens in (12, 0, 12):  # compiled; found; compiled again, where only the former layout is stored
        if tokens and store.chunks:
            [(key, kv)] = store.chunks.items()
            assert key.recipe.layout == "latent-once" and kv.kv.shape == (3, 1, 1, 12, 24)
            former = replace(key, recipe=replace(key.recipe, layout=layout))
            store.chunks = {
                former: replace(kv, key=former, kv=torch.full((3, 2, heads, 12, 24), float("nan")))
            }
        with closing(NativeEngine(loaded, store, pages=64, page_size=8)) as engine:
            assert_oracle("deepseek", prompt, "reuse", submit(engine, prompt, "reuse"))
            assert engine.stats()["counters"].get("tokens_compiled", 0) == tokens
    assert len(store.chunks) == 2


def test_other_models_chunks_keep_their_digests():
    assert "layout" not in Recipe("float32").fields()
    assert Recipe("float32").digest == Recipe("float32", layout="").digest
    layouts = ("", "latent", "latent-once")
    assert len({Recipe("float32", layout=layout).digest for layout in layouts}) == 3
    assert [Recipe("float32", layout=layout).parts for layout in layouts] == [2, 2, 1]


class FileStore(MemoryStore):
    """The same with files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def find(self, keys):
        paths = {key: self.folder / key.digest for key in keys}
        return {key: FileChunk(path, key) for key, path in paths.items() if path.exists()}

    def save(self, chunk):
        write(self.folder / chunk.key.digest, chunk)


class FileChunk(ChunkFile):
    tier = "disk"
