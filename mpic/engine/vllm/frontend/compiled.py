"""Has vLLM compute a chunk, and reads it from the files that its workers write, one file per worker."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from glob import glob
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.engine.vllm.wire import DISK_FULL, NOT_WRITTEN, CompileOrder, part_name
from mpic.errors import CompileFailed, StorageFull
from mpic.kv.chunk import ChunkInputs

POLL_SECONDS = 0.002
SPOOL = "spool"
"""The folder below the store's root that workers write to."""


async def compute(
    client: VLLMClient, root: Path, folder: str, prompt: VLLMPrompt, sink: int
) -> tuple[ChunkInputs, torch.Tensor]:
    """Computes a prompt that is one chunk behind start tokens, and returns what its workers exported.

    Args:
        root: folder of the chunk store, which the spool is in.
        folder: name of a new folder in the spool, which the caller removes afterwards.
        sink: number of the start tokens, which are left out.

    Raises:
        StorageFull, CompileFailed, OSError: see ``VLLMClient.execute`` and ``read_compiled``.
    """
    path = root / SPOOL / folder
    await asyncio.to_thread(_make_private, path)
    await client.execute(prompt, CompileOrder(str(path.relative_to(root)), sink))
    return await asyncio.to_thread(read_compiled, path)


def _make_private(folder: Path) -> None:
    """Makes a folder in the spool, and the spool if it has been removed, which nobody else can read."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)


def read_compiled(folder: Path, timeout: float = 30.0) -> tuple[ChunkInputs, torch.Tensor]:
    """Reads a compiled chunk from its workers' files, which may still be being written.

    Args:
        folder: the compile order's folder, absolute.
        timeout: seconds to wait, once the request has ended, while nothing is written. A worker writes one chunk after
            the other, so that what it writes for others counts: anything in a folder beside this one.

    Returns:
        The chunk's inputs and its ``kv [layers, 2, kv_heads, n, head_dim]``, keys at chunk-local positions offset by
        the sink tokens.

    Raises:
        StorageFull: a worker found the disk full.
        CompileFailed: a part is missing or cannot be read.
    """
    first = _wait(folder, part_name(0, 0), timeout)
    try:
        with safe_open(first, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = [(metadata, tensors.pop("kv"))]
        tensor_ranks, pipeline_ranks = map(int, metadata["ranks"].split())
        for rank in range(1, tensor_ranks * pipeline_ranks):
            name = part_name(rank % tensor_ranks, rank // tensor_ranks)
            with safe_open(_wait(folder, name, timeout), "pt") as file:
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


def _wait(folder: Path, name: str, timeout: float) -> Path:
    path = folder / f"{name}.safetensors"
    written, limit = _written(folder.parent), time.monotonic() + timeout
    while not path.exists():
        if (folder / f"{name}{DISK_FULL}").exists():
            raise StorageFull("the disk is full: the chunk was not compiled")
        failed = (folder / f"{name}{NOT_WRITTEN}").exists()
        if not failed and time.monotonic() > limit:
            before, written = written, _written(folder.parent)
            failed, limit = written == before, time.monotonic() + timeout
        if failed and not path.exists():
            raise CompileFailed(f"{name} of the compiled chunk was not written")
        time.sleep(POLL_SECONDS)
    return path


def _written(spool: Path) -> set[tuple[str, int, int, int]]:
    """Returns everything in the folders of a spool, with what changes as it is written."""
    found = set()
    for name in glob("*/*", root_dir=spool):  # unlike Path.glob, it takes no notice of folders that vanish
        with suppress(OSError):  # it is complete, or nobody waits any more
            stat = (spool / name).stat()
            found.add((name, stat.st_size, stat.st_blocks, stat.st_mtime_ns))
    return found
