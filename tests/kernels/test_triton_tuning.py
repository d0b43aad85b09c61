"""Tile sizes, and what imports without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mpic.kernels.triton.tuning import defaults


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_gpu_with_more_shared_memory_reads_three_blocks_ahead(dim):
    large, small = defaults(torch.bfloat16, dim, 228 << 10), defaults(torch.bfloat16, dim, 100 << 10)
    assert large.block_stages == large.single_stages == 3
    assert small.block_stages == small.single_stages == (3 if dim == 64 else 2)


def test_everything_else_imports_without_triton():
    """macOS has none. Asking for it by name is then refused by name."""
    program = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
import mpic.server.app, mpic.engine.native.engine, mpic.cli, mpic_lab.bench.cli
import mpic.kernels.triton.worklist, mpic.kernels.triton.tuning
import torch, transformers
from mpic.errors import ModelRefused
from mpic.model.loaded import LoadedModel
config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2)
model = LoadedModel(transformers.LlamaForCausalLM(config))
try:
    model.choose_attention("triton")
except ModelRefused as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "needs the package triton" in done.stdout
