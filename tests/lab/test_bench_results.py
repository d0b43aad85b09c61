"""Results of benches say what they were measured on."""

from __future__ import annotations

import pytest
import torch

from mpic.kernels import instructions
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.results import machine

CPU = BenchDevice(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    "tiles, pairs, said",
    [(True, True, "(AVX512, AMX)"), (False, True, "(AVX512, AVX512 BF16)"), (False, False, "(AVX512)")],
)
def test_a_machine_says_what_it_multiplies_bfloat16_with(monkeypatch, tiles, pairs, said):
    monkeypatch.setattr(instructions, "level", lambda: "AVX512")
    monkeypatch.setattr(instructions, "unit", lambda: tiles)
    monkeypatch.setattr(instructions, "pairs", lambda: pairs)
    assert said in machine(CPU) and "bfloat16 on cpu" in machine(CPU)
