"""Exports compiled chunks from vLLM: threads read their KV from the paged cache and write it, without holding up a
step.

The step that computes a prompt's last tokens marks the work queued on the device so far (``kv/readback.py``) and takes
a snapshot of the state that other requests would change (``prompt_snapshot.py``). The scheduler keeps the prompt's
blocks after the request has ended, until every worker has reported that it has read its part (``released``).

Every worker writes one file with its layers and heads (``wire.part_name``); the first worker adds the inputs that the
model's first layer saw. ``frontend.compiled`` puts the files together.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from mpic.durable import FULL, TEMPORARY
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.prompt_snapshot import PromptSnapshot, snapshot
from mpic.engine.vllm.plugin.step_messages import ChunkExport, EndReason
from mpic.engine.vllm.wire import DISK_FULL, NO_MEMORY, NOT_WRITTEN, part_name
from mpic.kv.readback import Readback, readback_for
from mpic.memory import is_exhaustion

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

    from mpic.engine.vllm.plugin.runner import LinkRunner

logger = logging.getLogger(__name__)


class _Job(NamedTuple):
    """An export under way.

    Args:
        prompt: the first layer's inputs; None for workers that do not export them.
        mark: the device work that must be complete before the KV is read.
        read: set once the blocks have been read or will not be read.
    """

    export: ChunkExport
    prompt: PromptSnapshot | None
    mark: Any
    read: threading.Event


class KVExporter:
    """Exports a worker's part of compiled chunks. All methods are called by the thread that runs steps.

    Args:
        readback: None chooses by the device.
    """

    def __init__(self, readback: Readback | None = None) -> None:
        self._readback = readback
        self._reader = ThreadPoolExecutor(1, "mpic-export")
        self._writer = ThreadPoolExecutor(1, "mpic-export-write")
        self._held: dict[str, threading.Event] = {}  # requests whose blocks the scheduler keeps
        self._ended: set[str] = set()  # the ones that have ended

    def export(self, runner: LinkRunner, request: str, export: ChunkExport) -> None:
        """Begin to export a prompt that the current step computes to its end. An error ends the request and is not
        raised."""
        read = self._held[request] = threading.Event()
        paged, parallel = runner.paged, runner.vllm_config.parallel_config
        try:
            prompt = snapshot(runner, request, export) if paged.rank[1] == 0 else None
            readback = self._readback = self._readback or readback_for(paged.device)
            job = _Job(export, prompt if paged.rank[0] == 0 else None, readback.mark(), read)
            self._reader.submit(_run, job, paged, readback, parallel, self._writer)
        except Exception as error:  # an exception here would end the engine
            read.set()
            message = f"the chunk's KV could not be read: {error!r}"
            runner.report.faults[request] = EndReason.of(error, "compile_failed", message)
            return
        if parallel.pipeline_parallel_size > 1:
            # a step already under way may preempt the request, which would give its blocks to another request
            read.wait()

    def released(self, finished: Set[str]) -> set[str]:
        """Return the requests whose blocks this worker no longer needs, each of them once.

        Args:
            finished: requests that have ended since the last call. The scheduler must not be told of any others.
        """
        self._ended |= finished & self._held.keys()
        released = {request for request in self._ended if self._held[request].is_set()}
        for request in released:
            del self._held[request]
        self._ended -= released
        return released

    def close(self) -> None:
        """Wait until everything is written."""
        self._reader.shutdown()
        self._writer.shutdown()


def _run(
    job: _Job, paged: PagedCache, readback: Readback, parallel: ParallelConfig, writer: ThreadPoolExecutor
) -> None:
    """Read an export and have it written, on the thread that reads."""
    path = Path(job.export.folder) / f"{part_name(*paged.rank)}.safetensors"
    with _errors_told(path):
        try:
            with torch.inference_mode(), readback.behind(job.mark):
                tensors, metadata = _read(job, paged, readback)
        finally:
            job.read.set()
        metadata["ranks"] = f"{parallel.tensor_parallel_size} {parallel.pipeline_parallel_size}"
        written = writer.submit(_write, path, tensors, metadata)
        if parallel.pipeline_parallel_size == 1:
            # wait for the disk: the next prompts keep their blocks that long, so that no KV piles up in host memory.
            # Steps of several pipeline stages wait for reads, so there a read must not wait for the disk
            written.result()


@contextmanager
def _errors_told(path: Path) -> Iterator[None]:
    """Tell the frontend of an error inside the block by an empty file."""
    try:
        yield
    except Exception as error:
        logger.warning("a compiled chunk is not exported: %r", error)
        full = (isinstance(error, OSError) and error.errno in FULL) or "No space left" in str(error)
        name = DISK_FULL if full else NO_MEMORY if is_exhaustion(error) else NOT_WRITTEN
        # the folder is gone because no caller waits any more; otherwise the frontend times out
        with suppress(OSError):
            path.with_suffix(TEMPORARY).unlink(missing_ok=True)
            path.with_name(path.stem + name).touch()


def _read(job: _Job, paged: PagedCache, readback: Readback) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read KV layer by layer, so that the device never holds a second copy of the whole, and the prompt's inputs."""
    skip, length = job.export.skip, len(job.export.token_ids)
    blocks = torch.tensor(job.export.blocks).to(paged.device)
    kv: torch.Tensor | None = None
    for number in range(len(paged.layers)):
        layer = readback.to_host(paged.read_layer(number, blocks, skip, length))
        kv = layer.new_empty(len(paged.layers), *layer.shape) if kv is None else kv
        kv[number] = layer
    assert kv is not None, "a worker has at least one layer"
    tensors = {"kv": kv}
    metadata = {
        "layers": f"{paged.layers.start} {paged.layers.stop}",
        "heads": f"{paged.heads.start} {paged.heads.stop}",
    }
    if job.prompt is not None:
        inputs = job.prompt.inputs(readback.to_host)
        metadata["extent"] = str(inputs.rotary_length)
        given = {name: getattr(inputs, name) for name in ("token_ids", "positions", "embeds", "deepstack")}
        tensors |= {name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}
    return tensors, metadata


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write an export, on the thread that writes."""
    temporary = path.with_suffix(TEMPORARY)
    with _errors_told(path):
        save_file(tensors, temporary, metadata)
        os.replace(temporary, path)
