"""The kernels compile to machine code for real GPUs, without such a GPU, which the interpreter cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALLEST_SHARED, LARGE_SHARED = 99 * 1024, 163 * 1024
"""Bytes of shared memory a program may have on the smallest GPU since sm_80 (sm_86, sm_89), and on sm_80."""
SPILLED = 160
"""Bytes of stack a thread may use; Triton 3.7 needs 152 for a tile of 128 x 64 with heads of 128 on sm_80."""


def test_kernels_compile_for_gpus_that_are_not_there(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, Path(__file__).with_name("compile_kernels.py"), "80", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {(one["kernel"], one["arch"]) for one in found}
    assert kernels == {("attend", 80), ("attend", 90), ("merge", 90), ("scatter", 90)}
    for one in found:
        assert one["shared"] <= (LARGE_SHARED if one.get("large") else SMALLEST_SHARED), one
        assert 0 <= one["stack"] <= SPILLED, f"registers spill: {one}"
        if one["kernel"] == "attend" and one["dtype"] != "fp32":
            assert one["tensor_cores"] > 0, one
            assert one["wide_copies"] > 0, f"keys are not read 16 bytes at a time: {one}"
