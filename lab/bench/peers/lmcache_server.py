"""LMCache as one of the peers: vLLM whose keys and values go to a server of LMCache and come back from it."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from importlib.metadata import version

from mpic.engine.vllm.frontend.options import prepare_environment
from mpic_lab.bench.peers import plain_vllm
from mpic_lab.bench.peers.process import PeerProcess, free_port
from mpic_lab.bench.peers.weights import Weights

CONNECTOR = "LMCacheMPConnector"
NO_BLENDING = (
    "only prefixes are found again: its server refuses to blend (--engine-type blend) with engine-driven transfers, "
    "the only ones that CPUs have"
)


def why_not(weights: Weights | None = None) -> str | None:
    """Return the reason why LMCache cannot be measured here, or None."""
    if importlib.util.find_spec("lmcache") is None:
        return "lmcache is not installed (pip install lmcache, with what it needs beside CUDA)"
    return plain_vllm.why_not(weights)


class LMCache(plain_vllm.VLLM):
    """vLLM with LMCache's connector, and the server that it stores keys and values in. Both keep prefixes.

    Raises:
        BenchFailed: the server does not start.
    """

    name = "LMCache"

    def __init__(self, weights: Weights) -> None:
        prepare_environment()  # before vLLM is imported
        from vllm.config import KVTransferConfig

        settings = weights.settings
        kept = settings.kept_tokens * settings.decoder.token_bytes(weights.placement.dtype)
        gibibytes = str(math.ceil(kept / 2**30 + 0.1))  # whole ones are what it takes
        port, http = free_port(), free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http)]
        options += ["--l1-size-gb", gibibytes, "--l1-init-size-gb", gibibytes, "--eviction-policy", "LRU"]
        if weights.placement.device.type == "cpu":  # by default it would copy from a GPU by itself
            options += ["--supported-transfer-mode", "engine_driven"]
        command = [sys.executable, "-m", "lmcache.cli.main", "server", *options, "--disable-observability"]
        # the hashes of a prompt must be the same in both processes
        os.environ.setdefault("PYTHONHASHSEED", "0")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        log = weights.folder.parent / "lmcache.log"
        self._server = PeerProcess("LMCache's server", command, log, http, "/healthcheck")
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        transfer = KVTransferConfig(
            kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_extra_config=extra
        )
        try:
            super().__init__(weights, {"kv_transfer_config": transfer})
        except BaseException:
            self._server.close()
            raise
        ours = f"lmcache {version('lmcache')}, server {' '.join(options[6:])}, {CONNECTOR}"
        self.detail = f"{ours}; {NO_BLENDING}; {self.detail}"

    def reset(self) -> None:
        super().reset()
        self._server.http.post("/cache/clear", json={}).raise_for_status()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._server.close()
