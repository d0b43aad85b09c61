"""vLLM as one of the peers: unchanged, with prefix caching, in processes of its own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mpic.engine.vllm.frontend.options import prepare_environment
from mpic.prompt.segments import Prompt
from mpic_lab.bench.baseline_vllm import PlainVLLM
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.peers.prompts import First, parts
from mpic_lab.bench.peers.weights import Weights
from mpic_lab.bench.ttft_vllm import rate
from mpic_lab.bench.vllm_pair import engine_config

BLOCK = 32


def why_not(weights: Weights | None = None) -> str | None:
    """Return the reason why vLLM cannot be measured here, or None."""
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed (make setup-vllm)"


class VLLM:
    """vLLM on the same weights. On a CPU it computes on all cores, as the other peers do; left alone it would keep one
    for its other processes.

    Args:
        more: further arguments of vLLM by name, in addition to those of ``vllm_pair.engine_config``.
    """

    name = "vLLM"

    def __init__(self, weights: Weights, more: Mapping[str, object] = MappingProxyType({})) -> None:
        settings, placement = weights.settings, weights.placement
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: weights.threads]))
        if placement.device.type == "cpu":
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        cpu = prepare_environment()
        import vllm

        from mpic.engine.vllm.frontend.model import describe_model

        tokens = settings.kept_tokens
        config = engine_config(settings.decoder, placement, str(weights.folder), tokens, BLOCK)
        self._engine = PlainVLLM(config, describe_model(config, cpu), cpu, more)
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "its own choice")
        self.detail = (
            f"vllm {vllm.__version__}, {config.dtype}, prefix caching, blocks of {BLOCK}, "
            f"{config.pool_bytes / 2**20:.0f} MiB of KV, cores {bound}"
        )

    def next_token(self, prompt: Prompt) -> int:
        return self._engine.ask(parts(prompt), 1).result().token_ids[0]

    def first(self, prompt: Prompt) -> First:
        answer = self._engine.ask(parts(prompt), 2).result()
        return First(answer.first_ms, answer.cached)

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        for prompt in prompts:  # the documents enter its prefix cache
            self._engine.ask(parts(prompt), 1).result()
        running = [self._engine.ask(parts(prompt), tokens) for prompt in prompts]
        answers = [one.result() for one in running]
        if short := [len(answer.times) for answer in answers if len(answer.times) != tokens]:
            raise BenchFailed(f"{self.name}'s answers have {short} tokens, not {tokens}")
        return rate([answer.times for answer in answers])

    def reset(self) -> None:
        self._engine.reset()

    def close(self) -> None:
        self._engine.close()
