"""``mpic serve`` as a process of its own, to be killed: forked from one that has imported what a server needs."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

POOL_BYTES = 128 * 12_288
FORKS = multiprocessing.get_context("forkserver")
LLAVA = "transformers.models.llava.modeling_llava"
FORKS.set_forkserver_preload(["mpic.cli.serve", "mpic.server.app", "mpic.engine.native.engine", LLAVA])


def _serve(words: list[str], out: Connection, log: Path) -> None:
    from mpic import cli

    with log.open("ab") as errors:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # the one before believes that it is a file, which can seek
    sys.argv = ["mpic", "serve", *words]
    cli.main()


class Server:
    """A server that runs after construction; ``kill`` is kill -9."""

    def __init__(self, data_dir: Path, model: Path) -> None:
        words = ["--json", "--port", "0", "--log-level", "warning", "--data-dir", str(data_dir)]
        words += ["--model", str(model), "--pool-bytes", str(POOL_BYTES)]
        log, (said, out) = data_dir.with_suffix(".log"), FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=_serve, args=(words, out, log))
        self.process.start()
        out.close()
        with open(os.dup(said.fileno())) as lines:
            line = lines.readline()
        if not line:
            self.kill()
            raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")
        self.url = json.loads(line)["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
