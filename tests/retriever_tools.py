"""Helpers for tests of retrieval: an embedder without a model, and a library with a retriever over it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

from mpic.library import Library
from mpic.retriever import Query, Retriever
from mpic.retriever.embedder import EmbedderName

DIMENSION = 32


class HashEmbedder:
    """Vectors that depend on the words of a text, or on the mean colour of an image; no model."""

    model = "words"

    def __init__(self, weights: str = "w1") -> None:
        self.name = EmbedderName("words", weights, DIMENSION)
        self.batches: list[int] = []
        self.failure: Exception | None = None

    def texts(self, texts):
        self._count(texts)
        return np.stack([self._unit(sum(self._word(w) for w in text.lower().split())) for text in texts])

    def images(self, images):
        self._count(images)
        colours = [image.resize((1, 1)).getpixel((0, 0)) for image in images]
        return np.stack([self._unit(self._word(str(c))) for c in colours])

    def _count(self, items) -> None:
        if self.failure is not None:
            raise self.failure
        self.batches.append(len(items))

    def _word(self, word: str) -> np.ndarray:
        seed = hashlib.sha256(f"{self.name.weights}{word}".encode()).digest()[:4]
        return np.random.default_rng(int.from_bytes(seed)).standard_normal(DIMENSION).astype(np.float32)

    @staticmethod
    def _unit(vector) -> np.ndarray:
        return (vector / np.linalg.norm(vector)).astype(np.float32)


class Shelf:
    """A library, its retriever, and short ways to fill them."""

    closed = False

    def __init__(self, root: Path, embedder=None, **options) -> None:
        self.library = Library.open(root)
        self.library.references.tokenize = lambda text: tuple(text.encode())
        self.embedder = embedder or HashEmbedder()
        self.retriever = Retriever(self.library, self.embedder, **options)

    def add(self, content, title="a title", flush=True, **fields):
        data = content if isinstance(content, bytes) else content.encode()
        reference = asyncio.run(self.library.references.add(data, "x", title=title, **fields))
        assert not flush or self.retriever.flush()
        return reference

    def replace(self, id, content):
        reference = asyncio.run(self.library.references.replace(id, content.encode()))
        assert self.retriever.flush()
        return reference

    def close(self) -> None:
        self.closed = True
        self.retriever.close()
        self.library.close()


def picture(colour: str, size: tuple[int, int] = (16, 16)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def titles(shelf, text="", **options):
    """Return the titles that a search finds, best first."""
    hits = shelf.retriever.search(Query(text, options.pop("images", ())), **options)
    return [hit.reference.title for hit in hits]


def wait(shelf) -> bool:
    """Wait until reindexing has ended and nothing has to be tried again; False after a minute."""
    indexer = shelf.retriever.indexer
    ended = lambda: not (indexer._changes or indexer._catching_up or indexer._busy or indexer._retries)
    with indexer._work:
        return indexer._work.wait_for(ended, 60)


def wait_for_problem(shelf, failures: int = 1) -> bool:
    """Wait until so many batches could not be embedded; False after a minute."""
    end = time.monotonic() + 60
    while shelf.retriever.counters["failed_batches"] < failures:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Held:
    """Makes a method of an embedder wait: each call continues after a ``release``, and ``reached`` awaits the first."""

    def __init__(self, embedder, method: str = "texts") -> None:
        self._entered, self._gate = threading.Event(), threading.Semaphore(0)
        embed = getattr(embedder, method)

        def held(items):
            self._entered.set()
            assert self._gate.acquire(timeout=60)
            return embed(items)

        setattr(embedder, method, held)

    def reached(self) -> None:
        assert self._entered.wait(60)

    def release(self, calls: int = 99) -> None:
        self._gate.release(calls)
