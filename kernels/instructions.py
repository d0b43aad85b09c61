"""The instructions of the processor that kernels may use. No other module asks the processor.

Two variables hold torch to fewer than the processor has: ``ATEN_CPU_CAPABILITY`` its own operations and
``ONEDNN_MAX_CPU_ISA`` its products. MPIC's kernels keep to the same limits, so that a processor can stand for a lesser
one.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

_WITHOUT_PAIRS = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"}
_WITHOUT_UNIT = _WITHOUT_PAIRS | {"avx512_core_bf16", "avx512_core_fp16", "avx10_1_512"}


def level() -> str:
    """Return what torch's own operations are compiled for: "AVX512", "AVX2", or another processor's word."""
    return torch.backends.cpu.get_cpu_capability().split("_")[0]


def pairs() -> bool:
    """Return whether pairs of bf16 numbers can be multiplied at once (AVX-512 BF16)."""
    return level() == "AVX512" and torch.cpu._is_avx512_bf16_supported() and _limit() not in _WITHOUT_PAIRS


def fast_pairs() -> bool:
    """Return whether pairs of bf16 numbers are multiplied faster than as many fp32 numbers. On AMD's processors since
    Zen 4 the instruction takes, by published tables, as long as one for fp32 numbers; on Intel's, whose matrix unit a
    virtual machine may hide, 1.6 to 1.8 times as long."""
    return pairs() and _is_amd()


def unit() -> bool:
    """Return whether there is a matrix unit for bf16 (AMX)."""
    return level() == "AVX512" and torch.cpu._is_amx_tile_supported() and _limit() not in _WITHOUT_UNIT


@functools.cache
def _is_amd() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "AuthenticAMD" in info.read_text()


def _limit() -> str:
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "").lower()
