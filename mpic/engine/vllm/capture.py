"""Compiled chunks out of vLLM: read from the paged cache in the step that ends their prompt, written by a thread.

Every worker writes ``rank-<tensor>-<pipeline>.safetensors`` with its layers and heads; the first one adds the inputs
that the model's first layer saw. ``read_compiled`` puts them together.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mpic.durable import FULL, TEMPORARY
from mpic.errors import CompileFailed, StorageFull
from mpic.kv.chunk import ChunkInputs

if TYPE_CHECKING:
    from mpic.engine.vllm.runner import LinkRunner
    from mpic.engine.vllm.steps import CompileEnd

FAILED = ".failed"
"""Suffix of the file that stands for a worker's part when it could not be written."""
POLL_SECONDS = 0.002


class Capture:
    """The writing end, one a worker."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Path, dict[str, torch.Tensor], dict[str, str]] | None] = (
            queue.SimpleQueue()
        )
        self._writer = threading.Thread(target=self._write, name="mpic-write", daemon=True)
        self._writer.start()

    def take(self, runner: LinkRunner, request: str, end: CompileEnd) -> None:
        """Copy a prompt's KV and inputs; they are written later. Never raises: what goes wrong ends the request."""
        from mpic.engine.vllm.steps import Fault

        try:
            tensors, metadata = _take(runner, request, end)
        except Exception as error:  # it would end the engine
            runner.report.faults[request] = Fault(
                "compile_failed", f"the chunk's KV could not be read: {error!r}"
            )
            return
        self._jobs.put((Path(end.folder) / f"rank-{runner.paged.rank}.safetensors", tensors, metadata))

    def close(self) -> None:
        """When everything is written."""
        self._jobs.put(None)
        self._writer.join()

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            path, tensors, metadata = job
            temporary = path.with_suffix(TEMPORARY)
            try:
                save_file(tensors, temporary, metadata)
                os.replace(temporary, path)
            except Exception as error:  # the reader learns it from a file that needs no room
                _give_up(temporary, path.with_suffix(FAILED), error)


def _give_up(temporary: Path, failed: Path, error: Exception) -> None:
    full = (isinstance(error, OSError) and error.errno in FULL) or "No space left" in str(error)
    try:
        temporary.unlink(missing_ok=True)
        failed.with_name(f"{failed.stem}-{'full' if full else 'error'}{FAILED}").touch()
    except OSError:
        pass  # the folder is gone: nobody waits any more, or the reader's own time runs out


def _take(runner: Any, request: str, end: CompileEnd) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    state, paged = runner.requests[request], runner.paged
    length = len(state.prompt_token_ids)
    kv = paged.read(torch.tensor(end.blocks), end.skip, length)
    parallel = runner.vllm_config.parallel_config
    metadata = {
        "layers": f"{paged.layers.start} {paged.layers.stop}",
        "heads": f"{paged.heads.start} {paged.heads.stop}",
        "ranks": f"{parallel.tensor_parallel_size} {parallel.pipeline_parallel_size}",
    }
    tensors = {"kv": kv}
    if paged.rank == "0-0":
        inputs = _inputs(runner, state, end.skip, length)
        metadata["extent"] = str(inputs.extent)
        given = {name: getattr(inputs, name) for name in ("token_ids", "positions", "embeds", "deepstack")}
        tensors |= {name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}
    return tensors, metadata


def _inputs(runner: Any, state: Any, skip: int, length: int) -> ChunkInputs:
    ids = torch.tensor(state.prompt_token_ids[skip:], dtype=torch.int64)
    positions, extent = torch.arange(length - skip)[None], length - skip
    if runner.uses_mrope:
        positions = state.mrope_positions[:, skip:length].to(torch.int64) - skip
        extent = int(positions.max()) + 1
    embeds = deepstack = None
    if state.mm_features:
        width = runner.model_config.hf_text_config.hidden_size
        rows = torch.zeros(length - skip, _width(runner, state, width), dtype=runner.dtype)
        words = torch.ones(length - skip, dtype=torch.bool)
        for feature in state.mm_features:
            place, encoded = feature.mm_position, runner.encoder_cache[feature.identifier]
            index = torch.arange(place.offset, place.offset + place.length)
            index = (index if place.is_embed is None else index[place.is_embed]) - skip
            rows[index], words[index] = encoded.cpu(), False
        if words.any():
            if runner.vllm_config.parallel_config.tensor_parallel_size > 1:
                raise ValueError("the table of embeddings is shared out, and only one rank is asked")
            table = runner.get_model().get_language_model().embed_input_ids
            rows[words, :width] = table(ids[words].to(runner.device)).cpu()
        embeds = rows[:, :width]
        if rows.shape[1] > width:
            deepstack = rows[:, width:].view(length - skip, -1, width).transpose(0, 1)
    return ChunkInputs(ids, positions, extent, embeds, deepstack)


def _width(runner: Any, state: Any, width: int) -> int:
    return max(width, *(runner.encoder_cache[feature.identifier].shape[-1] for feature in state.mm_features))


def read_compiled(folder: Path, timeout: float = 30.0) -> tuple[ChunkInputs, torch.Tensor]:
    """A compiled chunk from its workers' files, whose writing may still be under way.

    Args:
        folder: the order's, absolute.
        timeout: seconds to wait for the files once the request has ended.

    Returns:
        The chunk's inputs and its ``kv [layers, 2, kv_heads, n, head_dim]``, keys at chunk-local positions offset by
        the sink tokens.

    Raises:
        StorageFull: a worker found the disk full.
        CompileFailed: a part is missing or cannot be read.
    """
    limit = time.monotonic() + timeout
    first = _wait(folder, "rank-0-0", limit)
    try:
        with safe_open(first, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = [(metadata, tensors.pop("kv"))]
        tensor_ranks, pipeline_ranks = map(int, metadata["ranks"].split())
        for rank in range(1, tensor_ranks * pipeline_ranks):
            name = f"rank-{rank % tensor_ranks}-{rank // tensor_ranks}"
            with safe_open(_wait(folder, name, limit), "pt") as file:
                parts.append((file.metadata(), file.get_tensor("kv")))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CompileFailed(f"a compiled chunk cannot be read: {error!r}") from error
    inputs = ChunkInputs(extent=int(metadata["extent"]), **tensors)
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
        if (folder / f"{name}-full{FAILED}").exists():
            raise StorageFull("the disk is full: the chunk was not compiled")
        if (folder / f"{name}-error{FAILED}").exists() or time.monotonic() > limit:
            raise CompileFailed(f"{name} of the compiled chunk was not written")
        time.sleep(POLL_SECONDS)
    return path
