"""64 clients stream from the demo model at once; a third of them leave early. No error, no page and no file handle is
lost, memory stays flat, and the pages of a client that disconnects are freed within one step.

Ten seconds in the suite, ten minutes in ``make soak-load``; with ``-s`` it prints its figures.
"""

import asyncio
import itertools
import json
import random
import time

import httpx
import psutil
import pytest
from server_helpers import wait_until
from small_models import SMALL, SMALL_SAMPLES

from mpic_lab.demo import running_server

CLIENTS = 64
READERS = 48
"""SQLite keeps the file of a closed reader open while others read (a lock of POSIX would go with it) and uses it again:
as many as ever read at once, which the server's worker threads bound."""
POLICIES = ("mpic-16", "reuse", "prefix", "legolink-16", "full")
POOL_BYTES = 48 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(url, process) of a server on the small demo model, with every sample of the manifest's first dozen."""
    data = tmp_path_factory.mktemp("load")
    before = {p.pid for p in psutil.Process().children()}
    with running_server(data, str(SMALL), "--pool-bytes", str(POOL_BYTES)) as (url, _):
        [process] = [p for p in psutil.Process().children() if p.pid not in before]
        yield url, process


async def settle(http):
    while True:
        engine = (await http.get("/health")).json()["engine"]
        if engine["running"] == engine["waiting"] == 0:
            return engine
        await asyncio.sleep(0.02)


def stream_of(text, policy, max_tokens):
    messages = [{"role": "user", "content": text}]
    options = {"policy": policy, "ignore_eos": True}
    return {"messages": messages, "max_tokens": max_tokens, "stream": True, "mpic": options}


async def one(http, rng, handles, counts):
    """Run one conversation: a question about one or two uploads, and a follow-up; it may be cut short."""
    named = " and ".join(f"IMAGE#{h}" for h in rng.sample(handles, rng.choice((1, 2))))
    question = f"{named} What is the colour of the ring? {rng.random():.4f}"
    body = stream_of(question, rng.choice(POLICIES), rng.randint(4, 24))
    body["stream_options"] = {"include_usage": True}
    leaves = rng.random() < 1 / 3
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise AssertionError((await response.aread()).decode())
        said = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                counts["answers"] += 1
                return
            if line:
                frame = json.loads(line.removeprefix("data: "))
                assert "error" not in frame, frame
                said += 1
            if leaves and said > 3:
                counts["left"] += 1
                return
        raise AssertionError("a stream ended without [DONE]")


async def load(url, handles, seconds, counts, seed):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def client(i):
            rng = random.Random(seed * 1000 + i)
            while time.monotonic() < end:
                await one(http, rng, handles, counts)

        await asyncio.gather(*(client(i) for i in range(CLIENTS)))
        return await settle(http)


def held(process):
    """(memory that is the process's own in bytes, open files and sockets)."""
    return process.memory_full_info().uss, process.num_fds()


def others(process):
    """Return how many descriptors the process has besides those of its databases."""
    return process.num_fds() - sum(".sqlite" in file.path for file in process.open_files())


async def upload(url, n=6):
    listed = json.loads((SMALL_SAMPLES / "manifest.json").read_text())["files"]
    entries = [e for e in listed if e["kind"] == "image"][:n]
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for entry in entries:
            files = {"file": (entry["path"], (SMALL_SAMPLES / entry["path"]).read_bytes())}
            form = {"purpose": "vision", "handle": entry["handle"]}
            id = (await http.post("/v1/files", data=form, files=files)).json()["id"]
            while (await http.get(f"/v1/files/{id}")).json()["state"] == "compiling":
                await asyncio.sleep(0.02)
    return [entry["handle"] for entry in entries]


async def test_64_clients_leave_nothing_behind(served, request):
    url, process = served
    seconds = request.config.getoption("--load-seconds")
    handles = await upload(url)
    counts = {"answers": 0, "left": 0}
    await load(url, handles, seconds / 3, counts, 0)  # warms pools, caches and threads up
    before = held(process)
    figures = []
    for seed in range(1, 3):
        engine = await load(url, handles, seconds / 3, counts, seed)
        await wait_until(lambda: others(process) <= before[1] + 8)  # sockets close
        pages = engine["pages"]
        assert pages["running"] == 0
        assert pages["free"] + pages["chunks"] + pages["prefix"] == pages["total"]
        figures.append(held(process))
    assert counts["answers"] > CLIENTS and counts["left"] > 0
    assert engine["counters"].get("failed", 0) == 0
    memory, handles_open = figures[-1]
    print(f"\n{counts} in {seconds:g} s")
    print(f"memory {before[0] >> 20} -> {memory >> 20} MiB, handles {before[1]} -> {handles_open}")
    assert memory < before[0] * 1.1 + (16 << 20)
    files = [f.path for f in process.open_files()]
    assert sum(path.endswith(".sqlite") for path in files) <= READERS


async def test_a_client_that_leaves_frees_its_pages_within_one_step(served):
    url, _ = served
    body = stream_of("tell me everything", "full", 1900)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        idle = await settle(http)
        for _ in itertools.repeat(None, 3):
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                running = (await http.get("/health")).json()["engine"]
                assert running["running"] == 1 and running["pages"]["running"] > 0
            gone = await settle(http)
            assert gone["pages"]["running"] == 0
        assert gone["counters"]["finished_abort"] - idle["counters"].get("finished_abort", 0) == 3
