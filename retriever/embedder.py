"""Embeds images and texts in one vector space, with any open_clip model."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mpic.errors import EmbedderUnavailable

BATCH = 64
CONTEXT = 77
"""Context length in tokens, assumed for a CLIP whose tokenizer does not state it."""
HEAD, TOKEN_CHARS = 1 << 16, 64
"""Maximum characters of a text that are read, and maximum characters that one token is assumed to stand for.
open_clip's tokenizers process a whole text, for minutes if it is a book, before they cut it to the context."""


class EmbedderName(NamedTuple):
    """Identity of an embedder; vectors of different embedders are never compared.

    Args:
        architecture: open_clip's name, or the folder's name of a local model.
        weights: SHA-256 over all parameters.
        dimension: dimension of the vectors.
    """

    architecture: str
    weights: str
    dimension: int

    def __str__(self) -> str:
        return f"{self.architecture} ({self.weights[:12]}, {self.dimension} dimensions)"


class Embedder:
    """An open_clip model, loaded when it is first used. Thread-safe.

    Args:
        model: an architecture of open_clip (``ViT-B-32``), a hub id (``hf-hub:...``) or a local folder.
        pretrained: tag or file of the weights; a folder and a hub id bring their own.
        device: the torch device.
    """

    def __init__(self, model: str, pretrained: str = "", device: str = "cpu") -> None:
        self.model, self.pretrained, self.device = model, pretrained, device
        self._lock = threading.Lock()
        self._parts: tuple[Any, Callable, Callable, EmbedderName] | None = None

    @property
    def name(self) -> EmbedderName:
        """Return the identity of this embedder. Raise EmbedderUnavailable."""
        return self._loaded()[3]

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts: ``[n, dimension]`` fp32, rows of length 1. Text beyond the model's context is ignored.

        Raises:
            EmbedderUnavailable: there are no weights.
        """
        model, _, tokenize, name = self._loaded()
        most = TOKEN_CHARS * (getattr(tokenize, "context_length", None) or CONTEXT)
        seen = [beginning(text, most) for text in texts]
        return self._run(seen, name, lambda part: model.encode_text(tokenize(list(part)).to(self.device)))

    def count(self, text: str) -> tuple[int, int]:
        """Return the number of a text's tokens, and the maximum that the model reads. A text with too many characters
        is not tokenized: the number of its characters is returned instead.

        Raises:
            EmbedderUnavailable: there are no weights.
        """
        tokenize = self._loaded()[2]
        context = getattr(tokenize, "context_length", None) or CONTEXT
        if len(text) > TOKEN_CHARS * context:
            return len(text), context
        stock = getattr(tokenize, "tokenizer", None)  # of transformers
        if stock is not None:
            return len(stock(text)["input_ids"]), context
        ends = 2  # which open_clip's own tokenizer adds
        return len(tokenize.encode(text)) + ends, context  # ty: ignore[missing-attribute] (two classes of open_clip)

    def images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Embed images: ``[n, dimension]`` fp32, rows of length 1. Raise EmbedderUnavailable."""
        import torch

        model, preprocess, _, name = self._loaded()

        def encode(part: Sequence[Image.Image]) -> torch.Tensor:
            return model.encode_image(torch.stack([preprocess(i) for i in part]).to(self.device))

        return self._run(images, name, encode)

    def _run(self, items: Sequence, name: EmbedderName, encode: Callable) -> np.ndarray:
        import torch

        rows = np.empty((len(items), name.dimension), np.float32)
        with torch.inference_mode():
            for at in range(0, len(items), BATCH):
                vectors = encode(items[at : at + BATCH]).float()
                rows[at : at + BATCH] = torch.nn.functional.normalize(vectors, dim=-1).cpu().numpy()
        return rows

    def _loaded(self) -> tuple[Any, Callable, Callable, EmbedderName]:
        with self._lock:
            if self._parts is None:
                self._parts = self._load()
            return self._parts

    def _load(self) -> tuple[Any, Callable, Callable, EmbedderName]:
        import open_clip

        local = Path(self.model).is_dir()
        source = f"local-dir:{self.model}" if local else self.model
        if not local and ":" not in self.model and not self.pretrained:
            raise EmbedderUnavailable(
                f"the embedder {self.model!r} has no weights: name them in embedder_weights",
                embedder=self.model,
            )
        try:
            model, _, preprocess = open_clip.create_model_and_transforms(
                source, pretrained=self.pretrained or None, device=self.device
            )
            tokenize = open_clip.get_tokenizer(source)
        except Exception as error:  # open_clip passes on any exception of its readers
            raise EmbedderUnavailable(
                f"the embedder {self.model!r} cannot be loaded: {error}", embedder=self.model
            ) from error
        model.eval().requires_grad_(False)
        weights = hashlib.sha256()
        for key, tensor in sorted(model.state_dict().items()):
            weights.update(f"{key}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            weights.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
        architecture = Path(self.model).name if local else self.model
        dimension = int(model.encode_text(tokenize(["a"]).to(self.device)).shape[-1])
        return model, preprocess, tokenize, EmbedderName(architecture, weights.hexdigest(), dimension)


def beginning(text: str, most: int) -> str:
    """Return the first ``most`` characters of a text; runs of white space in a longer text are collapsed first."""
    if len(text) <= most:
        return text
    return " ".join(text.lstrip()[:HEAD].split())[:most]
