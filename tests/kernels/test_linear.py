"""The kernel for products of few rows, against double precision over the same numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import compiled_for

from mpic.kernels import c_kernel, instructions, linear

DTYPES = [torch.float32, torch.bfloat16]
processor = compiled_for("avx2", "avx512", "avx512_bf16")
COMPILER = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(
    not COMPILER or instructions.level() not in ("AVX2", "AVX512"),
    reason="no C compiler, or a processor on which torch is as fast",
)


@st.composite
def cases(draw):
    rows, outputs, inputs = (draw(st.integers(1, most)) for most in (20, 70, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x, weight, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((rows, inputs + 3), (outputs, inputs), (outputs,))
    )
    return x[:, :inputs], weight, bias if draw(st.booleans()) else None


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_products_are_exact_but_for_one_rounding(dtype, case):
    x, weight, bias = (None if part is None else part.to(dtype) for part in case)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # what rounding errors of a sum are in proportion to
    terms = x.double().abs() @ weight.double().abs().T + 1
    error = (linear.load(dtype)(x, weight, bias).double() - wanted).abs()
    assert (error <= 2e-7 * terms + (0 if dtype == torch.float32 else 2.0**-8 * wanted.abs())).all()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((7, 300), (400, 300)))
    kernel, threads = linear.load(dtype), torch.get_num_threads()
    whole = kernel(x, weight, None)
    for row in range(len(x)):
        assert torch.equal(kernel(x[row], weight, None), whole[row])
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(kernel(x, weight, None), whole)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_bf16_results_are_rounded_to_the_nearest_and_keep_infinity_and_nan():
    weight = torch.eye(4).bfloat16()
    x = torch.tensor([[1.0, float("inf"), 0.0, 2.0], [float("nan"), 1.0, -float("inf"), -0.5]]).bfloat16()
    out = linear.load(torch.bfloat16)(
        x[:, 3:], weight[:, 3:].contiguous(), torch.tensor([1, 2**-9, 3 * 2**-9, 0]).bfloat16()
    )
    exact = x[:, 3:].double() @ weight[:, 3:].double().T + torch.tensor([1, 2**-9, 3 * 2**-9, 0]).double()
    assert torch.equal(out, exact.bfloat16())
    big = torch.tensor([[float("inf"), float("nan")]]).bfloat16()
    got = linear.load(torch.bfloat16)(big, torch.eye(2).bfloat16(), None)
    assert got.isnan().all()  # infinity times zero is no number, as in torch
    assert linear.load(torch.bfloat16)(big[:, :1], torch.ones(1, 1).bfloat16(), None).isinf().all()


@needs_compiler
@pytest.mark.parametrize("wrong", ["dtype", "inputs", "bias", "weights lie in columns"])
def test_what_it_cannot_read_is_refused_and_not_read(wrong):
    x, weight, bias = torch.ones(2, 8), torch.ones(4, 8), torch.ones(4)
    if wrong == "dtype":
        x = x.double()
    elif wrong == "inputs":
        x = x[:, :7]
    elif wrong == "bias":
        bias = bias[:3]
    else:
        weight = torch.ones(8, 4).T
    with pytest.raises(ValueError, match="cpu-linear cannot multiply"):
        linear.load(torch.float32)(x, weight, bias)


@needs_compiler
def test_shapes_in_front_of_the_last_one_stay():
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    torch.testing.assert_close(linear.load(torch.float32)(x, weight, None), x @ weight.T)
    assert linear.load(torch.float32)(x[:0], weight, None).shape == (0, 3, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_processors_that_were_not_compared_keep_torch(dtype, monkeypatch):
    monkeypatch.setattr(instructions, "pairs", lambda: False)
    monkeypatch.setattr(instructions, "level", lambda: "DEFAULT")
    linear.load.cache_clear()
    try:
        with pytest.raises(linear.KernelUnavailable, match=r"torch is as fast.*DEFAULT"):
            linear.load(dtype)
    finally:
        linear.load.cache_clear()


def test_other_dtypes_have_no_kernel():
    with pytest.raises(linear.KernelUnavailable, match="not float16"):
        linear.load(torch.float16)


@needs_compiler
def test_a_damaged_file_in_the_cache_folder_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    built = c_kernel._built(tmp_path, COMPILER, linear.SOURCE, "fp32", ["-DBFLOAT16=0"])
    built.write_bytes(bytes(built.stat().st_size))
    assert c_kernel.build(linear.SOURCE, "fp32", ["-DBFLOAT16=0"]).multiply
    assert any(built.read_bytes())


@needs_compiler
def test_a_file_that_ends_too_early_is_not_loaded(tmp_path, monkeypatch):
    """A copy of the folder may have been interrupted. Loading such a file ends the process with a bus error, which
    nothing can catch, so here another process loads it."""
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    built = c_kernel._built(tmp_path, COMPILER, linear.SOURCE, "fp32", ["-DBFLOAT16=0"])
    os.truncate(built, built.stat().st_size // 2)
    script = (
        "import pathlib; from mpic.kernels import c_kernel, instructions, linear; "
        f"c_kernel._cache_folder = lambda: pathlib.Path({str(tmp_path)!r}); "
        "assert c_kernel.build(linear.SOURCE, 'fp32', ['-DBFLOAT16=0']).multiply"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@needs_compiler
def test_a_file_that_others_could_write_is_not_loaded(tmp_path, monkeypatch):
    """It may have been put there before the folder was closed to others."""
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    built = c_kernel._built(tmp_path, COMPILER, linear.SOURCE, "fp32", ["-DBFLOAT16=0"])
    built.chmod(0o666)
    planted = built.stat().st_ino
    assert c_kernel.build(linear.SOURCE, "fp32", ["-DBFLOAT16=0"]).multiply
    assert built.stat().st_ino != planted and not built.stat().st_mode & 0o022


@needs_compiler
def test_a_compiler_that_cannot_build_leaves_it_to_the_next(tmp_path, monkeypatch):
    right, wrong = COMPILER, shutil.which("false")
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(c_kernel.shutil, "which", {"gcc": wrong, "cc": right}.get)
    assert c_kernel.build(linear.SOURCE, "fp32", ["-DBFLOAT16=0"]).multiply


@needs_compiler
def test_nothing_is_run_from_a_folder_that_others_can_write(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: folder)
    assert c_kernel.build(linear.SOURCE, "fp32", ["-DBFLOAT16=0"]).multiply
    assert not folder.stat().st_mode & 0o077
    folder.chmod(0o777)
    with pytest.raises(c_kernel.KernelUnavailable, match="others can write there"):
        c_kernel.build(linear.SOURCE, "fp32", ["-DBFLOAT16=0"])


@needs_compiler
def test_a_kernel_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    wrong = tmp_path / "linear.c"
    wrong.write_text(linear.SOURCE.read_text().replace("if (i < inputs)", "if (0)"))
    monkeypatch.setattr(linear, "SOURCE", wrong)
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    linear.load.cache_clear()
    try:
        with pytest.raises(linear.KernelUnavailable, match="wrong by"):
            linear.load(torch.float32)
    finally:
        linear.load.cache_clear()
