"""Reads the inputs in a chunk's file and converts them for a prompt."""

from __future__ import annotations

from dataclasses import replace

import torch

from mpic.engine.vllm.wire import packet_ids
from mpic.kv.chunk import ChunkInputs
from mpic.kv.file import ChunkFile
from mpic.packet.adapter import Adapter


class FileRefused(Exception):
    """A chunk file that cannot be used for a prompt: a stable code, and the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def first_layer_inputs(file: ChunkFile) -> ChunkInputs:
    """Return the inputs of a chunk, without the embeddings of a text's packet: they follow from the prompt's ids."""
    inputs = file.inputs
    if file.key.chunk.kind != "text" or inputs.embeds is None:
        return inputs
    # copy them: all inputs of a file are views of one buffer, so a view would keep the embeddings in memory
    return replace(
        inputs, token_ids=inputs.token_ids.clone(), positions=inputs.positions.clone(), embeds=None
    )


def prompt_inputs(file: ChunkFile, adapter: Adapter | None) -> ChunkInputs:
    """Return the inputs of a chunk as ``first_layer_inputs`` does, but with the ids that prompts use; in a file,
    placeholders stand for the trained tokens of a packet.

    Args:
        adapter: the adapter that a packet was compiled in, already checked (``mpic.kv.expected``).
    """
    inputs = first_layer_inputs(file)
    if not file.key.recipe.packet or adapter is None:
        return inputs
    header, trailer = adapter.lengths
    own = inputs.token_ids[header : len(inputs) - trailer].tolist()
    return replace(inputs, token_ids=torch.tensor(packet_ids(own, header, trailer), dtype=torch.int64))
