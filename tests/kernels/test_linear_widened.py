"""Products over weights that are widened a panel at a time, and when they are chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads_kit import started

from mpic.kernels import c_kernel, instructions, linear, linear_tiles, linear_widened, products
from mpic.kernels.linear import Product
from mpic.kernels.linear_widened import WidenedKernel

BF16 = torch.bfloat16
KERNEL = WidenedKernel(17)


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_exact(out, x, by):
    """Fail if a number is wrong by more than the rounding of a sum in fp32 and one rounding to bf16."""
    x, weight = x.double(), by.weight.double()
    wanted = x @ weight.T + (0 if by.bias is None else by.bias.double())
    terms = x.abs() @ weight.abs().T + 1
    assert out.shape == wanted.shape
    assert ((out.double() - wanted).abs() <= 2e-6 * terms + 2.0**-8 * wanted.abs()).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 90),
    inputs=st.integers(1, 80),
    has_bias=st.booleans(),
    panel=st.integers(1, 4000),
    block=st.integers(1, 80),
)
def test_products_are_exact_but_for_one_rounding_however_they_are_cut(
    rows, outputs, inputs, has_bias, panel, block
):
    x, by = some(rows, inputs), Product(some(outputs, inputs, seed=1), some(outputs) if has_bias else None)
    out = torch.empty(rows, outputs, dtype=BF16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_widened, "PANEL_BYTES", panel)
        patch.setattr(linear_widened, "PANEL_OUTPUTS", 1)
        patch.setattr(linear_widened, "ROWS", block)
        KERNEL(x, [by], [out])
    assert_exact(out, x, by)


def test_several_weights_of_other_sizes_are_multiplied_with_rows_that_lie_apart():
    x = some(2, 20, 48)[..., :40]
    products_ = [Product(some(size, 40, seed=size), some(size)) for size in (30, 700, 1)]
    outs = [torch.empty(2, 20, len(by.weight), dtype=BF16) for by in products_]
    KERNEL(x, products_, outs)
    for by, out in zip(products_, outs, strict=True):
        assert_exact(out, x, by)


def test_no_rows_are_multiplied_to_nothing():
    out = torch.empty(0, 5, dtype=BF16)
    KERNEL(some(0, 8), [Product(some(5, 8))], [out])


def test_threads_that_multiply_at_once_do_not_share_their_memory():
    by, wrong = [Product(some(300, 200, seed=seed)) for seed in (1, 2)], []

    def multiply(which):
        x = some(100, 200, seed=which)
        wanted = None
        for _ in range(30):
            out = torch.empty(100, 300, dtype=BF16)
            KERNEL(x, [by[which]], [out])
            wanted = out if wanted is None else wanted
            if not torch.equal(out, wanted):
                wrong.append(which)

    threads = [started(lambda which=which: multiply(which)) for which in (0, 1)]
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_of_a_call_in_inference_mode_serves_later_ones_outside_of_it():
    """Models are tested in that mode when they are loaded, and packets are trained outside of it."""
    kernel, x, by = WidenedKernel(17), some(20, 40), Product(some(30, 40, seed=1))
    out = torch.empty(20, 30, dtype=BF16)
    with torch.inference_mode():
        kernel(x, [by], [torch.empty_like(out)])
    with torch.no_grad():
        kernel(x, [by], [out])
    assert_exact(out, x, by)
    assert len(kernel._rooms) == 1


def test_what_it_cannot_read_is_refused():
    out = torch.empty(4, 5, dtype=BF16)
    with pytest.raises(ValueError, match="cpu-linear-widened cannot multiply"):
        KERNEL(some(4, 8).float(), [Product(some(5, 8))], [out])
    with pytest.raises(ValueError, match="cpu-linear-widened cannot multiply"):
        KERNEL(some(4, 8), [Product(some(8, 5).T)], [out])


# ---- where it is used


@pytest.fixture
def processor(monkeypatch):
    """Return what makes a processor of another kind and gives the kernels that are chosen for it."""

    def chosen(*, pairs: str = "", has_unit: bool = False, withheld: str = ""):
        few = linear.LinearKernel(None, BF16, 16)
        monkeypatch.setattr(linear, "load", lambda dtype: few)
        monkeypatch.setattr(
            linear_tiles,
            "load",
            lambda: linear_tiles.LinearTilesKernel.__new__(linear_tiles.LinearTilesKernel),
        )
        monkeypatch.setattr(instructions, "pairs", lambda: bool(pairs))
        monkeypatch.setattr(instructions, "_is_amd", lambda: pairs == "fast")
        monkeypatch.setattr(instructions, "unit", lambda: has_unit)
        monkeypatch.setattr(c_kernel, "why_no_unit", lambda: withheld)
        return products.load.__wrapped__

    return chosen


@pytest.mark.parametrize(
    "kind, name, least",
    [
        ({"pairs": "fast"}, None, 0),
        ({"pairs": "slow"}, "cpu-linear-widened", 80),
        ({}, "cpu-linear-widened", 17),
        ({"pairs": "slow", "has_unit": True}, "cpu-linear-tiles", linear_tiles.LEAST_ROWS),
        ({"pairs": "slow", "has_unit": True, "withheld": "it is kept back"}, "cpu-linear-widened", 80),
    ],
    ids=["fast pairs", "slow pairs", "no pairs", "a matrix unit", "a unit that is withheld"],
)
def test_blocks_of_rows_in_bf16_have_what_is_fastest_on_a_processor(processor, kind, name, least):
    found = processor(**kind)(BF16)
    assert (found.blocks and found.blocks.name) == name
    assert found.blocks_note == kind.get("withheld", "")
    if name is not None:
        assert found.blocks.least_rows == least
        assert not found.takes(max(least - 1, 17), 64) or least <= 17
        assert found.takes(max(least, 17), 64)


def test_fp32_is_torchs_on_every_processor(processor):
    assert processor()(torch.float32).blocks is None
