"""Keys and values in 16 bits under a model in float32: nearly its answers, half its memory and files."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace

import pytest
import torch
from engine_kit import family, ids, image_chunk, logits_of, prompt_of, submit, text_chunk, until
from families import make_family, make_model, random_image
from fused_kit import use_program
from small_models import SMALL

from mpic.config import ConfigError, EngineConfig, load_config
from mpic.engine import load_engine
from mpic.engine.native.device_memory import pool_pages
from mpic.errors import ModelRefused
from mpic.kernels import block_spans, c_kernel, stream
from mpic.kernels.attention import KVView, SpanCall, Write
from mpic.kernels.span import Span
from mpic.kernels.writes import narrowed
from mpic.library import Library, Limits
from mpic.model.hooks import Step
from mpic.model.loaded import LoadedModel
from mpic.model.program import NOTE
from mpic.model.selftest import self_test

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
NEAR = 4e-3
"""Largest difference of log-probabilities: keys and values have 11 significant bits."""
FAMILIES = ["llama", "qwen2_5_vl", "mistral", "gpt_oss", "deepseek", "phi3"]


def halved(name: str) -> LoadedModel:
    """A family's model that keeps its keys and values in fp16."""
    fam = make_family(name)
    loaded = LoadedModel(copy.deepcopy(fam.stock), fam.loaded.processor, name, torch.float16)
    use_program(loaded)
    return loaded


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_keys_and_values_in_32_bits_nearly(name, make_engine):
    loaded = halved(name)
    self_test(loaded)
    chunk = image_chunk(random_image(0)) if loaded.has_vision else text_chunk(ids(2, 33))
    prompt = prompt_of(ids(3, 5), chunk, ids(4, 6), text_chunk(ids(5, 60)), ids(6, 4))
    for policy in ("full", "reuse", "mpic-4", "cacheblend-15", "random-30"):
        (wanted_ids, wanted), (got_ids, got) = (
            logits_of(submit(make_engine(name, model), prompt, policy), 4)
            for model in (family(name).loaded, loaded)
        )
        assert got_ids == wanted_ids
        assert 0 < (got - wanted).abs().max() < NEAR, policy


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_the_program_is_used_and_compute_what_the_modules_do(name, make_engine):
    loaded = halved(name)
    assert loaded.program is not None, loaded.info.details[NOTE]
    prompt = prompt_of(ids(3, 5), text_chunk(ids(2, 33)), ids(4, 6))
    engine = make_engine(name, loaded)
    fused = logits_of(submit(engine, prompt), 4)
    counters = engine.stats()["counters"]
    assert counters["fused_steps"] and counters["fused_block_steps"]
    loaded.program = None
    modules = logits_of(submit(make_engine(name, loaded), prompt), 4)
    assert fused[0] == modules[0] and (fused[1] - modules[1]).abs().max() < NEAR


def test_memory_is_half_and_a_chunk_is_not_mistaken_for_one_in_32_bits(make_engine):
    plain, half = family("llama").loaded, halved("llama")
    assert half.info.details["kv_dtype"] == "float16" and plain.info.details["kv_dtype"] == "float32"
    assert pool_pages(half, 1 << 20) == 2 * pool_pages(plain, 1 << 20)
    chunk, keys = text_chunk(ids(2, 33)), []
    for model in (plain, half):
        engine = make_engine("llama", model)
        assert engine.pool.page_bytes == engine.pool.page_elements * model.kv_dtype.itemsize
        engine.compile(chunk).result()
        keys.append(engine.linker.key(chunk))
    assert [key.recipe.dtype for key in keys] == ["float32", "float16"] and keys[0] != keys[1]


@pytest.mark.parametrize(
    "what, reason",
    [
        ("bfloat16", "is for models in float32 on the CPU, not in bfloat16 on cpu"),
        ("capped", "needs our own kernels for the CPU: no cpu-block-spans: its scores are capped"),
        ("compiler", "needs our own kernels for the CPU: no cpu-stream: no C compiler"),
    ],
)
def test_what_cannot_keep_16_bits_is_refused_with_the_reason(what, reason, monkeypatch):
    model = make_model("gemma2" if what == "capped" else "llama")[0]
    if what == "bfloat16":
        model = model.to(torch.bfloat16)
    if what == "compiler":
        stream.load.cache_clear(), block_spans.load.cache_clear()
        monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    with pytest.raises(ModelRefused, match=reason):
        LoadedModel(model, None, "refused", torch.float16)


def test_another_attention_that_cannot_read_16_bits_is_refused():
    loaded = halved("llama")
    for name in ("cpu-flash", "reference"):
        with pytest.raises(ModelRefused, match="available: auto, cpu-stream, triton"):
            loaded.choose_attention(name)


def test_the_configuration_is_followed_and_a_wrong_one_refused():
    engine, _ = load_engine(EngineConfig(model=str(SMALL), kv_dtype="float16"))
    try:
        assert engine.pool.arena.dtype == torch.float16 and engine.info.details["kv_dtype"] == "float16"
    finally:
        engine.close()
    with pytest.raises(ConfigError, match="kv_dtype"):
        load_config(None, {"kv_dtype": "int4"})
    with pytest.raises(ConfigError, match="kv_dtype"):
        load_config(None, {"engine": "vllm", "kv_dtype": "float16"})


@pytest.fixture
def library(tmp_path):
    opened = Library.open(tmp_path / "library", Limits())
    yield opened
    opened.close()


def test_files_are_half_as_large_and_are_linked_and_pressed_after_a_restart(library, make_engine):
    chunk = text_chunk(ids(2, 600))
    prompt = prompt_of(ids(3, 5), chunk, ids(4, 6))
    sizes, answers = [], []
    for model in (family("llama").loaded, halved("llama")):
        engine = make_engine("llama", model, store=library.store)
        answers.append(logits_of(submit(engine, prompt, "mpic-4"), 4))
        key = engine.linker.key(chunk)
        until(lambda key=key: library.store.find([key]))
        sizes.append(library.store.path(key).stat().st_size)
    assert 0.45 < sizes[1] / sizes[0] < 0.6
    later = make_engine("llama", halved("llama"), store=library.store)
    found = submit(later, prompt, "mpic-4").result()
    assert [use.tier for use in found.usage.chunks] == ["disk"]
    assert list(found.token_ids) == answers[1][0] == answers[0][0]
    pressed = prompt_of(ids(3, 5), replace(chunk, press="knorm-50"), ids(4, 6))
    used = submit(later, pressed, "mpic-4").result().usage.chunks
    assert [use.press for use in used] == ["knorm-50"] and used[0].tier != "compiled"


def test_numbers_beyond_fp16_become_its_largest_in_every_way_of_writing():
    large = torch.tensor([1e5, -3e38, float("nan"), 12.0])
    kept = narrowed(large, torch.float16)
    assert kept[0] == 65504 and kept[1] == -65504 and kept[2].isnan() and kept[3] == 12
    loaded = halved("llama")
    with torch.no_grad():
        loaded.text_model.layers[0].self_attn.v_proj.weight.mul_(1e9)
    view = KVView(torch.zeros(loaded.shape.extent(40), dtype=torch.float16))
    for forward in (loaded.program.run, loaded.forward):
        view.data.zero_()
        rows, span = slice(0, 40), Span(view, 0, 40)
        kinds = [loaded.kind_calls(0, [SpanCall(rows, span, causal=True, first=True)])]
        step = Step([Write(rows, span)], kinds, loaded.kind_of, loaded.partial)
        forward(loaded.rows(torch.tensor(ids(1, 40))), torch.arange(40)[None], step, torch.arange(1))
        assert view.data[0].isfinite().all() and view.data[0, 1].abs().max() == 65504
