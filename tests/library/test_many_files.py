"""A library of many files opens quickly and in little memory, after a clean end and after a kill."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from library_life import Unsynced

from mpic.kv.chunk import ChunkInputs, ChunkKV, KVKey, Recipe
from mpic.library import Library

FILES, USERS, LEFT = 1_000, 20, 20


def fill(root):
    with Library.open(root, filesystem=Unsynced()) as library:
        for number in range(FILES):
            user = f"user {number % USERS}"
            content = f"document {number}".encode()
            file = library.files.add(user, content, f"{number}.txt", handle=f"H{number}")
            key = KVKey(user, file.key, "00" * 32, Recipe("float32"))
            inputs = ChunkInputs(torch.arange(16), torch.arange(16)[None], 16)
            library.store.save(ChunkKV(key, inputs, torch.zeros(2, 2, 1, 16, 8)))
            library.files.set_state(user, file.id, "ready", 16)


def child(root, kill):
    """Open a library, print time and memory, and end: cleanly, or like a killed process after some uploads."""
    process = psutil.Process()
    before, began = process.memory_info().rss, time.process_time()
    library = Library.open(root)
    seconds, memory = time.process_time() - began, process.memory_info().rss - before
    stats = library.stats()
    counts = {"files": stats["files"], "chunks": stats["disk"]["chunks"]}
    print(json.dumps({**counts, "seconds": seconds, "mib": memory / 2**20, **library.recovered}), flush=True)
    if kill:
        for file in library.files.page("user 0", limit=100).files[:LEFT]:
            library.files.set_state("user 0", file.id, "ready", 16)  # a row in the write-ahead log
            (root / "tmp" / f"{secrets.token_hex(12)}.tmp").write_bytes(b"left")
        os._exit(0)
    library.close()


def start(root, how):
    code = f"import test_many_files as t; t.child(t.Path({str(root)!r}), {how == 'kill'})"
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_many_files_open_quickly_and_in_little_memory(tmp_path):
    fill(tmp_path)
    for how, leftovers in (("kill", 0), ("close", LEFT)):
        found = start(tmp_path, how)
        assert (found["files"], found["chunks"], found["leftovers"]) == (FILES, FILES, leftovers)
        assert found["seconds"] < 10 and found["mib"] < 64
