"""The random weights that all peers load, saved once as a folder like a hub repository."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from mpic_lab.bench import checkpoint
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.peers.gguf_file import write_gguf
from mpic_lab.bench.peers.prompts import Settings
from mpic_lab.bench.workload import BenchModel, describe, random_model


@dataclass(frozen=True)
class Weights:
    """The saved weights, and the facts that a peer needs to load them.

    Args:
        folder: the model as transformers and vLLM load it; a peer may keep files of its own in ``folder.parent``.
        gguf: the same weights as a file for llama.cpp; None if no peer needs it.
        images: True for a model that takes images (LLaVA), False for one of text (Llama).
        threads: number of threads that a peer may compute with.
        description: of the model, for the settings.
    """

    settings: Settings
    placement: BenchDevice
    folder: Path
    gguf: Path | None
    images: bool
    threads: int
    description: str

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights."""
        return str(self.placement.dtype).removeprefix("torch.")

    @property
    def model(self) -> BenchModel:
        """The weights as MPIC and transformers load them into this process, each a copy of its own."""
        return BenchModel(self.folder, self.settings.decoder, self.placement, self.description)


def write_weights(
    settings: Settings, placement: BenchDevice, folder: Path, images: bool, gguf: bool
) -> Weights:
    """Make a random model, save it, and keep nothing of it in memory.

    Args:
        gguf: write the file of llama.cpp, too.

    Raises:
        ImportError: the package ``gguf`` is not installed and its file is wanted.
    """
    decoder, tower = settings.decoder, settings.tower if images else None
    model = random_model(decoder, placement, tower, seed=settings.seed)
    made = folder / ("images" if images else "text")
    path = made / "model"
    checkpoint.save(model, decoder, path)
    file = made / "bench.gguf" if gguf else None
    if file is not None:
        write_gguf(model, file)
    description = describe(model, decoder)
    del model
    gc.collect()
    return Weights(settings, placement, path, file, images, torch.get_num_threads(), description)
