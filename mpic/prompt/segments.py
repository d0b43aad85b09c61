"""A prompt after the chat template: request-owned text and references to chunks, in order."""

from __future__ import annotations

from dataclasses import dataclass

from mpic.kv.chunk import Chunk


@dataclass(frozen=True)
class TextSegment:
    """Request-owned tokens; always computed by the request (or found in its own prefix cache)."""

    token_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class ChunkSegment:
    """A place where a chunk is linked. The tokens of a chunk are fixed when it is compiled."""

    chunk: Chunk


Segment = TextSegment | ChunkSegment


@dataclass(frozen=True)
class Prompt:
    """Segments in order; adjacent text segments are merged by the builder. The last segment is text."""

    segments: tuple[Segment, ...]

    def pressed(self, asked: str | None, default: str = "") -> Prompt:
        """Return the prompt with every chunk under a press; see ``Chunk.pressed``."""
        segments = (
            ChunkSegment(s.chunk.pressed(asked, default)) if isinstance(s, ChunkSegment) else s
            for s in self.segments
        )
        return Prompt(tuple(segments))

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(s.chunk for s in self.segments if isinstance(s, ChunkSegment))
