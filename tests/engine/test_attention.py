"""Every attention implementation of the CPU decodes the same answers, and ``/health`` names the one that runs."""

from __future__ import annotations

import shutil

import pytest
import torch
from engine_kit import assert_oracle, family, ids, image_chunk, prompt_of, submit, text_chunk
from families import random_image

from mpic.errors import ModelRefused
from mpic.kernels import c_kernel, stream

COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler on this machine")
NAMES = ["cpu-flash", "reference", pytest.param("cpu-stream", marks=needs_compiler)]


@pytest.fixture
def choose():
    """A family with a chosen attention until the end of the test."""
    chosen = []

    def choose(name: str, attention: str):
        loaded = family(name).loaded
        chosen.append(loaded)
        loaded.choose_attention(attention)
        return loaded

    yield choose
    for loaded in chosen:
        loaded.choose_attention("auto")


@pytest.fixture
def no_compiler(monkeypatch):
    stream.load.cache_clear()
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    yield
    stream.load.cache_clear()


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2_5_vl"])
def test_requests_that_decode_together_over_shared_chunks_equal_the_oracle(
    name, attention, make_engine, choose
):
    """Grouped-query heads, partial rotary, positions with three axes; own tokens of three lengths; one chunk that all
    link at different bases, one of them twice and in one piece, the others with their heads recomputed."""
    loaded = choose(name, attention)
    shared = image_chunk(random_image(0)) if loaded.has_vision else text_chunk(ids(2, 33))
    prompts = [
        (prompt_of(ids(3, 5), shared, ids(4, 6), text_chunk(ids(5, 20)), ids(6, 4)), "mpic-4"),
        (prompt_of(shared, ids(7, 2), shared, ids(8, 9)), "reuse"),
        (prompt_of(ids(9, 12)), "mpic-4"),
    ]
    engine = make_engine(name)
    streams = [submit(engine, *prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, streams, strict=True):
        assert_oracle(name, *prompt, answer)


@needs_compiler
def test_the_kernel_for_single_rows_is_chosen_by_itself_and_can_be_switched_off(choose):
    loaded = choose("llama", "auto")
    assert loaded.info.attention == "cpu-stream" and loaded.info.details["attention_note"] == ""
    choose("llama", "cpu-flash")
    assert loaded.info.attention == "cpu-flash" and not loaded.streams


def test_without_a_compiler_torch_takes_over_and_it_is_reported(no_compiler, choose):
    loaded = choose("llama", "auto")
    assert loaded.info.attention == "cpu-flash" and not loaded.streams
    assert loaded.info.details["attention_note"] == "no cpu-stream: no C compiler (gcc, cc, clang)"
    with pytest.raises(ModelRefused, match="no C compiler"):
        loaded.choose_attention("cpu-stream")


def test_an_unknown_attention_is_refused_with_the_known_ones():
    loaded = family("llama").loaded
    with pytest.raises(ModelRefused, match=r"available: auto, .*cpu-flash, reference, triton \(CUDA\)"):
        loaded.choose_attention("cuda-flash")
    assert loaded.device == torch.device("cpu")
