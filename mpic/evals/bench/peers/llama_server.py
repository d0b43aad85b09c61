"""llama.cpp as one of the peers: ``llama-server`` in a process of its own, over HTTP on the loopback interface."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from transformers import LlamaForCausalLM

from mpic.evals.bench.harness import BenchFailed
from mpic.evals.bench.peers.gguf_file import write_gguf
from mpic.evals.bench.peers.prompts import Settings, flat
from mpic.evals.bench.ttft_vllm import rate
from mpic.prompt.segments import Prompt

START_SECONDS = 120.0
REQUEST_SECONDS = 600.0


def why_not() -> str | None:
    """Returns the reason why llama.cpp cannot be measured here, or None."""
    if program() is None:
        return "llama-server is neither on PATH nor named by LLAMA_SERVER"
    if importlib.util.find_spec("gguf") is None:
        return "the package gguf, which writes its model files, is not installed (pip install gguf)"
    return None


def program() -> str | None:
    """Returns the path of the server: ``LLAMA_SERVER``, or ``llama-server`` on PATH."""
    return shutil.which(os.environ.get("LLAMA_SERVER") or "llama-server")


class LlamaServer:
    """A ``llama-server`` with its defaults, but for sizes and threads, and without copies of earlier prompts in host
    memory, which take gigabytes. Answers have slots of their own, so that the prompts of the first tokens do not push
    their documents out."""

    name = "llama.cpp"

    def __init__(self, settings: Settings, model: LlamaForCausalLM, folder: Path, threads: int) -> None:
        path = folder / "bench.gguf"
        write_gguf(model, path)
        self._slots = max(settings.answers)
        slot_tokens = settings.length + settings.tokens + 64
        port = _free_port()
        options = ("--host", "127.0.0.1", "--port", str(port), "--no-webui", "--cache-ram", "0")
        options += ("--parallel", str(self._slots + 1), "--ctx-size", str((self._slots + 1) * slot_tokens))
        options += ("--threads", str(threads), "--threads-batch", str(threads))
        found = program()
        assert found is not None, "why_not() was not asked"
        with (folder / "llama-server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [found, "--model", str(path), *options], stdout=log, stderr=subprocess.STDOUT
            )
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=REQUEST_SECONDS,
            # it closes idle connections while others take turns
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        try:
            self._wait(folder / "llama-server.log")
        except BaseException:
            self.close()
            raise
        self.detail = (
            f"llama.cpp {_version(found)}, 16-bit KV, prompt caching; {' '.join(options[4:])}; over HTTP"
        )

    def next_token(self, ids: Sequence[int]) -> int:
        body = self._body(ids, 1, self._slots) | {"stream": False, "return_tokens": True}
        answer = self._http.post("/completion", json=body)
        answer.raise_for_status()
        return int(answer.json()["tokens"][0])

    def first_ms(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        return (self._times(flat(prompt), 2, self._slots)[0] - began) * 1e3

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        ids = [flat(prompt) for prompt in prompts]
        for slot, one in enumerate(ids):  # a slot keeps its documents, and computes the new question alone
            self._times(one, 1, slot)
        with ThreadPoolExecutor(len(ids)) as readers:
            running = [readers.submit(self._times, one, tokens, slot) for slot, one in enumerate(ids)]
            times = [one.result() for one in running]
        if short := [len(one) for one in times if len(one) < tokens]:
            raise BenchFailed(f"llama.cpp's answers have {short} tokens, not {tokens}")
        return rate(times)

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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

    def _times(self, ids: Sequence[int], tokens: int, slot: int) -> list[float]:
        """Returns the time at which each token of a streamed answer arrived."""
        times = []
        with self._http.stream("POST", "/completion", json=self._body(ids, tokens, slot)) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: ") and not json.loads(line[6:]).get("stop"):
                    times.append(time.perf_counter())
        return times

    def _wait(self, log: Path) -> None:
        """Waits until the server is healthy. Raises BenchFailed with the end of its log if it ends, or is not healthy
        in time."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self._http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.1)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BenchFailed(f"llama-server did not start:\n{tail}")


def _version(found: str) -> str:
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version:")), "?")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
