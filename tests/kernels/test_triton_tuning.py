"""Tile sizes: the table in the repository, its defaults, and the reports about them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from mpic.kernels.triton.tuning import defaults, look_up, read_table

ENTRY = {"block": [64, 32, 4, 2], "single": [64, 4, 3], "measured": "2031-01-01, torch 9"}


def test_a_gpu_in_the_table_gets_its_sizes_and_others_are_called_untuned():
    table = {"schema": 2, "gpus": {"GPU A": {"bfloat16/128/4": ENTRY}}}
    found = look_up(table, "GPU A", torch.bfloat16, 128, 4)
    assert tuple(found) == (64, 32, 4, 2, 64, 4, 3, "tuned on GPU A")
    for gpu, dim, group in (("GPU B", 128, 4), ("GPU A", 64, 4), ("GPU A", 128, 7)):
        assert look_up(table, gpu, torch.bfloat16, dim, group) is None
    assert defaults(torch.float32, 256).source == "untuned"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_gpu_with_more_shared_memory_reads_three_blocks_ahead(dim):
    large, small = defaults(torch.bfloat16, dim, 228 << 10), defaults(torch.bfloat16, dim, 100 << 10)
    assert large.block_stages == large.single_stages == 3
    assert small.block_stages == small.single_stages == (3 if dim == 64 else 2)


def test_the_table_in_the_package_can_be_read():
    assert read_table()["schema"] == 2


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"schema": 1, "gpus": {}}, "schema"),
        *(
            ({"schema": 2, "gpus": {"A": {"bfloat16/128/4": ENTRY | wrong}}}, "entry")
            for wrong in ({"block": [64, 48, 4, 2]}, {"single": [64, 4]}, {"measured": ""})
        ),
    ],
)
def test_a_table_that_means_nothing_is_refused(table, what, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=what):
        read_table(path)


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
