"""Several answers to one prompt (``n``), read as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from mpic.engine.base import Delta, GenerationRequest, GenerationStream, GenerationUsage

Submit = Callable[[GenerationRequest], GenerationStream]


class ParallelSampling:
    """``n`` running answers to each of some prompts, mostly one; those to one prompt differ in their seeds.

    The second answer finds the chunks of the first at once, and the prompt in the prefix cache as soon as the first has
    ended.
    """

    def __init__(self, streams: Sequence[GenerationStream]) -> None:
        self.streams = streams

    @classmethod
    def submit(cls, submit: Submit, requests: Sequence[GenerationRequest], n: int) -> ParallelSampling:
        """Submit each request ``n`` times, all or none."""
        streams: list[GenerationStream] = []
        try:
            for request, i in product(requests, range(n)):
                sampling = request.sampling
                if sampling.seed is not None:
                    sampling = replace(sampling, seed=sampling.seed + i)
                id = request.id if n == 1 else f"{request.id}-{i}"
                streams.append(submit(replace(request, id=id, sampling=sampling)))
        except BaseException:
            cls(streams).abort()
            raise
        return cls(streams)

    def abort(self) -> None:
        """End all answers."""
        for stream in self.streams:
            stream.abort()

    async def collect(self) -> list[list[Delta]]:
        """Return all deltas of each answer."""

        async def deltas(stream: GenerationStream) -> list[Delta]:
            return [delta async for delta in stream]

        return list(await asyncio.gather(*map(deltas, self.streams)))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield deltas as they arrive, each with the number of its answer. The first error ends all of them."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield 0, delta
            return
        # one for each: the rest waits in the streams, where the engine sees that nobody reads
        arrived: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(len(self.streams))

        async def pump(i: int, stream: GenerationStream) -> None:
            try:
                async for delta in stream:
                    await arrived.put((i, delta))
                await arrived.put((i, None))
            except Exception as error:
                await arrived.put((i, error))

        pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(self.streams)]
        try:
            running = len(pumps)
            while running:
                i, item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield i, item
        finally:
            for task in pumps:
                task.cancel()


def merge_usage(usages: Sequence[GenerationUsage]) -> GenerationUsage:
    """Return the usage of several answers: the prompt once, as OpenAI counts it, and every completion. Of the prompt's
    counts, those of the answer that cost most: the others may have found what it computed and compiled."""
    if not usages:
        return GenerationUsage()
    first = max(usages, key=lambda usage: (usage.spent, usage.compiled))
    return replace(first, completion_tokens=sum(usage.completion_tokens for usage in usages))


def add_usages(usages: Mapping[int, GenerationUsage], n: int) -> GenerationUsage:
    """Return the usage of the answers to several prompts, by the number of the answer; each prompt has ``n``."""
    prompts: dict[int, list[GenerationUsage]] = {}
    for i, usage in usages.items():
        prompts.setdefault(i // n, []).append(usage)
    first, *others = map(merge_usage, prompts.values()) if prompts else (GenerationUsage(),)
    if not others:
        return first
    counts = (
        "prompt_tokens",
        "completion_tokens",
        "reused",
        "recomputed",
        "prefix_hit",
        "computed",
        "compiled",
    )
    return replace(first, **{name: sum(getattr(u, name) for u in (first, *others)) for name in counts})
