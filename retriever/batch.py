"""A batch in which one item cannot be embedded: the others still are, and of that one it is told why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from mpic.errors import EmbeddingFailed, MPICError
from mpic.kv.chunk import Kind
from mpic.retriever.embedder import Embedder

MOST_TOLD = 100

PROBES = {"image": Image.new("RGB", (64, 64), "gray"), "text": "a"}
"""What every embedder can embed: one that cannot does not work."""


def embed_each(embedder: Embedder, kind: Kind, contents: Sequence[Any]) -> list[np.ndarray | EmbeddingFailed]:
    """Images or texts as vectors ``[dimension]`` fp32, together where that works; why not, for each that has none.

    Raises:
        Exception: whatever the embedder raises when it does not work at all.
    """
    embed = embedder.images if kind == "image" else embedder.texts
    try:
        found: list[np.ndarray | EmbeddingFailed] = list(embed(contents))
    except Exception:
        if not _works(embed, PROBES[kind]):
            raise
        found = [_one(embed, content) for content in contents]
    return [vector if _usable(vector) else EmbeddingFailed("its vector is not finite") for vector in found]


class Failures:
    """References that have no vector, and why; of more than 100 the newest. Thread-safe."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, MPICError | OSError] = OrderedDict()
        self._lock = Lock()

    def add(self, reference: str, error: MPICError | OSError) -> None:
        with self._lock:
            self._errors[reference] = error
            self._errors.move_to_end(reference)
            if len(self._errors) > MOST_TOLD:
                self._errors.popitem(last=False)

    def forget(self, references: Iterable[str]) -> None:
        with self._lock:
            for reference in references:
                self._errors.pop(reference, None)

    def listing(self) -> list[dict[str, str]]:
        """``id``, ``code`` and ``message`` of each, oldest first."""
        with self._lock:
            return [
                {"id": id, "code": getattr(error, "code", "unreadable"), "message": str(error)}
                for id, error in self._errors.items()
            ]


def _one(embed: Callable[[Sequence[Any]], np.ndarray], content: Any) -> np.ndarray | EmbeddingFailed:
    try:
        return embed([content])[0]
    except Exception as error:  # an image processor or tokenizer raises nearly anything
        return EmbeddingFailed(f"{type(error).__name__}: {error}"[:300])


def _works(embed: Callable[[Sequence[Any]], np.ndarray], probe: Any) -> bool:
    try:
        embed([probe])
    except Exception:
        return False
    return True


def _usable(vector: np.ndarray | EmbeddingFailed) -> bool:
    return isinstance(vector, EmbeddingFailed) or bool(np.isfinite(vector).all())
