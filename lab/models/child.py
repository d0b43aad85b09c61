"""The check of one family on one engine, which ``sweep`` runs in a process of its own."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from mpic_lab.models.check import check


def run(send: Connection, family: str, kind: str, engine: str = "native", scratch: str | None = None) -> None:
    """Check one family and send its row. Whatever transformers or vLLM print is dropped.

    Args:
        scratch: folder for temporary files; the system's own if left out.
    """
    tempfile.tempdir = scratch or tempfile.tempdir
    with tempfile.NamedTemporaryFile(prefix="mpic-family-", suffix=".log") as log:
        for output in (1, 2):
            os.dup2(log.fileno(), output)
        warnings.filterwarnings("ignore")
        logging.disable(logging.CRITICAL)
        if engine == "native":
            row = check(family, kind)
        else:
            from mpic_lab.models.on_vllm import check_on_vllm

            row = check_on_vllm(family, kind, Path(log.name))
        send.send(tuple(row))
