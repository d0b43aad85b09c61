"""Remote stores for tests: a folder behind a client that fails on demand, and an S3 server of moto on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from obstore.store import LocalStore, S3Store

from mpic.library import Library
from mpic.library.store import Objects, RemoteTier

PATIENCE = 60.0
"""Seconds that a test waits for what will happen: far more than it takes."""


class FaultyClient:
    """A client of obstore that counts its calls and fails on demand.

    Attributes:
        calls: (name of the method, first argument) of each.
        fault: called with each before it is made; it may raise, or wait.
        change: called with what a ``get`` has read; returns what the caller is given.
    """

    class Body:
        def __init__(self, result, data):
            self.meta, self._data = result.meta, data

        def bytes(self):
            return self._data

    def __init__(self, client):
        self._client = client
        self.calls = []
        self.fault = lambda method, name: None
        self.change = lambda name, data: data

    def __getattr__(self, method):
        def call(*args, **options):
            name = str(args[0]) if args else ""
            self.calls.append((method, name))
            self.fault(method, name)
            result = getattr(self._client, method)(*args, **options)
            if method == "get":
                return self.Body(result, self.change(name, bytes(result.bytes())))
            return result

        return call

    def count(self, method):
        return sum(called == method for called, _ in self.calls)


class Dead:
    """A fault: nothing answers while ``down``."""

    def __init__(self, down=True):
        self.down = down

    def __call__(self, method, name):
        if self.down:
            raise ConnectionError("no route to host")


class Hung:
    """A fault: reads of names that match are answered when ``go`` is set."""

    def __init__(self, method="get", pattern=""):
        self.go, self.reached = threading.Event(), threading.Event()
        self._method, self._pattern = method, pattern

    def __call__(self, method, name):
        if method == self._method and re.search(self._pattern, name):
            self.reached.set()
            assert self.go.wait(PATIENCE)


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now, self.lock = 1000.0, threading.Lock()

    def __call__(self):
        return self.now


def folder_client(folder: Path):
    return FaultyClient(LocalStore(folder, mkdir=True))


def server(
    root, client=None, seconds=PATIENCE, queue=1024, clock_remote=time.monotonic, objects=None, **options
):
    """Open the library of a server over a remote store."""
    objects = objects or Objects(seconds, client, clock=clock_remote)
    return Library.open(root, remote=[RemoteTier(objects, queue)], **options)


def tier_of(library):
    return library.store._farther[0]


def settled(library):
    """Wait until nothing is left to be written; return the tier's counters."""
    tier = tier_of(library)
    left = lambda: tier._working or tier._uploads or tier._deletions or tier._damaged
    with tier._changed:
        assert tier._changed.wait_for(lambda: not left(), PATIENCE), "it has not been written"
    return tier.stats()


class S3Server:
    """An S3 server in a process of its own; ``kill`` ends it as a crash does."""

    def __init__(self):
        script = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"
        self.process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.url = found.group(0)
                break
        else:
            raise RuntimeError("the S3 server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def options(self):
        return {
            "aws_endpoint": self.url,
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }

    def client(self, bucket="bucket", prefix=None):
        return S3Store(bucket, prefix=prefix, config=self.options())

    def make_bucket(self, name="bucket"):
        import httpx

        httpx.put(f"{self.url}/{name}", timeout=PATIENCE).raise_for_status()

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_server():
    server = S3Server()
    try:
        server.make_bucket()
        yield server
    finally:
        server.kill()
