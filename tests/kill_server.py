"""``mpic serve`` as a process of its own, to be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

POOL_BYTES = 128 * 12_288


class Server:
    """Running after construction; ``kill`` is kill -9."""

    def __init__(self, data_dir: Path, model: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "mpic.cli",
            "serve",
            "--json",
            "--port",
            "0",
            "--log-level",
            "warning",
        ]
        command += ["--data-dir", str(data_dir), "--model", str(model), "--pool-bytes", str(POOL_BYTES)]
        log = data_dir.with_suffix(".log")
        with log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        line = self.process.stdout.readline()
        if not line:
            self.kill()
            raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")
        self.url = json.loads(line)["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
