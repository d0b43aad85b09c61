"""Exports compiled chunks from vLLM: their KV is read from the paged cache in the last step of the prompt, and written
by a thread.

Every worker writes one file with its layers and heads (``wire.part_name``); the first worker adds the inputs that the
model's first layer saw. ``frontend.compiled`` puts the files together.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from mpic.durable import FULL, TEMPORARY
from mpic.engine.vllm.plugin.step_messages import ChunkExport, Fault
from mpic.engine.vllm.wire import DISK_FULL, NOT_WRITTEN, part_name
from mpic.kv.chunk import ChunkInputs

if TYPE_CHECKING:
    from mpic.engine.vllm.plugin.runner import LinkRunner, PromptInputs


class KVExporter:
    """Exports a worker's part of compiled chunks."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "mpic-write")

    def export(self, runner: LinkRunner, request: str, export: ChunkExport) -> None:
        """Copies a prompt's KV and inputs, to be written later. An error ends the request and is not raised."""
        try:
            tensors, metadata = _copy(runner, request, export)
        except Exception as error:  # an exception here would end the engine
            runner.report.faults[request] = Fault(
                "compile_failed", f"the chunk's KV could not be read: {error!r}"
            )
            return
        path = Path(export.folder) / f"{part_name(*runner.paged.rank)}.safetensors"
        self._writer.submit(_write, path, tensors, metadata)

    def close(self) -> None:
        """Waits until everything is written."""
        self._writer.shutdown()


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    temporary = path.with_suffix(TEMPORARY)
    try:
        save_file(tensors, temporary, metadata)
        os.replace(temporary, path)
    except Exception as error:  # an empty file, which needs no space, tells the frontend
        full = (isinstance(error, OSError) and error.errno in FULL) or "No space left" in str(error)
        with suppress(
            OSError
        ):  # the folder is gone because nobody waits any more, or the frontend will time out
            temporary.unlink(missing_ok=True)
            path.with_name(path.stem + (DISK_FULL if full else NOT_WRITTEN)).touch()


def _copy(
    runner: LinkRunner, request: str, export: ChunkExport
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    prompt, paged = runner.prompt_inputs(request), runner.paged
    length = len(prompt.token_ids)
    kv = paged.read(torch.tensor(export.blocks), export.skip, length)
    parallel = runner.vllm_config.parallel_config
    metadata = {
        "layers": f"{paged.layers.start} {paged.layers.stop}",
        "heads": f"{paged.heads.start} {paged.heads.stop}",
        "ranks": f"{parallel.tensor_parallel_size} {parallel.pipeline_parallel_size}",
    }
    tensors = {"kv": kv}
    if paged.rank == (0, 0):
        inputs = _inputs(runner, prompt, export.skip, length)
        metadata["extent"] = str(inputs.rotary_length)
        given = {name: getattr(inputs, name) for name in ("token_ids", "positions", "embeds", "deepstack")}
        tensors |= {name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}
    return tensors, metadata


def _inputs(runner: LinkRunner, prompt: PromptInputs, skip: int, length: int) -> ChunkInputs:
    ids = torch.tensor(prompt.token_ids[skip:], dtype=torch.int64)
    positions, rotary_length = torch.arange(length - skip)[None], length - skip
    if prompt.positions is not None:
        positions = prompt.positions[:, skip:length].to(torch.int64) - skip
        rotary_length = int(positions.max()) + 1
    embeds = deepstack = None
    if prompt.features:
        width = runner.vllm_config.model_config.hf_text_config.hidden_size
        widths = (prompt.encoded[feature.identifier].shape[-1] for feature in prompt.features)
        rows = torch.zeros(length - skip, max(width, *widths), dtype=runner.dtype)
        words = torch.ones(length - skip, dtype=torch.bool)
        for feature in prompt.features:
            place, encoded = feature.mm_position, prompt.encoded[feature.identifier]
            index = torch.arange(place.offset, place.offset + place.length)
            index = (index if place.is_embed is None else index[place.is_embed]) - skip
            rows[index], words[index] = encoded.cpu(), False
        if words.any():
            if runner.vllm_config.parallel_config.tensor_parallel_size > 1:
                raise ValueError(
                    "the embedding table is divided among ranks and cannot be read from one of them"
                )
            table = runner.language_model.embed_input_ids
            rows[words, :width] = table(ids[words].to(runner.device)).cpu()
        embeds = rows[:, :width]
        if rows.shape[1] > width:
            deepstack = rows[:, width:].view(length - skip, -1, width).transpose(0, 1)
    return ChunkInputs(ids, positions, rotary_length, embeds, deepstack)
