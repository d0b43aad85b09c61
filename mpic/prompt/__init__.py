"""Builds a prompt from messages: segments of request-owned tokens and references to chunks, in order.

``build_prompt`` is the entry point. ``messages`` validates and resolves, ``probes`` finds the abilities of the model's
chat template, ``placeholders`` stand in for client text and chunks while it renders, ``rendering`` checks and cuts the
result, ``template`` makes segments of it, and ``guarded_tokenizer`` their token ids. ``split`` cuts long texts into the
chunks as which they are cached.

Everything is imported when it is first used: the process that cuts a long text (``split_process``) needs little of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpic.prompt.messages import Resolver
    from mpic.prompt.segments import ChunkSegment, Prompt, Segment, TextSegment
    from mpic.prompt.template import ChatTemplate, build_prompt

__all__ = ["ChatTemplate", "ChunkSegment", "Prompt", "Resolver", "Segment", "TextSegment", "build_prompt"]

PLACES = {
    "build_prompt": "template",
    "Resolver": "messages",
    "ChunkSegment": "segments",
    "Prompt": "segments",
    "Segment": "segments",
    "TextSegment": "segments",
    "ChatTemplate": "template",
}


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(f"mpic.prompt.{PLACES[name]}"), name)
    raise AttributeError(f"module 'mpic.prompt' has no attribute {name!r}")
