"""OpenVINO GenAI as one of the peers: its pipeline with continuous batching, in this process, on weights that
``optimum-cli`` of optimum-intel has converted."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpic.prompt.segments import Prompt
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.peers.prompts import First, flat
from mpic_lab.bench.peers.weights import Weights
from mpic_lab.bench.ttft_vllm import rate

BLOCK = 32
"""Tokens of a block of its cache on CPUs."""
PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def why_not(weights: Weights | None = None) -> str | None:
    """Return the reason why OpenVINO GenAI cannot be measured here, or with these weights, or None."""
    if importlib.util.find_spec("openvino_genai") is None:
        return "openvino_genai is not installed (pip install openvino-genai)"
    if converter() is None:
        return (
            "optimum-cli of optimum-intel, which converts the weights, is neither on PATH nor named by OPTIMUM_CLI; it "
            "needs an older transformers, so it has an environment of its own"
        )
    if weights is not None and weights.images:
        return "the bench converts models of text for it alone"
    if weights is not None and weights.placement.device.type != "cpu":
        return "it is measured on CPUs only"
    return None


def converter() -> str | None:
    """Return the path of the converter: ``OPTIMUM_CLI``, or ``optimum-cli`` on PATH."""
    return shutil.which(os.environ.get("OPTIMUM_CLI") or "optimum-cli")


def convert(weights: Weights) -> Path:
    """Return the folder of the converted weights, which is made once. They are kept in float32, which holds 16-bit
    weights as they are.

    Raises:
        BenchFailed: the converter failed; the message holds the end of its output.
    """
    folder = weights.folder.parent / "openvino"
    if not folder.exists():
        found = converter()
        assert found is not None, "why_not() was not asked"
        command = [found, "export", "openvino", "--model", str(weights.folder)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp32", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise BenchFailed(f"optimum-cli did not convert the weights:\n{tail}")
    return folder


class GenAI:
    """OpenVINO GenAI with prefix caching; keys and values are kept in the dtype of the weights instead of 8 bits, its
    default, so that it computes the same model; in float32 where the processor lacks that dtype.

    Raises:
        BenchFailed: the weights could not be converted.
    """

    name = "OpenVINO GenAI"

    def __init__(self, weights: Weights) -> None:
        import openvino_genai

        self._folder, self._weights = convert(weights), weights
        self._numbers = itertools.count()
        wanted = PRECISIONS[weights.dtype]
        self._precision = wanted if _has(wanted) else "f32"
        self._pipeline: Any = None
        self.reset()
        lacks = "" if wanted == self._precision else f", since this processor lacks {wanted}"
        self.detail = (
            f"openvino_genai {openvino_genai.__version__}, {self._precision} and {self._precision} KV{lacks}; prefix "
            f"caching, continuous batching, {weights.threads} threads; in this process"
        )

    def next_token(self, prompt: Prompt) -> int:
        return self._answers([prompt], 1)[0][1][0]

    def first(self, prompt: Prompt) -> First:
        began = time.perf_counter()
        [(times, _)] = self._answers([prompt], 2)
        return First((times[0] - began) * 1e3)

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        for prompt in prompts:  # the documents enter its prefix cache
            self._answers([prompt], 1)
        answers = self._answers(prompts, tokens)
        if short := [len(ids) for _, ids in answers if len(ids) != tokens]:
            raise BenchFailed(f"{self.name}'s answers have {short} tokens, not {tokens}")
        return rate([times for times, _ in answers])

    def reset(self) -> None:
        """Create the pipeline anew, because its cache cannot be emptied."""
        import openvino_genai

        self._pipeline = None
        settings = self._weights.settings
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = True
        schedule.num_kv_blocks = settings.kept_tokens // BLOCK + 2
        properties = {
            "INFERENCE_PRECISION_HINT": self._precision,
            "KV_CACHE_PRECISION": self._precision,
            "INFERENCE_NUM_THREADS": self._weights.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(self._folder), schedule, "CPU", properties
        )

    def close(self) -> None:
        self._pipeline = None

    def _answers(self, prompts: Sequence[Prompt], tokens: int) -> list[tuple[list[float], list[int]]]:
        """Generate all answers at once; return the time of each token, and the tokens."""
        import openvino
        import openvino_genai

        how = openvino_genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.do_sample = tokens, True, False
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([flat(prompt)], dtype=np.int64))
            handles.append(self._pipeline.add_request(next(self._numbers), ids, how))
        answers: list[tuple[list[float], list[int]]] = [([], []) for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, (times, ids) in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        times += [time.perf_counter()] * len(output.generated_ids)
                        ids += output.generated_ids
        return answers


def _has(precision: str) -> bool:
    """Return whether a CPU computes in a precision; in any other precision it would compute in f32 and refuse keys and
    values that are not f32."""
    import openvino

    return precision.upper() in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
