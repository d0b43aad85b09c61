"""Checkpoints of every family: plain vLLM gives the same as plain transformers, images included."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vllm_kit as kit

pytestmark = pytest.mark.parity  # in every run, test_links.py asks engines with our parts the same


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_vllm_answers_as_transformers_does(name):
    with kit.engine(kit.checkpoint(name)) as llm:
        kit.assert_as_transformers(llm, name)


def test_modules_that_need_torchvision_import_in_another_process(tmp_path):
    """vLLM imports a model's class in a subprocess, which the set-up's mend must reach."""
    code = "from vllm.model_executor.models import llava, qwen2_vl, qwen3_vl"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
