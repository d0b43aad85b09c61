"""llama.cpp as one of the peers: ``llama-server`` in a process of its own, over HTTP on the loopback interface."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpic.prompt.segments import Prompt
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.peers.process import PeerProcess, free_port
from mpic_lab.bench.peers.prompts import First, flat
from mpic_lab.bench.peers.weights import Weights
from mpic_lab.bench.ttft_vllm import rate


def why_not(weights: Weights | None = None) -> str | None:
    """Return the reason why llama.cpp cannot be measured here, or with these weights, or None."""
    if program() is None:
        return "llama-server is neither on PATH nor named by LLAMA_SERVER"
    if importlib.util.find_spec("gguf") is None:
        return "the package gguf, which writes its model files, is not installed (pip install gguf)"
    if weights is not None and weights.images:
        return (
            "llama.cpp reads a vision tower from a file of its own (mmproj), cut and scaled in its own way, which the "
            "bench does not write"
        )
    if weights is not None and weights.placement.device.type != "cpu":
        return "it is measured on CPUs only"
    return None


def program() -> str | None:
    """Return the path of the server: ``LLAMA_SERVER``, or ``llama-server`` on PATH."""
    return shutil.which(_words()[0])


def _words() -> list[str]:
    """Return the words of ``LLAMA_SERVER``: a program and options for it, such as ``-fa off``."""
    given = os.environ.get("LLAMA_SERVER") or "llama-server"
    return [given] if shutil.which(given) else shlex.split(given)


class LlamaServer:
    """A ``llama-server`` with its defaults except sizes, threads, and copies of earlier prompts in host memory, which
    are off because they take gigabytes. Answers have slots of their own, so that the prompts of the first tokens do not
    push their documents out.

    Raises:
        BenchFailed: the server does not start.
    """

    name = "llama.cpp"

    def __init__(self, weights: Weights) -> None:
        settings, folder = weights.settings, weights.folder.parent
        self._slots = max(settings.answers)
        slot_tokens = settings.length + settings.tokens + 64
        port = free_port()
        options = ("--host", "127.0.0.1", "--port", str(port), "--no-webui", "--cache-ram", "0")
        options += ("--parallel", str(self._slots + 1), "--ctx-size", str((self._slots + 1) * slot_tokens))
        options += ("--threads", str(weights.threads), "--threads-batch", str(weights.threads), *_words()[1:])
        saved = folder / "slots"
        saved.mkdir(exist_ok=True)
        found = program()
        assert found is not None and weights.gguf is not None, "why_not() was not asked"
        command = [found, "--model", str(weights.gguf), *options, "--slot-save-path", str(saved)]
        self._server = PeerProcess("llama-server", command, folder / "llama-server.log", port)
        self._http = self._server.http
        self.detail = (
            f"llama.cpp {_version(found)}, {weights.dtype} weights, float16 KV (its default), prompt caching; "
            f"{' '.join(options[4:])}; over HTTP"
        )

    def next_token(self, prompt: Prompt) -> int:
        body = self._body(flat(prompt), 1, self._slots) | {"stream": False, "return_tokens": True}
        answer = self._http.post("/completion", json=body)
        answer.raise_for_status()
        return int(answer.json()["tokens"][0])

    def first(self, prompt: Prompt) -> First:
        began = time.perf_counter()
        times, found = self._times(flat(prompt), 2, self._slots)
        return First((times[0] - began) * 1e3, found)

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        ids = [flat(prompt) for prompt in prompts]
        self._times(ids[0], 1, 0)
        if (
            len(ids) > 1
        ):  # copy the first slot's documents to the other slots, so that they need not compute them
            self._slot(0, "save", "documents")
        for slot, one in enumerate(
            ids[1:], 1
        ):  # a slot keeps its documents and computes only the new question
            self._slot(slot, "restore", "documents")
            self._times(one, 1, slot)
        with ThreadPoolExecutor(len(ids)) as readers:
            running = [readers.submit(self._times, one, tokens, slot) for slot, one in enumerate(ids)]
            times = [one.result()[0] for one in running]
        if short := [len(one) for one in times if len(one) < tokens]:
            raise BenchFailed(f"llama.cpp's answers have {short} tokens, not {tokens}")
        return rate(times)

    def reset(self) -> None:
        for slot in range(self._slots + 1):
            self._slot(slot, "erase")

    def _slot(self, slot: int, action: str, file: str | None = None) -> None:
        body = {"filename": file} if file else {}
        self._http.post(f"/slots/{slot}", params={"action": action}, json=body).raise_for_status()

    def close(self) -> None:
        self._server.close()

    def _body(self, ids: Sequence[int], tokens: int, slot: int) -> dict[str, object]:
        return {
            "prompt": list(ids),
            "n_predict": tokens,
            "id_slot": slot,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
        }

    def _times(self, ids: Sequence[int], tokens: int, slot: int) -> tuple[list[float], int | None]:
        """Return the time at which each token of a streamed answer arrived, and how many tokens of the prompt its slot
        held already (None: the server does not say)."""
        times, found = [], None
        with self._http.stream("POST", "/completion", json=self._body(ids, tokens, slot)) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if event.get("stop"):
                    found = event.get("timings", {}).get("cache_n")
                else:
                    times.append(time.perf_counter())
        return times, found


def _version(found: str) -> str:
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version:")), "?")
