"""Reads compiled chunks from the files that vLLM's workers write, one file per worker."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mpic.engine.vllm.wire import DISK_FULL, NOT_WRITTEN, part_name
from mpic.errors import CompileFailed, StorageFull
from mpic.kv.chunk import ChunkInputs

POLL_SECONDS = 0.002


def read_compiled(folder: Path, timeout: float = 30.0) -> tuple[ChunkInputs, torch.Tensor]:
    """Reads a compiled chunk from its workers' files, which may still be being written.

    Args:
        folder: the compile order's folder, absolute.
        timeout: seconds to wait for the files once the request has ended.

    Returns:
        The chunk's inputs and its ``kv [layers, 2, kv_heads, n, head_dim]``, keys at chunk-local positions offset by
        the sink tokens.

    Raises:
        StorageFull: a worker found the disk full.
        CompileFailed: a part is missing or cannot be read.
    """
    limit = time.monotonic() + timeout
    first = _wait(folder, part_name(0, 0), limit)
    try:
        with safe_open(first, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = [(metadata, tensors.pop("kv"))]
        tensor_ranks, pipeline_ranks = map(int, metadata["ranks"].split())
        for rank in range(1, tensor_ranks * pipeline_ranks):
            name = part_name(rank % tensor_ranks, rank // tensor_ranks)
            with safe_open(_wait(folder, name, limit), "pt") as file:
                parts.append((file.metadata(), file.get_tensor("kv")))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CompileFailed(f"a compiled chunk cannot be read: {error!r}") from error
    inputs = ChunkInputs(rotary_length=int(metadata["extent"]), **tensors)
    if len(parts) == 1:
        return inputs, parts[0][1]
    bounds = [(*map(int, m["layers"].split()), *map(int, m["heads"].split())) for m, _ in parts]
    layers, heads = max(b[1] for b in bounds), max(b[3] for b in bounds)
    one = parts[0][1]
    kv = one.new_empty(layers, 2, heads, *one.shape[3:])
    for (low, high, left, right), (_, part) in zip(bounds, parts, strict=True):
        kv[low:high, :, left:right] = part
    return inputs, kv


def _wait(folder: Path, name: str, limit: float) -> Path:
    path = folder / f"{name}.safetensors"
    while not path.exists():
        if (folder / f"{name}{DISK_FULL}").exists():
            raise StorageFull("the disk is full: the chunk was not compiled")
        if (folder / f"{name}{NOT_WRITTEN}").exists() or time.monotonic() > limit:
            raise CompileFailed(f"{name} of the compiled chunk was not written")
        time.sleep(POLL_SECONDS)
    return path
