"""Answers whose decoding steps are fused are those of the model's modules."""

from __future__ import annotations

import pytest
from engine_kit import family, ids, prompt_of, request_of, submit_together, text_chunk
from families import make_family

from mpic.kernels import decoder
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.model.fused_layers import NOTE
from mpic.model.fused_proof import use_fused_step

try:
    decoder.load(16, family("llama").loaded.dtype)
    AVAILABLE = True
except KernelUnavailable:
    AVAILABLE = False
pytestmark = pytest.mark.skipif(
    not AVAILABLE, reason="no C compiler, or a processor on which torch is as fast"
)
TOKENS = (9, 14, 20)
"""Answers of different lengths, so that batches of three, two and one are decoded."""


def _answers(engine, name):
    chunks = [text_chunk(ids(seed, n)) for seed, n in ((1, 40), (2, 25))]
    prompts = [prompt_of(ids(seed, 6), *chunks[: 1 + seed % 2], ids(seed + 9, 5)) for seed in range(3)]
    requests = [request_of(p, "mpic-4", n) for p, n in zip(prompts, TOKENS, strict=True)]
    return [stream.result().token_ids for stream in submit_together(engine, requests)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2_vl"])
def test_greedy_answers_are_the_same_with_and_without(name, make_engine):
    # of its own: the shared one may have hooks that other tests have left, and is not fused then
    loaded = make_family(name).loaded
    usual = make_engine(name, loaded)
    expected = _answers(usual, name)
    use_fused_step(loaded)
    assert loaded.fused is not None, loaded.info.details[NOTE]
    engine = make_engine(name, loaded)
    assert _answers(engine, name) == expected
    counters = engine.stats()["counters"]
    assert counters["fused_steps"] >= max(TOKENS) - 4 and engine.runner.tables.advanced > 0
    loaded.fused = None
    assert "fused_steps" not in usual.stats()["counters"]
