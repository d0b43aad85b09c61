"""The adapter of a model: trained soft tokens around every chunk, and their file.

The file is ``packet/adapter.safetensors`` in the model's folder. It has a folder of its own, because vLLM loads every
safetensors file directly in a model's folder as weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from mpic.durable import FileSystem, write_durably
from mpic.errors import AdapterRefused, NoAdapter
from mpic.kv.chunk import ChunkInputs
from mpic.model.identity import weights_digest
from mpic.model.loaded import LoadedModel

FORMAT = "mpic-packet-1"
PLACE = Path("packet") / "adapter.safetensors"
"""Path of a model's adapter, below the model's folder."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """The trained tokens of one model (KV Packet, section 3.1), the same around every chunk.

    Args:
        header, trailer: ``[any, hidden]`` fp32 input embeddings, before and after the chunk.
        model: digest of the weights it was trained with (``mpic.model.identity.weights_digest``).
        notes: a record of its training, for people (JSON).
    """

    header: torch.Tensor
    trailer: torch.Tensor
    model: str
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of tokens of header and trailer."""
        return len(self.header), len(self.trailer)

    def __len__(self) -> int:
        """Return how many tokens the adapter adds to a chunk."""
        return len(self.header) + len(self.trailer)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over its shapes and values; part of the recipe of every packet."""
        h = hashlib.sha256(f"{tuple(self.header.shape)} {tuple(self.trailer.shape)}".encode())
        for part in (self.header, self.trailer):
            h.update(part.contiguous().numpy().tobytes())
        return h.hexdigest()

    def wrap(self, inputs: ChunkInputs, embed: Callable[[torch.Tensor], torch.Tensor]) -> ChunkInputs:
        """Return the inputs of a chunk's packet.

        Args:
            embed: gives ``[n, hidden]`` for the token ids of a text.
        """
        return inputs.embedded(embed).wrap(self.header, self.trailer)

    def surrounds(self, inputs: ChunkInputs) -> bool:
        """Return whether the embeddings of a chunk begin with the header and end with the trailer of this adapter,
        both rounded to the type of the embeddings."""
        if inputs.embeds is None or len(inputs) < len(self):
            return False
        found = torch.cat(
            [inputs.embeds[: len(self.header)], inputs.embeds[len(inputs) - len(self.trailer) :]]
        )
        return torch.equal(found, torch.cat([self.header, self.trailer]).to(found))

    def save(self, path: Path) -> None:
        """Write the adapter durably."""
        tensors = {"header": self.header.contiguous(), "trailer": self.trailer.contiguous()}
        metadata = {
            "format": FORMAT,
            "model": self.model,
            "sha256": self.digest,
            "notes": json.dumps(self.notes),
        }
        data = safetensors.torch.save(tensors, metadata)
        write_durably(FileSystem(), path, [memoryview(data)])


def load_adapter(path: Path, model: str, hidden: int) -> Adapter:
    """Read the adapter of a model.

    Args:
        model: digest of the model's weights.
        hidden: the model's embedding width.

    Raises:
        AdapterRefused: there is no such file, it is damaged, or it was trained with other weights.
    """
    adapter = read_adapter(path, hidden)
    if adapter.model != model:
        raise AdapterRefused(
            f"the adapter {path} was trained with other weights than this model's; train one with "
            f"`mpic train packet`, or remove it"
        )
    return adapter


def read_adapter(path: Path, hidden: int) -> Adapter:
    """Read an adapter without checking which weights it was trained with.

    Args:
        hidden: embedding width of the model that it is for.

    Raises:
        AdapterRefused: there is no such file, it is damaged, empty, or of another width.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise AdapterRefused(f"{path} is not an adapter: its format is not {FORMAT}")
            parts = (file.get_tensor("header"), file.get_tensor("trailer"))
            adapter = Adapter(*parts, metadata["model"], json.loads(metadata["notes"]))
    except AdapterRefused:
        raise
    except FileNotFoundError:
        raise AdapterRefused(f"there is no adapter {path}") from None
    except Exception as error:  # a file that another program wrote may raise almost any exception
        raise AdapterRefused(f"the adapter {path} cannot be read: {error}") from error
    if any(part.dtype != torch.float32 or part.ndim != 2 or part.shape[1] != hidden for part in parts):
        shapes = " and ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
        raise AdapterRefused(f"the adapter {path} is {shapes}; the model takes [any, {hidden}] float32")
    if not len(adapter):
        raise AdapterRefused(f"the adapter {path} has no tokens")
    if adapter.digest != metadata["sha256"]:
        raise AdapterRefused(f"the adapter {path} is damaged: its SHA-256 is not the recorded one")
    return adapter


def require_adapter(adapter: Adapter | None, model: str, cannot: str = "") -> Adapter:
    """Return the adapter of a model.

    Args:
        model: its name.
        cannot: the reason why the model cannot have packets; empty if it can.

    Raises:
        NoAdapter: the model has none, and the message says how to train one; or the model cannot have one.
    """
    if cannot:
        raise NoAdapter(f"model {model} cannot have packets: {cannot}", param="mpic.policy")
    if adapter is None:
        raise NoAdapter(
            f"the policies packet and packet-K need trained tokens, and model {model} has none: there is no "
            f"{PLACE} beside it. `mpic train packet --model PATH --data FILE` trains them",
            param="mpic.policy",
        )
    return adapter


def adapter_file(folder: str, path: str = "") -> Path | None:
    """Return the file of a model's adapter, absolute: ``path``, or the one beside the model; None if there is none.

    Args:
        folder: the model's folder, or a hub id.
        path: the adapter's file, whether it exists or not; empty looks beside the model.
    """
    where = Path(path) if path else Path(folder) / PLACE
    return where.absolute() if path or where.exists() else None


def find_adapter(model: LoadedModel, folder: str, path: str = "") -> Adapter | None:
    """Return the adapter of a loaded model: the one at ``path``, or the one beside the model, or None.

    Args:
        folder, path: see ``adapter_file``.

    Raises:
        AdapterRefused: the adapter that was found cannot be used.
    """
    where = adapter_file(folder, path)
    if where is None:
        return None
    return load_adapter(where, weights_digest(model.model), model.text_config.hidden_size)
