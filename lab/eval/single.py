"""The baseline Single Cache of KV Packet (arXiv 2604.13226, section 4.4): "compression over full concatenated
context".

The beginning of a prompt, to the end of its last document, is one chunk: the documents, with the text before and
between them, are computed in one pass, in which each attends to those before it, and one press compresses them all.
Nothing of that chunk can be reused in another prompt, so this is not a policy and is not served. It shows what a press
costs when nothing is lost by compiling documents apart: without a press it gives the answers of ``full``.
"""

from __future__ import annotations

from mpic.errors import UnsupportedParameter
from mpic.kv.chunk import Chunk, ChunkKey, digest
from mpic.prompt import ChunkSegment, Prompt, TextSegment

SINGLE = "single"
"""Its name in an evaluation, alone or before a press."""


def joined(prompt: Prompt) -> Prompt:
    """Return the prompt of the same tokens whose beginning, to the end of the last document, is one chunk.

    Raises:
        UnsupportedParameter: the prompt has no documents, or has images or clips, which no chunk of text can hold.
    """
    chunks = prompt.chunks
    if not chunks:
        raise UnsupportedParameter(f"{SINGLE} joins documents, and the prompt has none", param="mpic.policy")
    other = next((chunk for chunk in chunks if chunk.token_ids is None), None)
    if other is not None:
        raise UnsupportedParameter(
            f"{SINGLE} joins documents of text into one chunk, and the prompt has a chunk of kind {other.kind}",
            param="mpic.policy",
        )
    last = max(i for i, segment in enumerate(prompt.segments) if isinstance(segment, ChunkSegment))
    ids = tuple(token for segment in prompt.segments[: last + 1] for token in _tokens(segment))
    key = ChunkKey("text", digest("joined", ",".join(map(str, ids))))
    whole = Chunk(key, chunks[0].owner, ids, label=SINGLE)
    return Prompt((ChunkSegment(whole), *prompt.segments[last + 1 :]))


def _tokens(segment: TextSegment | ChunkSegment) -> tuple[int, ...]:
    return segment.token_ids if isinstance(segment, TextSegment) else segment.chunk.token_ids or ()
