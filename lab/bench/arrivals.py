"""Sends requests at given times, and records when each was answered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpic.engine.base import Engine, GenerationRequest, GenerationUsage


@dataclass
class Served:
    """A finished request. Times are in seconds: its arrival from the start of the run, ``first`` and ``ended`` from its
    arrival to its first token and to its end."""

    arrived: float
    first: float
    ended: float
    usage: GenerationUsage
    id: str = ""
    token_ids: tuple[int, ...] = ()


def poisson(rng: random.Random, rate: float, seconds: float, least: int = 3) -> list[float]:
    """Return the seconds at which requests arrive: at random, ``rate`` per second for ``seconds``, but at least
    ``least``. The same seed gives the same pattern, stretched to the rate."""
    now, times = 0.0, list[float]()
    while now < seconds or len(times) < least:
        now += rng.expovariate(1.0) / rate
        times.append(now)
    return times


def send(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    times: Sequence[float],
    until: float | None = None,
    at_token: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Submit each request at its time (seconds from now) and read all answers to their ends.

    Args:
        until: seconds from now after which requests that still run or wait are aborted; they are not in the result.
        at_token: called from several threads whenever a token arrives.

    Raises:
        MPICError: the first error that any request met.
    """
    served: list[Served] = []
    failed: list[BaseException] = []
    began = time.perf_counter()

    def read(stream, arrived: float) -> None:
        try:
            first, usage, ids = 0.0, None, list[int]()
            for delta in stream:
                first = first or time.perf_counter() - began - arrived
                ids += delta.token_ids
                at_token()
                usage = delta.usage or usage
                if delta.finish_reason == "abort":
                    return
            ended = time.perf_counter() - began - arrived
            served.append(Served(arrived, first, ended, usage, stream.id, tuple(ids)))
        except BaseException as error:
            failed.append(error)

    readers, streams = [], []
    for request, moment in zip(requests, times, strict=True):
        time.sleep(max(0.0, began + moment - time.perf_counter()))
        arrived = moment or time.perf_counter() - began
        streams.append(engine.submit(request))
        readers.append(threading.Thread(target=read, args=(streams[-1], arrived)))
        readers[-1].start()
    if until is not None:
        time.sleep(max(0.0, began + until - time.perf_counter()))
        for stream in streams:
            stream.abort()
    for reader in readers:
        reader.join()
    if failed:
        raise failed[0]
    return served
