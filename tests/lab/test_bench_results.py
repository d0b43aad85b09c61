"""Results of benches say what they were measured on."""

from __future__ import annotations

import pytest
import torch

from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.results import machine

CPU = BenchDevice(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    "tiles, pairs, said",
    [(True, True, "(AVX512, AMX)"), (False, True, "(AVX512, AVX512 BF16)"), (False, False, "(AVX512)")],
)
def test_a_machine_says_what_it_multiplies_bfloat16_with(monkeypatch, tiles, pairs, said):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: pairs)
    assert said in machine(CPU) and "bfloat16 on cpu" in machine(CPU)
