"""An engine that computes nothing: it answers with a fixed text, word by word, and counts the requests it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from mpic.engine.base import (
    ChunkUse,
    Delta,
    Engine,
    GenerationRequest,
    GenerationUsage,
    TokenLogprob,
    TraceSpan,
)
from mpic.errors import ContextLengthExceeded, PoolTooSmall
from mpic.kv.chunk import Chunk
from mpic.link import BARE, Wrapping
from mpic.model.info import ModelInfo

ANSWER = "The tower is taller than the museum – by far."
CHUNK_TOKENS = 36


class FakeStream:
    """Streams the words of the answer with a pause between them; ``fail_at`` raises before that word."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.id = request.id
        self.engine = engine
        self.request = request
        self.aborted = False
        engine.held.add(request.id)

    def abort(self) -> None:
        self.aborted = True
        self.engine.held.discard(self.id)

    def _deltas(self) -> Iterator[Delta]:
        sampling = self.request.sampling
        words = [w + " " for w in self.engine.answer.split(" ")]
        words[-1] = words[-1].rstrip()
        finish = "stop"
        if sampling.max_tokens is not None and sampling.max_tokens < len(words):
            words, finish = words[: sampling.max_tokens], "length"
        for i, word in enumerate(words):
            if i == self.engine.fail_at:
                raise self.engine.failure
            logprobs = ()
            if sampling.logprobs is not None:
                top = tuple((t, -0.5 - t) for t in range(sampling.logprobs))
                logprobs = (TokenLogprob(i, -0.5, top),)
            yield Delta(word, (i,), logprobs)
        yield Delta("", finish_reason=finish, usage=self._usage(len(words)))

    def _usage(self, completion: int) -> GenerationUsage:
        chunks = tuple(
            ChunkUse(str(c.key), c.label, CHUNK_TOKENS, CHUNK_TOKENS - 16, 16, "device", "policy", 0.5)
            for c in self.request.prompt.chunks
        )
        own = sum(len(s) for s in self.request.prompt.segments if hasattr(s, "token_ids"))
        return GenerationUsage(
            prompt_tokens=own + CHUNK_TOKENS * len(chunks),
            completion_tokens=completion,
            reused=sum(c.reused for c in chunks),
            recomputed=sum(c.recomputed for c in chunks),
            computed=own + sum(c.recomputed for c in chunks),
            ttft_ms=1.25,
            total_ms=2.5,
            policy=self.request.policy.name,
            chunks=chunks,
            trace=self._trace() if self.request.trace else (),
        )

    def _trace(self) -> tuple[TraceSpan, ...]:
        spans, at = [], 0
        for segment in self.request.prompt.segments:
            chunk = getattr(segment, "chunk", None)
            n = CHUNK_TOKENS if chunk else len(segment)
            kind = "text" if chunk is None else {"image": "image", "text": "document"}[chunk.kind]
            state, label, file_id = ("device", chunk.label, chunk.file_id) if chunk else ("new", None, None)
            spans.append(TraceSpan(at, at + n, state, kind, label, file_id))
            at += n
        return tuple(spans)

    def __iter__(self) -> Iterator[Delta]:
        for delta in self._deltas():
            time.sleep(self.engine.pause)
            if self.aborted:
                yield Delta("", finish_reason="abort")
                return
            yield delta
        self.engine.held.discard(self.id)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas():
            await asyncio.sleep(self.engine.pause)
            if self.aborted:
                yield Delta("", finish_reason="abort")
                return
            yield delta
        self.engine.held.discard(self.id)


class FakeEngine(Engine):
    """See the module. ``held`` are the ids of requests whose pages are not freed yet."""

    def __init__(
        self, context: int = 512, pool: int = 400, pause: float = 0.0, hold_compiles: bool = False
    ) -> None:
        self.info = ModelInfo(
            "fake", "0" * 64, "fake", context, "float32", "cpu", ("text", "image"), "reference"
        )
        self.pool = pool
        self.pause = pause
        self.answer = ANSWER
        self.fail_at: int | None = None
        self.failure: Exception = RuntimeError("the inside of the engine")
        self.held: set[str] = set()
        self.requests: list[GenerationRequest] = []
        self.compiled: list[Chunk] = []
        self.forgotten: list[Chunk] = []
        self.compile_error: Exception | None = None
        self.hold_compiles = hold_compiles
        self.pending: list[Future[int]] = []
        self.closed = False

    def submit(self, request: GenerationRequest) -> FakeStream:
        if request.exists is not None:
            request.exists()
        segments = request.prompt.segments
        length = sum(len(s) if hasattr(s, "token_ids") else CHUNK_TOKENS for s in segments)
        if length > self.info.context_length:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens, the model's context {self.info.context_length}"
            )
        if length > self.pool:
            raise PoolTooSmall(
                f"needs {length} pages, the pool has {self.pool}", needed=length, pages=self.pool
            )
        self.requests.append(request)
        return FakeStream(self, request)

    def presses(self) -> list[str]:
        return ["snapkv-R"]

    def compile(
        self, chunk: Chunk, wrapping: Wrapping = BARE, exists: Callable[[], object] | None = None
    ) -> Future[int]:
        if exists is not None:
            exists()
        future: Future[int] = Future()
        self.compiled.append(chunk)
        if self.hold_compiles:
            self.pending.append(future)
        elif self.compile_error is not None:
            future.set_exception(self.compile_error)
        else:
            future.set_result(CHUNK_TOKENS)
        return future

    def forget(self, *chunks: Chunk) -> None:
        self.forgotten += chunks

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.held), "pages": {"own": len(self.held), "free": self.pool}}

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
