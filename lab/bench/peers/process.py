"""A peer's server as a process of its own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from mpic_lab.bench.harness import BenchFailed

START_SECONDS = 300.0
REQUEST_SECONDS = 1800.0


class PeerProcess:
    """Starts a server and waits until it is healthy.

    Args:
        name: of the program, for errors.
        log: file that its output is written to.
        health: path that answers 200 when the server is ready.

    Attributes:
        http: client for requests to it.

    Raises:
        BenchFailed: the server ends, or is not healthy in time; the message holds the end of its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        port: int,
        health: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=REQUEST_SECONDS,
            # it closes idle connections while others take turns
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        try:
            self._wait(log, health)
        except BaseException:
            self.close()
            raise

    def _wait(self, log: Path, health: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.http.get(health).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.1)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BenchFailed(f"{self._name} did not start:\n{tail}")

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self.http.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
