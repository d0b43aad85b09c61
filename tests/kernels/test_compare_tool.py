"""``tools/compare_kernels.py`` times two trees' kernels in turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/compare_kernels.py"


@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
def test_a_tree_is_compared_with_itself(tmp_path):
    out = tmp_path / "out.json"
    options = ["--rounds", "1", "--cases", "1 row", "--json", str(out)]
    ran = subprocess.run([sys.executable, TOOL, ROOT, *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4 and all(row["case"] in ran.stdout for row in rows)
    assert all(row["before_us"] > 0 and row["ratio"] > 0 for row in rows)
