"""Long texts of a conversation, linked as chunks without being asked for (``[engine] link_texts``).

These are chunks: a text that is a whole message or content part of a system message, a user or a tool, and the
definitions of tools together, from ``least`` tokens on; a text that the client marks with ``cache_control``, from
``MARKED`` tokens on; and in place of a text the elements ``source``, ``document`` and ``document_content`` in it, which
clients put around what they have retrieved.

The tokens of a prompt stay what they are. A text is tokenized by itself, and without the ``EDGE`` tokens at both ends,
which what stands beside it may change; if the rest is in the prompt, it becomes a chunk there, and otherwise it stays
text. So the same text is the same chunk wherever it stands.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from mpic.cancel import checkpoint
from mpic.kv.chunk import Chunk, ChunkKey, digest
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment
from mpic.prompt.template import ChatTemplate

MARKED = 64
EDGE = 4
TAG = re.compile(r"<(/?)(source|document|document_content)\b[^<>]{0,1024}>")
WIDTH = array("I").itemsize


def link_long_texts(
    prompt: Prompt,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    owner: str,
    least: int,
    most: int,
) -> Prompt:
    """Return the prompt of a conversation with its long texts as chunks; the same object if it has none.

    Args:
        messages, tools: the conversation, as the prompt was built of it.
        owner: the user whose chunks they are.
        least: tokens of a text that is a chunk.
        most: chunks that the prompt may have.
    """
    segments: list[bytes | ChunkSegment] = [
        array("I", part.token_ids).tobytes() if isinstance(part, TextSegment) else part
        for part in prompt.segments
    ]
    room = most - len(prompt.chunks)
    for text, label, enough in _texts(messages, tools, least):
        checkpoint()
        if room > 0 and len(text.encode(errors="surrogatepass")) >= enough:
            ids = template.tokenize_alone(text)
            if len(ids) >= enough and _link(segments, ids[EDGE:-EDGE], label, owner):
                room -= 1
    if room == most - len(prompt.chunks):
        return prompt
    return Prompt(tuple(TextSegment(_ids(part)) if isinstance(part, bytes) else part for part in segments))


def _texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], least: int
) -> Iterator[tuple[str, str, int]]:
    """Yield texts that may be chunks, with a label and the least number of their tokens."""
    if tools:  # as most templates print them: one a line
        yield "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), "tools", least
    for message in messages:
        content = message.get("content") or ()
        if message["role"] == "assistant":  # a conversation goes on behind its answers, which are not moved
            continue
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                enough = min(least, MARKED) if part.get("cache_control") else least
                for text in _elements(part["text"]) or [part["text"]]:
                    yield text.strip(), message["role"], enough


def _elements(text: str) -> list[str]:
    """Return what is inside the innermost elements."""
    tags = list(TAG.finditer(text))
    return [
        text[begin.end() : end.start()]
        for begin, end in pairwise(tags)
        if not begin[1] and end[1] and begin[2] == end[2]
    ]


def _link(segments: list[bytes | ChunkSegment], ids: tuple[int, ...], label: str, owner: str) -> bool:
    """Put a chunk in place of these tokens, where they first stand between others. Return whether they do."""
    wanted = array("I", ids).tobytes()
    for i, part in enumerate(segments):
        if not isinstance(part, bytes):
            continue
        at = part.find(wanted, WIDTH)
        while at >= 0 and at % WIDTH:
            at = part.find(wanted, at + 1)
        if at < 0 or at + len(wanted) == len(part):
            continue
        chunk = Chunk(ChunkKey("text", digest("tokens", wanted)), owner, ids, label=label)
        segments[i : i + 1] = [part[:at], ChunkSegment(chunk), part[at + len(wanted) :]]
        return True
    return False


def _ids(packed: bytes) -> tuple[int, ...]:
    found = array("I")
    found.frombytes(packed)
    return tuple(found)
