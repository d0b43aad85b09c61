"""vLLM as one of the peers: unchanged, with prefix caching, in processes of its own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from mpic.engine.vllm.frontend.options import prepare_environment
from mpic.evals.bench.baseline_vllm import PlainVLLM
from mpic.evals.bench.harness import BenchDevice, BenchFailed
from mpic.evals.bench.peers.prompts import Settings, flat
from mpic.evals.bench.ttft_vllm import rate
from mpic.evals.bench.vllm_pair import engine_config
from mpic.prompt.segments import Prompt

BLOCK = 32


def why_not() -> str | None:
    """Returns the reason why vLLM cannot be measured here, or None."""
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed (make setup-vllm)"


class VLLM:
    """vLLM on the same weights. On a CPU it computes on all cores, as the other peers do; left alone it would keep one
    for its other processes."""

    name = "vLLM"

    def __init__(self, settings: Settings, placement: BenchDevice, model: Path, threads: int) -> None:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        if placement.device.type == "cpu":
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        cpu = prepare_environment()
        import vllm

        from mpic.engine.vllm.frontend.model import describe_model

        tokens = settings.decoder.context + (max(settings.answers) + 2) * (settings.length + settings.tokens)
        config = engine_config(settings.decoder, placement, str(model), tokens, BLOCK)
        self._engine = PlainVLLM(config, describe_model(config, cpu), cpu)
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "its own choice")
        self.detail = f"vllm {vllm.__version__}, prefix caching, blocks of {BLOCK}, cores {bound}"

    def next_token(self, ids: Sequence[int]) -> int:
        return self._engine.ask([ids], 1).result().token_ids[0]

    def first_ms(self, prompt: Prompt) -> float:
        return self._engine.ask([flat(prompt)], 2).result().first_ms

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        ids = [flat(prompt) for prompt in prompts]
        for one in ids:  # the documents enter its prefix cache
            self._engine.ask([one], 1).result()
        answers = [one.result() for one in [self._engine.ask([one], tokens) for one in ids]]
        if short := [len(answer.times) for answer in answers if len(answer.times) != tokens]:
            raise BenchFailed(f"vLLM's answers have {short} tokens, not {tokens}")
        return rate([answer.times for answer in answers])

    def close(self) -> None:
        self._engine.close()
