"""Linear layers: rows go through the kernels that are made for their number, everything else through torch."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from families import make_model
from torch import nn
from unit_kit import use_emulated_unit

from mpic.kernels import c_kernel, linear, linear_tiles, products
from mpic.model import own_modules
from mpic.model.loaded import LoadedModel
from mpic.model.own_modules import KernelLinear
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import DecoderShape, random_model

SHAPE = DecoderShape(layers=1, hidden=64, heads=2, intermediate=96, vocabulary=100, context=512)
CPU = torch.device("cpu")
try:
    linear.load(torch.float32)
    AVAILABLE = True
except linear.KernelUnavailable:
    AVAILABLE = False
needs_kernel = pytest.mark.skipif(
    not AVAILABLE, reason="no C compiler, or a processor on which torch is as fast"
)


@pytest.fixture
def loaded():
    return LoadedModel(random_model(SHAPE, BenchDevice(CPU, torch.float32)), None, "tiny")


@pytest.fixture
def emulated_unit(monkeypatch):
    use_emulated_unit(monkeypatch)


def _tensors(output):
    found = output if isinstance(output, torch.Tensor) else output.pooler_output
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _layers(loaded):
    return [m for m in loaded.model.modules() if isinstance(m, nn.Linear)]


@needs_kernel
def test_all_linear_layers_of_the_decoder_and_the_head_have_it(loaded):
    assert {type(m) for m in _layers(loaded)} == {KernelLinear} and len(_layers(loaded)) == 8
    details = loaded.info.details
    assert details["few_rows_note"] == details["linear_blocks_note"] == ""
    assert (details["linear_rows"], details["linear_blocks"]) == ("cpu-linear", "torch")


@needs_kernel
def test_few_rows_are_the_kernels_and_many_are_torchs(loaded, monkeypatch):
    layer = _layers(loaded)[0]
    kernel, taken = linear.load(torch.float32), []
    monkeypatch.setattr(
        linear.LinearKernel, "__call__", lambda self, x, *rest: (taken.append(len(x)), x @ layer.weight.T)[1]
    )
    for rows in (1, kernel.most_rows, kernel.most_rows + 1, kernel.most_rows + 100):
        layer(torch.randn(rows, 64))
    assert taken == [1, kernel.most_rows]


@needs_kernel
def test_what_is_differentiated_goes_through_torch(loaded):
    layer = _layers(loaded)[0]
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 64))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ layer.weight.T)


@needs_kernel
def test_a_model_that_is_moved_or_converted_later_multiplies_with_torch(loaded):
    layer = _layers(loaded)[0]
    assert layer.to("meta")(torch.ones(1, 64, device="meta")).shape == (1, layer.out_features)
    half = copy.deepcopy(_layers(loaded)[1]).half()
    torch.testing.assert_close(half(torch.ones(1, 64).half()), half.weight.sum(1)[None], atol=1e-2, rtol=1e-2)


@needs_kernel
def test_weights_that_come_to_lie_otherwise_or_have_no_kernel_multiply_with_torch(loaded, monkeypatch):
    layer = copy.deepcopy(_layers(loaded)[0])
    layer.weight.data = layer.weight.data.T.contiguous().T  # as wrappers of quantised checkpoints set it
    torch.testing.assert_close(layer(torch.ones(1, 64)), layer.weight.sum(1)[None])
    unavailable = linear.KernelUnavailable("no kernel for this dtype on this processor")
    monkeypatch.setattr(products, "load", Mock(side_effect=unavailable))
    own_modules._kernels.cache_clear()
    try:
        layer = _layers(loaded)[1]
        torch.testing.assert_close(layer(torch.ones(1, 64)), layer.weight.sum(1)[None])
    finally:
        own_modules._kernels.cache_clear()


@needs_kernel
def test_a_copy_of_the_model_still_works(loaded):
    layer = copy.deepcopy(_layers(loaded)[0])
    torch.testing.assert_close(layer(torch.ones(1, 64)), layer.weight.sum(1)[None])


def test_without_a_compiler_layers_stay_torchs_and_the_reason_is_told(monkeypatch):
    loads = (linear.load, products.load)
    for load in loads:
        load.cache_clear()
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    try:
        loaded = LoadedModel(random_model(SHAPE, BenchDevice(CPU, torch.float32)), None, "tiny")
    finally:
        for load in loads:
            load.cache_clear()
    assert {type(m) for m in _layers(loaded)} == {nn.Linear}
    assert "no C compiler" in loaded.info.details["few_rows_note"]


def test_other_devices_keep_their_own():
    model = random_model(SHAPE, BenchDevice(CPU, torch.float32)).to("meta")
    assert "not on meta" in own_modules.use_kernels(model, model.model).note
    assert not any(isinstance(m, KernelLinear) for m in model.modules())


@needs_kernel
def test_with_a_kernel_for_blocks_of_rows_all_plain_layers_have_it(emulated_unit):
    """Those of the encoder of images, too."""
    model = make_model("llava")[0].to(torch.bfloat16)
    wanted = model.get_image_features(pixel_values=torch.ones(1, 3, 32, 32).bfloat16())
    loaded = LoadedModel(model, None, "tiny")
    assert loaded.info.details["linear_blocks"] == "cpu-linear-tiles"
    inside = {type(m) for m in model.model.vision_tower.modules() if isinstance(m, nn.Linear)}
    assert inside == {KernelLinear}
    with torch.inference_mode():
        got = model.get_image_features(pixel_values=torch.ones(1, 3, 32, 32).bfloat16())
    for one, other in zip(_tensors(got), _tensors(wanted), strict=True):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


@needs_kernel
def test_blocks_of_rows_are_the_units_kernels(emulated_unit, monkeypatch):
    loaded = LoadedModel(random_model(SHAPE, BenchDevice(CPU, torch.bfloat16)), None, "tiny")
    layer, taken = _layers(loaded)[0], []
    own = linear_tiles.LinearTilesKernel.__call__
    monkeypatch.setattr(
        linear_tiles.LinearTilesKernel,
        "__call__",
        lambda kernel, x, *rest: (taken.append(len(x)), own(kernel, x, *rest)),
    )
    for rows in (1, 4, 5, 40):
        x = torch.randn(rows, 64).bfloat16()
        with torch.no_grad():
            wanted = nn.functional.linear(x, layer.weight)
            torch.testing.assert_close(layer(x), wanted, atol=1e-2, rtol=1e-2)
    assert taken == [5, 40]


def test_why_torch_multiplies_blocks_on_a_processor_with_a_unit_is_told(monkeypatch):
    found = Mock(blocks=None, blocks_note="not allowed")
    found.few.name = "cpu-linear"
    monkeypatch.setattr(products, "load", lambda dtype: found)
    model = random_model(SHAPE, BenchDevice(CPU, torch.bfloat16))
    details = own_modules.use_kernels(model, model.model).details
    assert (details["linear_blocks"], details["linear_blocks_note"]) == ("torch", "not allowed")
