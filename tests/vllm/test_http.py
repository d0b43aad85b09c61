"""A plain vLLM server, started as docs/vllm.md says, takes link orders over HTTP as the example there sends them."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import vllm_kit as kit

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 600
PORTS = 3
"""Ports that are tried."""


def documented_command() -> str:
    """Return the shell lines of docs/vllm.md that start the server."""
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "api_server" in b)
    return block.strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """``(url, folder of chunk files)``. The server binds its port long after it was found free, so that another process
    may have it by then: the server is then started with another."""
    kit.look_at("LlamaForCausalLM")
    folder, log = tmp_path_factory.mktemp("chunks"), tmp_path_factory.mktemp("log") / "server.log"
    for left in reversed(range(PORTS)):
        port = free_port()
        process = start(port, folder, log)
        url = f"http://127.0.0.1:{port}"
        try:
            if wait_for(url, process, log, port_may_be_taken=left > 0):
                yield url, folder
                return
        finally:
            with suppress(ProcessLookupError):  # it has ended, and so have its children
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(300)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(port: int, folder: Path, log: Path) -> subprocess.Popen:
    given = {
        ".venv/bin/python": sys.executable,
        "PATH": str(kit.checkpoint("llama")),
        "8001": str(port),
        "/tmp/mpic-chunks": str(folder),
    }
    command = documented_command()
    for name, value in given.items():
        assert name in command
        command = command.replace(name, value)
    command += " --host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 1024"
    environment = {**os.environ, **kit.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING"}
    with log.open("wb") as out:
        where = {"cwd": ROOT, "env": environment, "start_new_session": True}
        return subprocess.Popen(["bash", "-c", command], **where, stdout=out, stderr=out)


def wait_for(url: str, process: subprocess.Popen, log: Path, port_may_be_taken: bool) -> bool:
    """Return True once the server answers, and False if it has ended because its port was taken."""
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        if process.poll() is not None:
            said = log.read_text()
            assert port_may_be_taken and os.strerror(errno.EADDRINUSE) in said, said[-3000:]
            return False
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return True
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start in {START_SECONDS} s:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("vllm_http", ROOT / "docs" / "examples" / "vllm_http.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_compiles_and_links_over_http(server, example, capsys):
    url, folder = server
    example.main(url, str(folder))
    printed = capsys.readouterr().out
    assert printed.count("'fallback': []") == printed.count("'error': None") == len(example.QUESTIONS)
    assert all(int(reused) > 200 for reused in re.findall(r"'reused': (\d+)", printed))
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]


def test_a_bad_order_over_http_fails_alone(server, example):
    url, _ = server
    client = example.Server(url)
    prompt = client.tokens("A prompt of thirty-three tokens.")
    before = client.complete(prompt, 4)["choices"][0]["text"]
    for order in ({"mpic": {"version": 1, "link": {"rows": "all"}}}, {"mpic": 7}):
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            client.complete(prompt, 4, order)
        assert client.complete(prompt, 4)["choices"][0]["text"] == before


def test_an_order_for_all_tokens_equals_no_order_over_http(server, example):
    url, _ = server
    client = example.Server(url)
    prompt = client.tokens("Everything of this is computed.")
    order = {"length": len(prompt), "extent": len(prompt), "rows": [[0, len(prompt)]], "chunks": []}
    linked = client.complete(prompt, 8, {"mpic": {"version": 1, "link": order}})
    assert linked["choices"][0]["text"] == client.complete(prompt, 8)["choices"][0]["text"]
    assert linked["kv_transfer_params"]["mpic"]["recomputed"] == len(prompt)
