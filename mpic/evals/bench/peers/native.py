"""MPIC's native engine as one of the peers, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpic.engine.base import GenerationStream
from mpic.engine.native.engine import NativeEngine
from mpic.evals.bench.harness import BenchFailed
from mpic.evals.bench.ttft_vllm import rate
from mpic.evals.bench.workload import first_token, prompt_of, request_of
from mpic.prompt.segments import ChunkSegment, Prompt
from mpic.version import VERSION


class Native:
    """The engine under one policy. Several policies share an engine, which its owner closes."""

    def __init__(self, engine: NativeEngine, policy: str) -> None:
        self._engine, self._policy = engine, policy
        self.name = f"MPIC {policy}"
        self.detail = f"mpic {VERSION}, attention {engine.info.attention}; in this process"

    def next_token(self, ids: Sequence[int]) -> int:
        deltas = list(self._engine.submit(request_of(prompt_of(ids), self._policy, 1)))
        return next(delta.token_ids[0] for delta in deltas if delta.token_ids)

    def first_ms(self, prompt: Prompt) -> float:
        elapsed, usage = first_token(self._engine, request_of(prompt, self._policy, 2))
        links = any(isinstance(segment, ChunkSegment) for segment in prompt.segments)
        if links and self._policy != "prefix" and not usage.reused:
            raise BenchFailed(f"{self.name} has linked nothing")
        return elapsed

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        streams = [self._engine.submit(request_of(prompt, self._policy, tokens)) for prompt in prompts]
        times: list[list[float]] = [[] for _ in streams]
        with ThreadPoolExecutor(len(streams)) as readers:
            for one in [readers.submit(_read, *pair) for pair in zip(streams, times, strict=True)]:
                one.result()
        return rate(times)

    def close(self) -> None:
        pass


def _read(stream: GenerationStream, times: list[float]) -> None:
    for delta in stream:
        times += [time.perf_counter()] * len(delta.token_ids)
