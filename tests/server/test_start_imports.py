"""A start imports nothing that only later work needs: every such module costs each start its time.

Some heavy modules are not listed because transformers imports them with every model (``docs/measurements.md``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TORCH = ["torch", "transformers", "numpy", "fastapi", "uvicorn", "PIL"]
"""Heavy, and not needed to read the command line and check the configuration."""
LATER = [
    "bitsandbytes",
    "datasets",
    "faiss",  # the first search of a library with references
    "gguf",
    "IPython",
    "matplotlib",
    "mpic.client",
    "mpic.engine.vllm",
    "mpic.kernels.triton",  # --attention triton
    "mpic.library.copies",
    "mpic_lab",
    "nltk",
    "numba",
    "open_clip",  # the first reference that is embedded
    "openai",
    "pandas",
    "playwright",
    "PIL.PngImagePlugin",  # the first image
    "pytest",
    "rouge_score",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
    "transformers.pipelines",
    "transformers.trainer",
    "vllm",
]
WATCH = """
import json, sys, traceback

class Watch:
    def __init__(self, names):
        self.names, self.found = names, {}

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            stack = traceback.extract_stack()[:-1]
            at = [f"{one.filename}:{one.lineno}" for one in stack if "importlib" not in one.filename]
            self.found.setdefault(name, at[-4:])

watch = Watch(json.loads(sys.argv[1]))
sys.meta_path.insert(0, watch)
"""
COMMAND = "import mpic.cli.serve\n"
SERVER = "import mpic.cli.serve, mpic.server.run, mpic.server.app\n"
MODEL = """
from fastapi.testclient import TestClient
from mpic.config import load_config
from mpic.server.run import build

app = build(load_config(None, {"data_dir": sys.argv[2], "device": "cpu", "pool_bytes": 1 << 24}))
with TestClient(app, base_url="http://127.0.0.1:8000") as client:
    assert client.get("/health/ready").json() == {"ready": True}
"""
REPORT = "\nprint(json.dumps({name: at for name, at in watch.found.items() if name in sys.modules}))\n"
"""The code that prints which watched names were imported. A name that was only looked up, to learn whether its package
is installed, is not among them."""


def imported(code: str, names: list[str], folder) -> dict[str, list[str]]:
    """Return those of the names that a process imports, each with the last lines that led to it."""
    command = [sys.executable, "-c", WATCH + code + REPORT, json.dumps(names), str(folder / "library")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def said(found: dict[str, list[str]]) -> str:
    lines = [f"  {name}, imported through {' -> '.join(at)}" for name, at in found.items()]
    return "\n".join(["a start must not import these; import them where they are used:", *lines])


@pytest.mark.parametrize(
    ("code", "names"),
    [(COMMAND, [*TORCH, *LATER]), (SERVER + MODEL, LATER)],
    ids=["the command line", "the server with the demo model"],
)
def test_a_start_imports_nothing_that_is_needed_later(code, names, tmp_path):
    found = imported(code, names, tmp_path)
    assert not found, said(found)


def test_the_watch_sees_what_is_imported_and_says_where(tmp_path):
    found = imported("import mpic_lab.eval.metrics\n", LATER, tmp_path)
    assert "mpic_lab" in found and "mpic_lab, imported through" in said(found)
