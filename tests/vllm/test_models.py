"""Checkpoints of every family: plain vLLM gives what plain transformers gives, images included."""

from __future__ import annotations

import pytest
import torch
import vllm_kit as kit
from engine_kit import ids
from families import random_image

QUICK = ("llama", "llava", "qwen2_5_vl")
"""In every run; the others in ``make parity``."""


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
