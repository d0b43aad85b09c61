"""Chunk files on their way into host memory, while the requests that link them wait in vLLM's queue.

The scheduler's process reads and verifies every file, on threads. A worker in the same process uses the memory as it
is; a worker in another one gets the chunk's path and reads its own heads and layers, which the page cache still holds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from vllm.logger import init_logger

from mpic.errors import CorruptFile
from mpic.kv.chunk import ChunkInputs, KVShape
from mpic.kv.file import ChunkFile

logger = init_logger(__name__)


class Expected(NamedTuple):
    """What a chunk must be to fit the model.

    Args:
        shape: of its KV, over all workers.
        dtype: of its KV.
        hidden: width of an image's embeddings.
        deepstack: layers of its DeepStack features.
    """

    shape: KVShape
    dtype: torch.dtype
    hidden: int
    deepstack: int


class HostChunk:
    """A chunk file that is, or will be, in host memory.

    Attributes:
        state: ``reading``, ``ready`` or ``failed``.
        code, reason: of a failure: ``missing``, ``corrupt``, ``mismatch``, ``forbidden`` or ``internal_error``.
        file: where it was found, links resolved.
        inputs: known as soon as the file is open, before its KV is read.
        sink: tokens it was compiled behind.
    """

    def __init__(self, path: str, key: str, tokens: int) -> None:
        self.path, self.key, self.tokens = path, key, tokens
        self.state, self.code, self.reason = "reading", "", ""
        self.file = ""
        self.inputs: ChunkInputs | None = None
        self.sink = 0
        self.kv: torch.Tensor | None = None
        self.pins = 0

    def __reduce__(self) -> tuple:
        return _elsewhere, (self.file, self.path, self.key, self.tokens, self.sink)

    def take(self, layers: range, heads: range) -> Sequence[torch.Tensor]:
        """For each layer ``[2, heads, n, head_dim]`` of its KV; in another process as pages of the file, which are read
        when they are used.

        Raises:
            OSError, safetensors.SafetensorError: in another process, when the file is gone.
        """
        if self.kv is not None:
            return self.kv[layers.start : layers.stop, :, heads.start : heads.stop]
        with safe_open(self.file, "pt") as file:
            return [file.get_tensor(f"kv.{i:03d}")[:, heads.start : heads.stop] for i in layers]

    def outcome(self, token_ids: np.ndarray) -> tuple[str, str, ChunkInputs | None]:
        """What became of it for a prompt that has ``token_ids [n]`` in its place.

        Returns:
            A code (empty: it can be linked), its reason, and the inputs where they can be used.
        """
        if self.state == "failed":
            return self.code, self.reason, None
        if self.inputs is not None and not np.array_equal(self.inputs.token_ids.numpy(), token_ids):
            return "mismatch", f"{self.path} holds other tokens than the prompt", None
        if self.state != "ready":
            return "late", f"{self.path} was not read in time", self.inputs
        return "", "", self.inputs

    def given_inputs(self) -> ChunkInputs:
        """Its inputs, from the file if need be.

        Raises:
            CorruptFile, FileNotFoundError: in another process, when the file is gone.
        """
        if self.inputs is None:
            file = ChunkFile(Path(self.file))
            self.inputs = file.inputs
            file.close()
        return self.inputs


def _elsewhere(file: str, path: str, key: str, tokens: int, sink: int) -> HostChunk:
    """The chunk as a worker in another process has it: ready, its bytes still in the file."""
    chunk = HostChunk(path, key, tokens)
    chunk.file, chunk.sink, chunk.state = file, sink, "ready"
    return chunk


class Load:
    """A request's chunks, pinned until ``HostMemory.release``.

    Attributes:
        chunks: in the order they were asked for.
        started: False while there is no room for them.
        asked: when, by the monotonic clock.
        seconds: from then until all were read or given up; None before that.
    """

    def __init__(self, chunks: Sequence[HostChunk]) -> None:
        self.chunks = tuple(chunks)
        self.started = False
        self.asked, self._ended = time.monotonic(), None

    @property
    def done(self) -> bool:
        return self.started and all(chunk.state != "reading" for chunk in self.chunks)

    @property
    def seconds(self) -> float | None:
        if self._ended is None and self.done:
            self._ended = time.monotonic()
        return None if self._ended is None else self._ended - self.asked


class HostMemory:
    """Chunk files in host memory: least recently used ones go first, those of waiting links are pinned.

    A load starts when its bytes fit beside what is pinned, in the order of arrival; a load larger than the whole
    budget starts when nothing else is pinned, so every request gets its turn.

    Args:
        folders: absolute; nothing outside of them is ever opened.
        budget: bytes of KV; of embeddings where the KV is not kept.
        readers: threads.
        keep_kv: whether the workers run in this process. Workers in other processes map the files themselves, so what
            is read here only proves that a file is sound: it is dropped, and its memory is not page-locked.
    """

    def __init__(
        self, folders: Sequence[Path], budget: int, readers: int, expected: Expected, keep_kv: bool = True
    ) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._budget, self._expected, self._keep_kv = budget, expected, keep_kv
        self._pinned_memory = keep_kv and torch.cuda.is_available()
        self._changed = threading.Condition()
        self._chunks: OrderedDict[tuple[str, str], HostChunk] = OrderedDict()
        self._waiting: deque[Load] = deque()
        self._held: set[Load] = set()
        self._readers = ThreadPoolExecutor(readers, "mpic-read")

    def load(self, wanted: Sequence[tuple[str, str, int]], first: bool = False) -> Load:
        """Start to read chunks.

        Args:
            wanted: for each ``(path, key digest, tokens)``.
            first: ahead of loads that wait for room (a preempted request).
        """
        with self._changed:
            load = Load([self._chunk(*one) for one in wanted])
            (self._waiting.appendleft if first else self._waiting.append)(load)
            self._start()
        return load

    def release(self, load: Load) -> None:
        """The load's chunks may be dropped; harmless twice."""
        with self._changed:
            if load in self._held:
                self._held.discard(load)
                for chunk in load.chunks:
                    chunk.pins -= 1
            elif load in self._waiting:
                self._waiting.remove(load)
            self._start()

    def wait(self, seconds: float) -> None:
        """Until a chunk is read or given up, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def _chunk(self, path: str, key: str, tokens: int) -> HostChunk:
        found = self._chunks.get((path, key))
        if found is None or found.tokens != tokens:
            return HostChunk(path, key, tokens)
        self._chunks.move_to_end((path, key))
        return found

    def _bytes(self, chunk: HostChunk) -> int:
        expected = self._expected
        width = expected.shape.per_token if self._keep_kv else expected.hidden * (1 + expected.deepstack)
        return chunk.tokens * width * expected.dtype.itemsize

    def _start(self) -> None:
        while self._waiting:
            load = self._waiting[0]
            chunks = {id(c): c for c in load.chunks}.values()
            pinned = sum(self._bytes(c) for c in self._chunks.values() if c.pins)
            if self._held and pinned + sum(self._bytes(c) for c in chunks if not c.pins) > self._budget:
                return
            self._waiting.popleft()
            self._held.add(load)
            load.chunks = tuple(self._enter(chunk) for chunk in load.chunks)
            load.started = True
            self._evict()
            self._changed.notify_all()

    def _enter(self, chunk: HostChunk) -> HostChunk:
        """Pin a chunk; read it unless another load of the same chunk has begun meanwhile."""
        place = (chunk.path, chunk.key)
        known = self._chunks.get(place)
        if known is None or known.tokens != chunk.tokens:
            self._chunks[place] = known = chunk
            self._readers.submit(self._read, chunk)
        known.pins += 1
        return known

    def _evict(self) -> None:
        excess = sum(map(self._bytes, self._chunks.values())) - self._budget
        for place, chunk in list(self._chunks.items()):
            if excess <= 0:
                return
            if not chunk.pins:
                del self._chunks[place]
                excess -= self._bytes(chunk)

    def _read(self, chunk: HostChunk) -> None:
        try:
            file = self._open(chunk)
            chunk.file, chunk.sink = str(file.path), file.key.recipe.sink
            chunk.inputs = file.inputs
            layers, heads, dim = self._expected.shape
            kv = torch.empty(
                (layers, 2, heads, chunk.tokens, dim),
                dtype=self._expected.dtype,
                pin_memory=self._pinned_memory,
            )
            for _ in file.read_layers(kv):
                pass
            file.close()
            chunk.kv = kv if self._keep_kv else None
            state, code, reason = "ready", "", ""
        except FileNotFoundError:
            state, code, reason = "failed", "missing", f"{chunk.path} is not there"
        except _Forbidden as error:
            state, code, reason = "failed", "forbidden", str(error)
        except _Mismatch as error:
            state, code, reason = "failed", "mismatch", str(error)
        except CorruptFile as error:
            state, code, reason = "failed", "corrupt", error.message
        except OSError as error:
            state, code, reason = "failed", "corrupt", f"{chunk.path} cannot be read: {error}"
        except Exception as error:  # the pool's future is dropped: unsaid, the request would wait for ever
            logger.exception("chunk file %s could not be read", chunk.path)
            state, code, reason = "failed", "internal_error", f"{chunk.path} could not be read: {error!r}"
        with self._changed:
            chunk.code, chunk.reason, chunk.state = code, reason, state
            if state == "failed" and self._chunks.get((chunk.path, chunk.key)) is chunk:
                del self._chunks[chunk.path, chunk.key]  # the next request may find it mended
            self._changed.notify_all()

    def _open(self, chunk: HostChunk) -> ChunkFile:
        file = ChunkFile(self._resolve(chunk.path))
        try:
            if file.key.digest != chunk.key:
                raise _Mismatch(f"{chunk.path} holds another chunk than was asked for")
            if (file.shape, file.dtype) != self._expected[:2]:
                raise _Mismatch(f"{chunk.path} is of another model: {file.shape}, {file.dtype}")
            if file.tokens != chunk.tokens:
                raise _Mismatch(f"{chunk.path} has {file.tokens} tokens, not {chunk.tokens}")
            self._check_embeddings(file)
        except _Mismatch:
            file.close()
            raise
        return file

    def _check_embeddings(self, file: ChunkFile) -> None:
        """In the forward, wrong ones would end the engine."""
        inputs, n, expected = file.inputs, file.tokens, self._expected
        wanted: list[tuple[int, ...] | None] = [None, None]
        if file.key.chunk.kind == "image":
            wanted[0] = (n, expected.hidden)
            if expected.deepstack:
                wanted[1] = (expected.deepstack, n, expected.hidden)
        given = [None if t is None else tuple(t.shape) for t in (inputs.embeds, inputs.deepstack)]
        if given != wanted:
            raise _Mismatch(
                f"{file.path.name} has embeddings of shape {given[0]} and {given[1]}, not {wanted}"
            )
        if inputs.positions.shape not in ((1, n), (3, n)):
            raise _Mismatch(f"{file.path.name} has positions of shape {tuple(inputs.positions.shape)}")

    def _resolve(self, path: str) -> Path:
        for folder in self._folders:
            try:
                file = (folder / path).resolve(strict=True)
            except OSError:
                continue
            if not file.is_relative_to(folder):
                raise _Forbidden(f"{path} leads out of the folders that may be read")
            if not file.is_file():  # to open a pipe would wait for ever
                raise _Mismatch(f"{path} is not a file")
            return file
        raise FileNotFoundError(path)


class _Forbidden(Exception):
    pass


class _Mismatch(Exception):
    pass
