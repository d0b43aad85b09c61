"""Makes vLLM compute a chunk, and reads it from the files that vLLM's workers write, one file per worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.engine.vllm.wire import DISK_FULL, NO_MEMORY, NOT_WRITTEN, CompileOrder, part_name
from mpic.errors import CompileFailed, EngineStopped, OutOfMemory, StorageFull
from mpic.kv.chunk import ChunkInputs
from mpic.memory import as_errors, is_exhaustion

POLL_SECONDS = 0.002
SPOOL = "spool"
"""The folder below the store's root that workers write to."""
Part = tuple[dict[str, str], torch.Tensor]
"""A worker's metadata and its ``kv [layers, 2, heads, n, head_dim]``."""


async def compute(
    client: VLLMClient,
    root: Path,
    folder: str,
    prompt: VLLMPrompt,
    sink: int,
    user: str,
    computed: Callable[[], None] = lambda: None,
) -> tuple[ChunkInputs, torch.Tensor]:
    """Compute a prompt that is one chunk behind start tokens, and return what its workers exported.

    Args:
        root: folder of the chunk store, which the spool is in.
        folder: name of a new folder in the spool, which the caller removes afterwards.
        sink: number of start tokens, which are left out of the result.
        user: the user whose turn the compile takes.
        computed: called when vLLM has done its part, before the files are read.

    Raises:
        StorageFull, OutOfMemory, EngineStopped, CompileFailed, OSError: see ``VLLMClient.execute`` and
            ``read_compiled``.
    """
    path = root / SPOOL / folder
    await asyncio.to_thread(_make_private, path)
    await client.execute(prompt, CompileOrder(str(path.relative_to(root)), sink), user)
    computed()
    return await asyncio.to_thread(read_compiled, path, dead=lambda: client.dead)


def _make_private(folder: Path) -> None:
    """Make a folder that no other user can read in the spool, and the spool itself if it has been removed."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)


def read_compiled(
    folder: Path, timeout: float = 30.0, dead: Callable[[], bool] = lambda: False
) -> tuple[ChunkInputs, torch.Tensor]:
    """Read a compiled chunk from its workers' files, which may still be being written.

    Args:
        folder: the compile order's folder, absolute.
        timeout: seconds without any write to wait for, once the request has ended. A worker writes one chunk after
            another, so writes to the neighbouring folders count, too.
        dead: tells whether vLLM's processes have ended, so that nothing more will be written.

    Returns:
        The chunk's inputs and its ``kv [layers, 2, kv_heads, n, head_dim]``, keys at chunk-local positions offset by
        the sink tokens.

    Raises:
        StorageFull: a worker found the disk full.
        OutOfMemory: a worker or this process ran out of memory.
        EngineStopped: vLLM's processes have ended.
        CompileFailed: a part is missing or cannot be read.
    """
    with as_errors():
        metadata, tensors, parts = _read_parts(folder, timeout, dead)
        inputs = ChunkInputs(rotary_length=int(metadata["extent"]), **tensors)
        return inputs, _together(parts)


def _read_parts(
    folder: Path, timeout: float, dead: Callable[[], bool]
) -> tuple[dict[str, str], dict[str, torch.Tensor], list[Part]]:
    """Return the first file's metadata and inputs, and every worker's part."""
    first = _wait(folder, part_name(0, 0), timeout, dead)
    try:
        with safe_open(first, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = [(metadata, tensors.pop("kv"))]
        tensor_ranks, pipeline_ranks = map(int, metadata["ranks"].split())
        for rank in range(1, tensor_ranks * pipeline_ranks):
            name = part_name(rank % tensor_ranks, rank // tensor_ranks)
            with safe_open(_wait(folder, name, timeout, dead), "pt") as file:
                parts.append((file.metadata(), file.get_tensor("kv")))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if is_exhaustion(error):
            raise
        raise CompileFailed(f"a compiled chunk cannot be read: {error!r}") from error
    return metadata, tensors, parts


def _together(parts: list[Part]) -> torch.Tensor:
    """Return the KV of all workers."""
    if len(parts) == 1:
        return parts[0][1]
    bounds = [(*map(int, m["layers"].split()), *map(int, m["heads"].split())) for m, _ in parts]
    layers, heads = max(b[1] for b in bounds), max(b[3] for b in bounds)
    one = parts[0][1]
    kv = one.new_empty(layers, 2, heads, *one.shape[3:])
    for (low, high, left, right), (_, part) in zip(bounds, parts, strict=True):
        kv[low:high, :, left:right] = part
    return kv


def _wait(folder: Path, name: str, timeout: float, dead: Callable[[], bool]) -> Path:
    path = folder / f"{name}.safetensors"
    written, limit = _written(folder.parent), time.monotonic() + timeout
    while not path.exists():
        if (folder / f"{name}{DISK_FULL}").exists():
            raise StorageFull("the disk is full: the chunk was not compiled")
        if (folder / f"{name}{NO_MEMORY}").exists():
            raise OutOfMemory("there is not enough memory now: the chunk was not compiled")
        failed = (folder / f"{name}{NOT_WRITTEN}").exists()
        if not failed and time.monotonic() > limit:
            before, written = written, _written(folder.parent)
            failed, limit = written == before, time.monotonic() + timeout
        if failed and not path.exists():
            raise CompileFailed(f"{name} of the compiled chunk was not written")
        if dead() and not path.exists():
            raise EngineStopped("vLLM's engine has died; start the server again")
        time.sleep(POLL_SECONDS)
    return path


def _written(spool: Path) -> set[tuple[str, int, int, int]]:
    """Return all files in the folders of a spool, with attributes that change while a file is written."""
    found = set()
    for name in glob("*/*", root_dir=spool):  # unlike Path.glob, this ignores folders that vanish
        with suppress(OSError):  # the chunk is complete, or no caller waits any more
            stat = (spool / name).stat()
            found.add((name, stat.st_size, stat.st_blocks, stat.st_mtime_ns))
    return found
