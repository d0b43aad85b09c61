"""The inputs in a chunk's file, checked against the model, as a prompt takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from mpic.engine.vllm.wire import packet_ids
from mpic.kv.chunk import ChunkInputs, KVShape
from mpic.kv.file import ChunkFile
from mpic.packet.adapter import Adapter


class Expected(NamedTuple):
    """Properties that a chunk must have to fit the model.

    Args:
        shape, dtype: shape and type of its KV, over all workers.
        hidden: width of an image's embeddings.
        deepstack: layers of an image's DeepStack features.
        adapter: the adapter of the workers' embedding layer, or None.
    """

    shape: KVShape
    dtype: torch.dtype
    hidden: int
    deepstack: int
    adapter: Adapter | None = None


class FileRefused(Exception):
    """A chunk file that cannot be used for a prompt: a stable code, and the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def check_inputs(file: ChunkFile, expected: Expected) -> None:
    """Checks what the first layer gets of a chunk. Embeddings and positions of wrong shapes would end the engine in the
    forward.

    Raises:
        FileRefused: they do not fit the model, or the chunk was compiled inside another adapter.
    """
    inputs, n, packet = file.inputs, file.tokens, file.key.recipe.packet
    if packet and (
        expected.adapter is None or packet != expected.adapter.digest or n < len(expected.adapter)
    ):
        raise FileRefused("mismatch", f"{file.path.name} was compiled inside another adapter ({packet[:12]})")
    wanted: list[tuple[int, ...] | None] = [None, None]
    if file.key.chunk.kind == "image" or packet:
        wanted[0] = (n, expected.hidden)
    if file.key.chunk.kind == "image" and expected.deepstack:
        wanted[1] = (expected.deepstack, n, expected.hidden)
    given = [None if t is None else tuple(t.shape) for t in (inputs.embeds, inputs.deepstack)]
    if given != wanted:
        raise FileRefused(
            "mismatch", f"{file.path.name} has embeddings of shape {given[0]} and {given[1]}, not {wanted}"
        )
    if inputs.positions.shape not in ((1, n), (3, n)):
        raise FileRefused(
            "mismatch", f"{file.path.name} has positions of shape {tuple(inputs.positions.shape)}"
        )


def first_layer_inputs(file: ChunkFile) -> ChunkInputs:
    """Returns the inputs of a chunk, without the embeddings of a text's packet: they follow from the prompt's ids."""
    inputs = file.inputs
    if file.key.chunk.kind != "text" or inputs.embeds is None:
        return inputs
    # copies: all inputs of a file are views of one buffer, which would keep the embeddings in memory
    return replace(
        inputs, token_ids=inputs.token_ids.clone(), positions=inputs.positions.clone(), embeds=None
    )


def prompt_inputs(file: ChunkFile, adapter: Adapter | None) -> ChunkInputs:
    """Returns the inputs of a chunk as ``first_layer_inputs`` does, with the ids that prompts have in its place. In a
    file, the trained tokens of a packet have placeholders.

    Args:
        adapter: the adapter that a packet was compiled in, which ``check_inputs`` has checked.
    """
    inputs = first_layer_inputs(file)
    if not file.key.recipe.packet or adapter is None:
        return inputs
    header, trailer = adapter.lengths
    own = inputs.token_ids[header : len(inputs) - trailer].tolist()
    return replace(inputs, token_ids=torch.tensor(packet_ids(own, header, trailer), dtype=torch.int64))
