"""Messages -> prompt: segments of request-owned tokens and references to chunks, in order.

``build_prompt`` is the whole of it. ``messages`` validates and resolves, ``probes`` finds out what the model's chat
template can do, ``marks`` stand in for client text and chunks while it renders, ``template`` cuts what comes out into
segments, ``tokens`` gives them their ids. ``split`` cuts long texts into the chunks they are cached as.

All is imported when it is first used: the process that cuts a long text (``apart``) needs little of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpic.prompt.build import build_prompt
    from mpic.prompt.messages import Resolver
    from mpic.prompt.segments import ChunkSegment, Prompt, Segment, TextSegment
    from mpic.prompt.template import ChatTemplate

__all__ = ["ChatTemplate", "ChunkSegment", "Prompt", "Resolver", "Segment", "TextSegment", "build_prompt"]

PLACES = {
    "build_prompt": "build",
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
