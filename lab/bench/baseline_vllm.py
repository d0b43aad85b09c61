"""The baseline of the vLLM benches: unchanged vLLM, with its own scheduler and worker and its prefix cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mpic.config import EngineConfig
from mpic.engine.vllm.frontend.options import engine_args
from mpic.kv.chunk import Chunk
from mpic_lab.bench.harness import BenchFailed

if TYPE_CHECKING:
    from mpic.engine.vllm.frontend.model import ModelDescription

SALT = "bench"
OURS = (
    "worker_cls",
    "scheduler_cls",
    "kv_transfer_config",
    "additional_config",
    "async_scheduling",
    "mm_processor_cache_gb",
)
"""Arguments for which our engine's values differ from vLLM's defaults."""


class TimedAnswer(NamedTuple):
    """The times of an answer.

    Args:
        prompt, cached: tokens of the prompt, and those of them found in the prefix cache.
        began: time of the request (``time.perf_counter``).
        times: time of each token.
        token_ids: the tokens.
    """

    prompt: int
    cached: int
    began: float
    times: tuple[float, ...]
    token_ids: tuple[int, ...] = ()

    @property
    def first_ms(self) -> float:
        return (self.times[0] - self.began) * 1e3


class PlainVLLM:
    """vLLM without our connector, with the sizes in ``config``; other arguments have vLLM's defaults.

    Args:
        model: the result of ``mpic.engine.vllm.frontend.model.describe_model``.
        cpu: the result of ``prepare_environment``, which must have been called.
        more: vLLM's arguments that are not among those of ``config``, by name.

    Raises:
        ConfigError: vLLM did not start.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelDescription,
        cpu: bool,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        from mpic.engine.vllm.frontend.client import VLLMClient  # imports vLLM

        args = engine_args(config, model, cpu, Path(config.model), 0)
        stock = type(args)(model=config.model)
        for name in OURS:
            setattr(args, name, getattr(stock, name))
        for name, value in more.items():
            setattr(args, name, value)
        self._client = VLLMClient(args, model.image)

    def ask(
        self, parts: Sequence[Sequence[int] | Chunk], tokens: int, times: list[float] | None = None
    ) -> Future[TimedAnswer]:
        """Generate ``tokens`` tokens after a prompt of ids and images.

        Args:
            times: the list to which the time of each token is added.
        """
        work = self._ask(parts, tokens, time.perf_counter(), [] if times is None else times)
        return asyncio.run_coroutine_threadsafe(work, self._client.loop)

    async def _ask(
        self, parts: Sequence[Sequence[int] | Chunk], tokens: int, began: float, times: list[float]
    ) -> TimedAnswer:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = await self._client.render(parts, SALT)
        cached, ids = 0, list[int]()
        async for output in self._client.generate(prompt, params):
            times += [time.perf_counter()] * len(output.outputs[0].token_ids)
            ids += output.outputs[0].token_ids
            cached = output.num_cached_tokens or 0
        return TimedAnswer(len(prompt.ids), cached, began, tuple(times), tuple(ids))

    def reset(self) -> None:
        """Empty the prefix cache, and the caches of images. Nothing may be running.

        Raises:
            BenchFailed: vLLM kept its blocks.
        """
        if not self._client.wait(self._client.forget_prompts()):
            raise BenchFailed("vLLM did not empty its prefix cache")

    def close(self) -> None:
        self._client.close()
