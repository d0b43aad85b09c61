"""Processors that a machine can stand for: those that have no more of the instructions that kernels know.

``MPIC_TEST_PROCESSOR=avx2 make test`` runs the suite as on such a processor: torch, oneDNN, MKL and our kernels
keep to it. In any run the tests of a kernel go through every processor for which it is built otherwise
(``compiled_for``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

VARIABLE = "MPIC_TEST_PROCESSOR"


class Processor(NamedTuple):
    """The name is what readers know it by; ``aten``, ``onednn`` and ``mkl`` are the values of the variables that hold
    libraries to it."""

    name: str
    aten: str
    onednn: str
    mkl: str
    level: str
    pairs: bool = False
    unit: bool = False


PROCESSORS = {
    "avx2": Processor("AVX2", "avx2", "AVX2", "AVX2", "AVX2"),
    "avx512": Processor("AVX-512", "avx512", "AVX512_CORE", "AVX512", "AVX512"),
    "avx512_bf16": Processor("AVX-512 BF16", "avx512", "AVX512_CORE_BF16", "AVX512", "AVX512", True),
    "amx": Processor("a matrix unit (AMX)", "avx512", "AVX512_CORE_AMX", "AVX512", "AVX512", True, True),
}


def hold_libraries() -> None:
    """Hold torch and its libraries, in this process and in those that it starts, to the processor that ``VARIABLE``
    names. To be called before torch is imported.

    Raises:
        pytest.UsageError: there is none of this name.
    """
    if not (name := os.environ.get(VARIABLE)):
        return
    if name not in PROCESSORS:
        raise pytest.UsageError(f"{VARIABLE} is one of {', '.join(PROCESSORS)}, not {name!r}")
    held = PROCESSORS[name]
    os.environ |= {
        "ATEN_CPU_CAPABILITY": held.aten,
        "ONEDNN_MAX_CPU_ISA": held.onednn,
        "MKL_ENABLE_INSTRUCTIONS": held.mkl,
    }


def refuse_more_than_there_is() -> None:
    """Raise pytest.UsageError if this machine cannot stand for the processor that ``VARIABLE`` names."""
    name = os.environ.get(VARIABLE)
    if name and (reason := why_not(name)):
        raise pytest.UsageError(f"{VARIABLE}={name}: {reason}")


def why_not(name: str) -> str:
    """Return why this process cannot run what a processor does; empty if it can."""
    from mpic.kernels import instructions

    wanted = PROCESSORS[name]
    levels = ["AVX512"] if wanted.level == "AVX512" else ["AVX512", "AVX2"]
    has = instructions.level() in levels
    has = has and instructions.pairs() >= wanted.pairs and instructions.unit() >= wanted.unit
    return "" if has else f"the processor has no {wanted.name.removeprefix('a ')}"


def needs(name: str) -> pytest.MarkDecorator:
    """Return a mark for what runs on no lesser processor; the end of a run counts what it left out."""
    return pytest.mark.skipif(bool(why_not(name)), reason=why_not(name))


def compiled_for(*names: str) -> Callable[..., None]:
    """Return a fixture for a module of tests, which run once on each of some processors: kernels are chosen and built
    as there. Where torch knows neither AVX2 nor AVX-512 they run once, as on this processor."""

    from mpic.kernels import instructions

    known = instructions.level() in ("AVX2", "AVX512")
    params = [pytest.param(name, marks=needs(name)) for name in names] if known else ["this"]

    @pytest.fixture(scope="module", autouse=True, params=params)
    def processor(request: pytest.FixtureRequest) -> Iterator[None]:
        if request.param not in PROCESSORS:
            yield
            return
        held = PROCESSORS[request.param]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(instructions, "level", lambda: held.level)
            patch.setattr(instructions, "pairs", lambda: held.pairs)
            patch.setattr(instructions, "unit", lambda: held.unit)
            forget_kernels()
            yield
        forget_kernels()

    return processor


def forget_kernels() -> None:
    """Has kernels be chosen and loaded anew."""
    from mpic.kernels import (
        block_spans,
        block_tiles,
        decoder,
        linear,
        linear_tiles,
        products,
        stream,
    )
    from mpic.model import own_modules

    loads = [
        module.load for module in (block_spans, block_tiles, decoder, linear, linear_tiles, products, stream)
    ]
    for load in (*loads, own_modules._kernels):
        load.cache_clear()
