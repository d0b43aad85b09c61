"""The engine with ``attention="triton"``, through Triton's interpreter where there is no GPU, against the oracle."""

from __future__ import annotations

import copy
from contextlib import closing, contextmanager

import pytest
import torch
from engine_kit import (
    MemoryStore,
    assert_oracle,
    family,
    ids,
    image_chunk,
    prompt_of,
    request_of,
    submit,
    text_chunk,
)
from families import random_image
from torch.utils._python_dispatch import TorchDispatchMode

from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused
from mpic.kernels.triton import launch as triton_step
from mpic.model import triton_attention
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import self_test


@pytest.fixture
def triton(monkeypatch):
    """Families that use Triton's attention until the end of the test; with a GPU, copies of them on it."""
    chosen = []

    def choose(name: str) -> LoadedModel:
        loaded = family(name).loaded
        if torch.cuda.is_available():
            monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
            loaded = LoadedModel(copy.deepcopy(family(name).stock).cuda(), loaded.processor, name)
        loaded.choose_attention("triton")
        chosen.append(loaded)
        return loaded

    yield choose
    for loaded in chosen:
        loaded.choose_attention("auto")


@contextmanager
def engine_of(loaded, **options):
    with closing(NativeEngine(loaded, pages=64, page_size=16, **options)) as engine:
        engine.pool.arena.fill_(float("nan"))
        yield engine


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2_5_vl", "gpt_oss"])
def test_answers_equal_the_oracle(name, triton):
    """Grouped-query heads, partial rotary, positions with three axes, windows and sinks; holes in chunks, a chunk that
    is linked twice."""
    loaded = triton(name)
    document = text_chunk(ids(1, 20))
    chunk = image_chunk(random_image(0)) if loaded.has_vision else text_chunk(ids(2, 33))
    prompt = prompt_of(ids(3, 5), document, ids(4, 6), chunk, ids(5, 2), document, ids(6, 4))
    with engine_of(loaded, store=MemoryStore()) as engine:
        for policy in ("mpic-4", "random-20") if name == "llama" else ("random-20",):
            assert_oracle(name, prompt, policy, submit(engine, prompt, policy))
        engine.check()


def test_requests_decoding_together_over_one_chunk_equal_the_oracle(triton, monkeypatch):
    """They read it in one tile, each with its own base; keys are cut and merged as on a large device."""
    loaded = triton("llama")
    loaded.triton.programs = 64
    monkeypatch.setattr(triton_attention.TritonAttention, "least", 16)
    chunk = text_chunk(ids(1, 40))
    prompts = [prompt_of(ids(10 + i, 3 + i), chunk, ids(20 + i, 4)) for i in range(3)]
    with engine_of(loaded, budget=24) as engine:
        streams = [submit(engine, prompt) for prompt in prompts]
        for prompt, stream in zip(prompts, streams):
            assert_oracle("llama", prompt, "mpic-4", stream)
        engine.check()


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_the_load_time_self_test_runs_with_it(name, triton):
    """Also with capped scores, windows in chunks, and layers without rotary embedding."""
    assert self_test(triton(name)) < 1e-5


def test_what_runs_is_named(triton):
    loaded = triton("llama")
    assert loaded.info.attention == "triton" + " (interpreted)" * triton_step.interpreted()


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    loaded = family("qwen2").loaded
    monkeypatch.setattr(triton_step, "interpreted", lambda: loaded.device.type != "cpu")
    with pytest.raises(ModelRefused, match="CUDA"):
        loaded.choose_attention("triton")
    assert loaded.triton is None


class Questions(TorchDispatchMode):
    """Counts operations that make the host wait for the device: reading a number, or a shape that depends on data."""

    ASKING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.removeprefix("aten::").split(".")[0] in self.ASKING:
            self.asked.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_no_layer_waits_for_the_device(name, triton, monkeypatch):
    """Everything a layer needs was decided when the step's tables were built. transformers itself asks once a forward,
    before the first layer, whether the rows are several packed sequences."""
    loaded = triton(name)
    forward, asked = type(loaded).call, []

    def watched(self, *args):
        with Questions() as questions:
            out = forward(self, *args)
        asked.append(questions.asked)
        return out

    monkeypatch.setattr(type(loaded), "call", watched)
    prompt = prompt_of(ids(3, 5), text_chunk(ids(1, 20)), ids(6, 4))
    with engine_of(loaded) as engine:
        engine.submit(request_of(prompt, "mpic-4", 2)).result()
    assert len(asked) >= 2 and all(len(questions) <= 1 for questions in asked)


def test_reading_a_number_would_have_been_seen():
    with Questions() as questions:
        torch.ones(3).sum().item()
    assert questions.asked
