"""Clips are not linked inside vLLM, and a request with one is told so before anything is prepared."""

from __future__ import annotations

import pytest
from engine_kit import prompt_of, request_of
from video_kit import animation, clip_chunk, pictures

from mpic.errors import UnsupportedModality


def test_a_request_with_a_clip_is_refused_by_name():
    from mpic.engine.vllm.frontend.prepare import PromptPreparer

    prompt = prompt_of([11, 12], clip_chunk(animation(pictures(1, 4))), [13])
    with pytest.raises(UnsupportedModality, match="clips cannot be linked inside vLLM: use --engine native"):
        PromptPreparer(None, None).check(request_of(prompt, "mpic-4"))
