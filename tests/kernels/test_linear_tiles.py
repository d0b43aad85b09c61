"""Products of blocks of rows on a matrix unit, against double precision over the same numbers. The same C file with the
unit's work in plain C is tested wherever there is a compiler."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spans_kit import threads
from unit_kit import configured_threads, needs_unit, on_both

from mpic.kernels import c_kernel, instructions, linear, linear_tiles, products
from mpic.kernels.linear import Product

needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler"
)
RUN, ROWS = linear_tiles.RUN, linear_tiles.ROWS


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def multiplied(emulated: bool, x: torch.Tensor, *products: Product) -> list[torch.Tensor]:
    """Return the kernel's results, for which there is exactly the memory that they need."""
    outs, guards = [], []
    for by in products:
        size = x.shape[:-1].numel() * len(by.weight)
        memory = torch.full((size + 128,), 7.0).bfloat16()
        outs.append(memory[64 : 64 + size].view(*x.shape[:-1], len(by.weight)))
        guards += [memory[:64], memory[64 + size :]]
    linear_tiles.load(emulated=emulated)(x, products, outs)
    assert all(guard.eq(7).all() for guard in guards), "it wrote beside its results"
    return outs


def assert_exact(got: torch.Tensor, x: torch.Tensor, by: Product) -> None:
    """All sums are exact but for the order of fp32 additions and one rounding to bf16."""
    bias = 0 if by.bias is None else by.bias.double()
    wanted = x.double() @ by.weight.double().T + bias
    terms = x.double().abs() @ by.weight.double().abs().T + 1
    assert ((got.double() - wanted).abs() <= 2e-7 * terms + 2.0**-8 * wanted.abs()).all()


@st.composite
def cases(draw):
    rows, outputs, deep = draw(st.integers(1, 100)), draw(st.integers(1, 300)), draw(st.integers(1, 9))
    x, weight = some(rows, 32 * deep, seed=draw(st.integers(0, 99))), some(outputs, 32 * deep, seed=1)
    return x, Product(weight, some(outputs, seed=2) if draw(st.booleans()) else None)


@needs_compiler
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases())
def test_products_are_exact_but_for_one_rounding_where_the_unit_is_emulated(case):
    assert_exact(*multiplied(True, *case), *case)


@needs_compiler
@needs_unit
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_products_are_exact_but_for_one_rounding_on_the_unit(case):
    assert_exact(*multiplied(False, *case), *case)


@on_both
@pytest.mark.parametrize("inputs", [RUN, RUN + 32, 2 * RUN + 64])
@pytest.mark.parametrize("rows", [ROWS, ROWS + 1, 2 * ROWS + 33])
def test_sums_over_several_runs_of_inputs_and_several_blocks_of_rows(emulated, rows, inputs):
    x, by = some(rows, inputs), Product(some(70, inputs, seed=1), some(70, seed=2))
    if emulated:  # which is slow
        x = x[-40:]
    assert_exact(*multiplied(emulated, x, by), x, by)


@on_both
def test_several_products_of_the_same_rows_are_those_of_each(emulated):
    x = some(300, 96)
    by = [Product(some(n, 96, seed=n), some(n) if n % 2 else None) for n in (64, 1, 33, 300)]
    for one, got in zip(by, multiplied(emulated, x, *by), strict=True):
        assert torch.equal(got, *multiplied(emulated, x, one))
        assert_exact(got, x, one)


@on_both
def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it(emulated):
    x, by = some(290, RUN + 64), Product(some(200, RUN + 64, seed=1))
    x = x[:50] if emulated else x
    (whole,) = multiplied(emulated, x, by)
    for row in (0, 31, len(x) - 1):
        assert torch.equal(multiplied(emulated, x[row : row + 1], by)[0][0], whole[row])
    for count in {1, 2, 5} - {torch.get_num_threads()}:  # outputs are cut by it, too
        with threads(count):
            assert torch.equal(multiplied(emulated, x, by)[0], whole)


@on_both
def test_results_are_rounded_to_the_nearest_and_keep_infinity_and_nan(emulated):
    x, weight = torch.zeros(3, 32), torch.eye(32)
    x[0, :3] = torch.tensor([1.0, 3.0, -1.0])
    x[1, 0], x[2, 1] = torch.inf, torch.nan
    bias = torch.zeros(32)
    bias[:3] = torch.tensor([2.0**-8, 3 * 2.0**-8, -(2.0**-9)])  # halves go to the even neighbour
    (got,) = multiplied(emulated, x.bfloat16(), Product(weight.bfloat16(), bias.bfloat16()))
    assert torch.equal(got[0], (x[0].double() + bias.double()).bfloat16())
    assert got[1, 0].isnan() or got[1, 0].isinf()  # infinity times zero is no number, as in torch
    assert got[2].isnan().all()
    (big,) = multiplied(emulated, torch.full((1, 32), 3e38).bfloat16(), Product(torch.ones(2, 32).bfloat16()))
    assert big.isinf().all()


def at_the_end_of_a_page(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy behind whose last number there is a page that the process may not read."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages + mmap.PAGESIZE), dtype=torch.uint8)
    behind = ctypes.c_void_p(memory.data_ptr() + pages)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = memory[pages - size : pages].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@on_both
def test_what_lies_behind_the_last_row_and_output_is_not_read(emulated):
    """The process would die."""
    for rows, outputs, inputs in ((37, 41, 64), (33, 64, RUN + 32), (64, 65, 32)):
        x, by = some(rows, inputs), Product(some(outputs, inputs, seed=1), some(outputs, seed=2))
        guarded = Product(*map(at_the_end_of_a_page, by))
        assert_exact(*multiplied(emulated, at_the_end_of_a_page(x), guarded), x, by)


@on_both
def test_no_rows_and_dimensions_in_front_of_the_last_one(emulated):
    by = Product(some(5, 64, seed=1))
    assert multiplied(emulated, some(0, 64), by)[0].shape == (0, 5)
    x = some(2, 3, 64)
    assert torch.equal(multiplied(emulated, x, by)[0].view(6, 5), multiplied(emulated, x.view(6, 64), by)[0])
    apart = some(6, 128)[:, ::2]
    assert torch.equal(multiplied(emulated, apart, by)[0], multiplied(emulated, apart.contiguous(), by)[0])


@on_both
@pytest.mark.parametrize("wrong", ["dtype", "inputs", "bias", "weights lie in columns", "out", "no multiple"])
def test_what_it_cannot_read_is_refused_and_not_read(emulated, wrong):
    x, weight, bias, out = some(7, 64), some(4, 64), some(4), torch.zeros(7, 4).bfloat16()
    if wrong == "dtype":
        x = x.float()
    elif wrong == "inputs":
        x = x[:, :32]
    elif wrong == "bias":
        bias = bias[:3]
    elif wrong == "out":
        out = torch.zeros(4, 7).bfloat16().T
    elif wrong == "no multiple":
        x, weight = x[:, :63], weight[:, :63].contiguous()
    else:
        weight = some(64, 4).T
    with pytest.raises(ValueError, match="cpu-linear-tiles"):
        linear_tiles.load(emulated=emulated)(x, [Product(weight, bias)], [out])
    assert out.eq(0).all()


# ---- torch beside it, whose threads it runs in


@needs_compiler
@needs_unit
def test_torchs_products_on_the_unit_are_the_same_before_and_after_it():
    x, by = some(256, 256), Product(some(200, 256, seed=1))

    def theirs() -> torch.Tensor:
        return torch.nn.functional.linear(x, by.weight)

    with threads(2):
        wanted, ours = theirs(), multiplied(False, x, by)[0]
        assert torch.equal(theirs(), wanted)
        assert torch.equal(multiplied(False, x, by)[0], ours) and torch.equal(theirs(), wanted)


@needs_compiler
@needs_unit
def test_no_thread_keeps_the_units_configuration(tmp_path):
    with threads(2):
        multiplied(False, some(256, 256), Product(some(200, 256, seed=1)))
        assert configured_threads(tmp_path, 2) == 0


# ---- where it is used


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no kernel loaded before or after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loads = (linear_tiles.load, products.load)
    for load in loads:
        load.cache_clear()
    yield tmp_path
    for load in loads:
        load.cache_clear()


@needs_compiler
def test_bf16_has_it_where_there_is_a_unit_and_other_dtypes_do_not(fresh, monkeypatch):
    monkeypatch.setattr(instructions, "unit", lambda: False)
    with contextlib.suppress(linear.KernelUnavailable):
        found = products.load(torch.bfloat16)
        assert found.tiles is None and found.blocks_note == ""
    with pytest.raises(linear.KernelUnavailable, match="no matrix unit"):
        linear_tiles.load()
    monkeypatch.undo()
    with contextlib.suppress(linear.KernelUnavailable):
        assert products.load(torch.float32).blocks is None


@on_both
def test_blocks_of_rows_are_its_and_few_rows_or_odd_inputs_are_not(emulated):
    found = products.Products(linear.load(torch.bfloat16), linear_tiles.load(emulated=emulated))
    assert found.blocks.name == "cpu-linear-tiles"
    assert found.takes(1000, 64) and not found.takes(1000, 63) and found.takes(4, 63)
    by = Product(some(40, 64, seed=1), some(40, seed=2))
    for rows in (1, 4, 5, 100):
        x = some(rows, 64)
        wanted = found.few(x, *by) if rows < 5 else multiplied(emulated, x, by)[0]
        assert torch.equal(found(x, by), wanted)
    for rows in (5, 100):
        x, odd = some(rows, 63), Product(by.weight[:, :63].contiguous(), by.bias)
        assert_exact(found(x, odd), x, odd)


@needs_compiler
def test_without_the_systems_leave_blocks_are_multiplied_in_fp32_and_the_reason_is_told(fresh, monkeypatch):
    withheld = "the operating system does not let programs use the matrix unit"
    monkeypatch.setattr(instructions, "unit", lambda: True)
    monkeypatch.setattr(c_kernel, "why_no_unit", lambda: withheld)
    found = products.load(torch.bfloat16)
    assert found.blocks.name == "cpu-linear-widened" and found.blocks_note == withheld
    x, by = some(100, 64), Product(some(40, 64, seed=1))
    assert_exact(found(x, by), x, by)


BROKEN = {
    "the second run": ("from ? kept : 0", "0"),
    "the bias": ("p->bias && i < left", "0"),
    "rounding": ("0x7fff + (b >> 16 & 1)", "0"),
    "the rest of outputs": ("i < left; i++) memcpy(copied", "i < left - 1; i++) memcpy(copied"),
    "the second half of rows": ("tile_load(7, x + 2 * d + 1)", "tile_load(7, x + 2 * d)"),
    "the order of pairs": ("sum[i / 8 * 2 + half]", "sum[i / 8 + 2 * half]"),
}


@needs_compiler
@pytest.mark.parametrize("what", BROKEN)
def test_a_kernel_that_computes_something_else_is_refused(what, fresh, monkeypatch):
    before, after = BROKEN[what]
    text = linear_tiles.SOURCE.read_text()
    assert before in text
    wrong = fresh / "linear_tiles.c"
    wrong.write_text(text.replace(before, after))
    (fresh / "tiles.h").write_text(linear_tiles.SOURCE.with_name("tiles.h").read_text())
    monkeypatch.setattr(linear_tiles, "SOURCE", wrong)
    with pytest.raises(c_kernel.KernelUnavailable, match="wrong by"):
        linear_tiles.load(emulated=True)
