"""MPIC's native engine as one of the peers, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpic.engine.base import Engine, GenerationStream
from mpic.prompt.segments import ChunkSegment, Prompt
from mpic.version import VERSION
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.peers.prompts import First
from mpic_lab.bench.ttft_vllm import rate
from mpic_lab.bench.workload import first_token, request_of


class Native:
    """The engine under one policy. Several policies share an engine, which its owner closes."""

    def __init__(self, engine: Engine, policy: str) -> None:
        self._engine, self._policy, self._turn = engine, policy, 0
        self.name = f"MPIC {policy}"
        self.detail = (
            f"mpic {VERSION}, {engine.info.dtype}, attention {engine.info.attention}; in this process"
        )

    @property
    def _user(self) -> str:
        return f"turn-{self._turn}"

    def next_token(self, prompt: Prompt) -> int:
        deltas = list(self._engine.submit(request_of(prompt, "full", 1, self._user)))
        return next(delta.token_ids[0] for delta in deltas if delta.token_ids)

    def first(self, prompt: Prompt) -> First:
        elapsed, usage = first_token(self._engine, request_of(prompt, self._policy, 2, self._user))
        links = any(isinstance(segment, ChunkSegment) for segment in prompt.segments)
        if links and self._policy != "prefix" and not usage.reused:
            raise BenchFailed(f"{self.name} has linked nothing")
        return First(elapsed, usage.prefix_hit, usage.reused)

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        requests = [request_of(prompt, self._policy, tokens, self._user) for prompt in prompts]
        streams = [self._engine.submit(request) for request in requests]
        times: list[list[float]] = [[] for _ in streams]
        with ThreadPoolExecutor(len(streams)) as readers:
            for one in [readers.submit(_read, *pair) for pair in zip(streams, times, strict=True)]:
                one.result()
        return rate(times)

    def reset(self) -> None:
        """Ask as another user from now on, who finds nothing from the previous user in the prefix cache. The documents
        stay
        compiled: they are what the policies link."""
        self._turn += 1

    def close(self) -> None:
        pass


def _read(stream: GenerationStream, times: list[float]) -> None:
    for delta in stream:
        times += [time.perf_counter()] * len(delta.token_ids)
