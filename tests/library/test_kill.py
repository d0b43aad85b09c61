"""A process killed in the middle of its work: everything it acknowledged is there, nothing else is visible."""

import subprocess
import sys

import torch
from library_tools import everything, make_chunk, read, text_key

from mpic.library import Library

WORK = """
import sys
from pathlib import Path
from library_tools import make_chunk, text_key
from mpic.library import Library

library = Library.open(Path(sys.argv[1]))
for i in range(int(sys.argv[2]), 10_000):
    text = f"text {i}"
    library.files.add("ann", (text * 1000).encode(), "t.txt", handle=f"H{i}")
    library.store.save(make_chunk(text_key(text), n=200, seed=i))
    print(i, flush=True)
"""


def test_kill_nine(tmp_path, request):
    tests = str(request.config.rootpath / "tests")
    acknowledged = -1
    for number in range(2):
        worker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.insert(0, {tests!r})\n{WORK}",
                tmp_path,
                str(acknowledged + 2),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2 + 3 * number):
            acknowledged = int(worker.stdout.readline())
        worker.kill()
        acknowledged = max([acknowledged, *map(int, worker.stdout.read().split())])
        worker.wait()

        with Library.open(tmp_path) as library:
            library.check()
            handles = {file.handle: file for file in library.files.page("ann").files}
            stored = 0
            for i in range(acknowledged + 2):
                chunk = make_chunk(text_key(f"text {i}"), n=200, seed=i)
                found = library.store.open(chunk.key)
                stored += found is not None
                assert found is None or torch.equal(read(found, chunk.kv), chunk.kv)
                if f"H{i}" in handles:
                    content = library.files.content("ann", handles[f"H{i}"].id)
                    assert content == (f"text {i}" * 1000).encode()
            assert f"H{acknowledged}" in handles
            assert library.store.open(text_key(f"text {acknowledged}")) is not None
            assert library.recovered["lost_files"] == library.recovered["missing_chunks"] == 0
            names = everything(tmp_path)
            assert len([n for n in names if n.startswith("files/")]) == len(handles)
            assert len([n for n in names if n.startswith("kv/")]) == stored
            acknowledged = max(acknowledged, max(int(handle[1:]) for handle in handles))
