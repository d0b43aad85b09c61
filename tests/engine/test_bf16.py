"""The engine in bf16, whose logits are compared with those of the same weights in fp32."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
from unit_kit import use_for_blocks

from mpic.kernels import linear_widened
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import self_test
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    compile_all,
    first_token,
    prompt_of,
    random_model,
    request_of,
    text_chunk,
)
from mpic_lab.gpu.models import native_engine

SHAPE = DecoderShape(
    layers=3, hidden=256, heads=4, kv_heads=2, intermediate=512, vocabulary=500, context=4096
)
CPU = torch.device("cpu")


def _made(dtype=torch.bfloat16):
    model = random_model(SHAPE, BenchDevice(CPU, torch.bfloat16), gain=3.0)
    return LoadedModel(model.to(dtype), None, str(dtype))


@pytest.fixture(scope="module")
def models():
    """The same weights in bf16 and, converted, in fp32; a gain makes attention sharp."""
    found = _made(), _made(torch.float32)
    for loaded in found:
        self_test(loaded)
    return found


def _logits(loaded, attention, policy):
    """Return the logits of the first token behind two chunks and 300 tokens of text."""
    loaded.choose_attention(attention)
    ids, seen = Ids(SHAPE.vocabulary), []
    chunks = [text_chunk(ids.fresh(150)), text_chunk(ids.fresh(90))]
    prompt = prompt_of(ids.fresh(20), chunks[0], ids.fresh(200), chunks[1], ids.fresh(80))
    with native_engine(loaded, 2048) as engine:
        compile_all(engine, chunks)
        commit = engine._commit

        def see(slices, logits, barrier):
            seen.append(logits)
            return commit(slices, logits, barrier)

        with mock.patch.object(engine, "_commit", see):
            first_token(engine, request_of(prompt, policy, 1))
    loaded.choose_attention("auto")
    return seen[-1][0].float()


@pytest.mark.parametrize("policy", ["full", "mpic-16"])
@pytest.mark.parametrize("attention", ["auto", "cpu-flash"])
def test_logits_in_bf16_are_those_of_the_same_weights_in_fp32_within_its_rounding(models, attention, policy):
    """Logits that come from bf16 have 8 significant bits; three layers add up a few roundings of them."""
    bf16, fp32 = models
    wanted = _logits(fp32, "auto", policy)
    error = (_logits(bf16, attention, policy) - wanted).abs()
    assert error.max() < 0.06 * wanted.abs().max() and error.mean() < 0.012 * wanted.abs().max()


@pytest.mark.parametrize("policy", ["full", "mpic-16"])
def test_products_of_widened_weights_are_no_further_from_fp32_than_torchs(models, policy, monkeypatch):
    _, fp32 = models
    taken, multiply = [], linear_widened.WidenedKernel._multiply
    monkeypatch.setattr(
        linear_widened.WidenedKernel, "_multiply", lambda *args: (taken.append(None), multiply(*args))
    )
    wanted, errors = _logits(fp32, "auto", policy), []
    for blocks in (linear_widened.WidenedKernel(17), None):
        use_for_blocks(monkeypatch, blocks)
        errors.append((_logits(_made(), "auto", policy) - wanted).square().mean())
    assert taken and errors[0] < 1.6 * errors[1], "both differ by roundings alone"


@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
def test_blocks_are_torchs_when_the_kernels_are_switched_off(models):
    bf16, fp32 = models
    assert fp32.info.details["attention_blocks"] == "cpu-block-spans"
    fp32.choose_attention("cpu-flash")
    assert fp32.info.details["attention_blocks"] == "cpu-flash"
    fp32.choose_attention("auto")
    bf16.choose_attention("cpu-flash")
    assert bf16.info.details["attention_blocks"] == "cpu-flash"
    bf16.choose_attention("reference")
    assert bf16.info.details["attention_blocks"] == "reference"
    bf16.choose_attention("auto")
