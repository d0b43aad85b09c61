"""Checkpoints of every family: plain vLLM gives the same as plain transformers, images included."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import vllm_kit as kit
from engine_kit import ids
from families import random_image

QUICK = ("llama", "llava", "qwen2_5_vl")
"""Families that are tested in every run; the others are in ``make parity``."""


@pytest.mark.parametrize("name", kit.quick_or_parity(QUICK))
def test_vllm_answers_as_transformers_does(name):
    with kit.engine(kit.checkpoint(name)) as llm:
        if name in kit.VISION:
            images = [random_image(1), random_image(2, 72, 40)]
            picture = kit.image_ids(name)
            prompt = [1, *ids(1, 9), *picture, *ids(2, 7), *picture, *ids(3, 12)]
            request = {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}}
        else:
            images, prompt = [], [1, *ids(1, 90)]
            request = {"prompt_token_ids": prompt}
        (answer,) = kit.generate(llm, [request])
    truth = kit.expected(name, answer.prompt, images)
    assert answer.ids == truth.ids
    torch.testing.assert_close(answer.logprobs, truth.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parity
def test_modules_that_need_torchvision_import_in_another_process(tmp_path):
    """vLLM imports a model's class in a subprocess, which the set-up's mend must reach."""
    code = "from vllm.model_executor.models import llava, qwen2_vl, qwen3_vl"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
