"""Prompts in the form that vLLM takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.inputs.engine import tokens_input

from mpic.engine.vllm.wire import FIRST_SOFT

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput


class VLLMPrompt(NamedTuple):
    """A prompt in the form that vLLM takes.

    Args:
        ids: its tokens, images expanded.
        images: ``(first token, tokens)`` of every image.
        prompt: vLLM's own object.
    """

    ids: Sequence[int]
    images: tuple[tuple[int, int], ...]
    prompt: EngineInput


def token_prompt(ids: Sequence[int], salt: str) -> VLLMPrompt:
    """Return a prompt of token ids alone. A link's prompt is one: its images are in chunk files."""
    return VLLMPrompt(ids, (), tokens_input(list(ids), cache_salt=salt))


def accept_soft_ids(renderer: Any, soft: int) -> None:
    """Make vLLM's check of prompts accept the ids of an adapter's ``soft`` tokens; all other ids are checked as
    before."""
    check = renderer.validate_token_ids
    accepted = range(FIRST_SOFT, FIRST_SOFT + soft)

    def validate_token_ids(token_ids: Sequence[int], **options: Any) -> None:
        check([i for i in token_ids if i not in accepted], **options)

    if soft:
        renderer.validate_token_ids = validate_token_ids
