"""Kernels for a processor's matrix unit (AMX): the tests run each on the unit and emulated in plain C."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import pytest
import torch
from processors import needs
from spans_kit import needs_compiler

from mpic.kernels import block_tiles, c_kernel, decoder, instructions, linear, linear_tiles, products
from mpic.kernels.products import BlockProducts, Products
from mpic.model import own_modules

needs_unit = needs("amx")
on_both = pytest.mark.parametrize(
    "emulated",
    [
        pytest.param(True, id="emulated", marks=needs_compiler),
        pytest.param(False, id="unit", marks=[needs_compiler, needs_unit]),
    ],
)
STATE = """
#include <immintrin.h>
#include <stdint.h>

int configured(int threads) {
  int found = 0;
#pragma omp parallel num_threads(threads) reduction(+ : found)
  {
    uint8_t how[64] __attribute__((aligned(64)));
    _tile_storeconfig(how);
    found += how[0] != 0;
  }
  return found;
}
"""
"""Counts the threads in which the matrix unit has a configuration, and so keeps registers that the system must save."""


def configured_threads(folder: Path, count: int) -> int:
    """Return in how many of torch's threads the unit has a configuration.

    Args:
        folder: for a file that is compiled.
        count: threads.
    """
    file = folder / "state.c"
    file.write_text(STATE)
    return c_kernel.build(file, "state", ["-mamx-tile"]).configured(count)


def has_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has kernels be chosen as on a processor with a matrix unit, which is emulated."""
    monkeypatch.setattr(instructions, "unit", lambda: True)
    monkeypatch.setattr(c_kernel, "why_no_unit", lambda: "")
    for module in (linear_tiles, block_tiles):
        monkeypatch.setattr(module, "load", functools.partial(module.load, emulated=True))


def use_emulated_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has models that are loaded from now on in bf16 multiply blocks of rows on a unit that is emulated."""
    use_for_blocks(monkeypatch, linear_tiles.load(emulated=True))


def use_for_blocks(monkeypatch: pytest.MonkeyPatch, kernel: BlockProducts | None) -> None:
    """Has models that are loaded from now on in bf16 multiply blocks of rows with a kernel, or with torch, whatever
    the processor would have."""
    dtype = torch.bfloat16
    found = Products(linear.load(dtype), kernel)
    own = products.load
    monkeypatch.setattr(products, "load", lambda asked: found if asked is dtype else own(asked))
    for module, cached in ((decoder, "load"), (own_modules, "_kernels")):
        monkeypatch.setattr(module, cached, inspect.unwrap(getattr(module, cached)))
