"""Embeds a batch in which single items may fail: the others are still embedded, and the failures are reported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from mpic import memory
from mpic.errors import EmbeddingFailed, MPICError, OutOfMemory
from mpic.kv.chunk import Kind
from mpic.retriever.embedder import Embedder

MOST_LISTED = 100

PROBES = {"image": Image.new("RGB", (64, 64), "gray"), "text": "a"}
"""Contents that every working embedder can embed."""


def embed_each(embedder: Embedder, kind: Kind, contents: Sequence[Any]) -> list[np.ndarray | MPICError]:
    """Embed images or texts, together if that works. Return for each a vector ``[dimension]`` fp32 or an error:
    EmbeddingFailed, or OutOfMemory if a later attempt may succeed.

    Raises:
        Exception: any error of an embedder that fails even on ``PROBES``.
    """
    embed = embedder.images if kind == "image" else embedder.texts
    try:
        found: list[np.ndarray | MPICError] = list(embed(contents))
    except Exception:
        if not _works(embed, PROBES[kind]):
            raise
        found = [_one(embed, content) for content in contents]
    return [vector if _usable(vector) else EmbeddingFailed("its vector is not finite") for vector in found]


class Failures:
    """References that have no vector, with the reasons; at most the newest 100. Thread-safe."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, MPICError | OSError] = OrderedDict()
        self._lock = Lock()

    def add(self, reference: str, error: MPICError | OSError) -> None:
        with self._lock:
            self._errors[reference] = error
            self._errors.move_to_end(reference)
            if len(self._errors) > MOST_LISTED:
                self._errors.popitem(last=False)

    def forget(self, references: Iterable[str]) -> None:
        with self._lock:
            for reference in references:
                self._errors.pop(reference, None)

    def listing(self) -> list[dict[str, str]]:
        """Return ``id``, ``code`` and ``message`` of each failed reference, oldest first."""
        with self._lock:
            return [
                {"id": id, "code": getattr(error, "code", "unreadable"), "message": str(error)}
                for id, error in self._errors.items()
            ]


def _one(embed: Callable[[Sequence[Any]], np.ndarray], content: Any) -> np.ndarray | MPICError:
    try:
        with memory.as_errors():
            return embed([content])[0]
    except OutOfMemory as error:
        return error
    except Exception as error:  # an image processor or tokenizer may raise almost any exception
        return EmbeddingFailed(f"{type(error).__name__}: {error}"[:300])


def _works(embed: Callable[[Sequence[Any]], np.ndarray], probe: Any) -> bool:
    try:
        embed([probe])
    except Exception:
        return False
    return True


def _usable(vector: np.ndarray | MPICError) -> bool:
    return isinstance(vector, MPICError) or bool(np.isfinite(vector).all())
