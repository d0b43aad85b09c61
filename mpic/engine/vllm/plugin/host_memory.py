"""Reads chunk files into host memory while the requests that link them wait in vLLM's queue.

The scheduler's process reads and verifies every file, on threads. A worker in the same process uses that memory
directly; a worker in another process gets the chunk's path and maps its own heads and layers from the file, which the
page cache still holds. It verifies these layers itself before it uses them, because the file may have changed since the
other process read it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from vllm.logger import init_logger

from mpic.engine.vllm.plugin.chunk_inputs import FileRefused, first_layer_inputs, prompt_inputs
from mpic.errors import CorruptFile, OutOfMemory
from mpic.kv.chunk import ChunkInputs
from mpic.kv.expected import Expected, check_inputs, check_layer
from mpic.kv.file import ChunkFile
from mpic.kv.page_locked import PAGE_LOCKED, page_locked_bytes
from mpic.memory import as_errors

logger = init_logger(__name__)


class CachedFile:
    """A chunk file that is, or will be, in host memory.

    Attributes:
        state: ``reading``, ``ready`` or ``failed``.
        code, reason: the cause of the failure; the code is ``missing``, ``corrupt``, ``mismatch``, ``forbidden``,
            ``out_of_memory`` or ``internal_error``.
        file: its absolute path, with symbolic links resolved.
        inputs: known as soon as the file is open, before its KV is read; ids as prompts have them (``prompt_inputs``).
        sink: sink tokens it was compiled behind.
        kv: ``[layers, 2, kv_heads, n, head_dim]``; None until it is read, and if KV is not kept.
        pins: number of loads that hold it.
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
        return _in_another_process, (self.file, self.path, self.key, self.tokens, self.sink)

    @property
    def unopened(self) -> bool:
        """True until it is known whether its inputs can be used."""
        return self.state == "reading" and self.inputs is None

    def without_kv(self) -> CachedFile:
        """Return a copy of the chunk's description without its KV in host memory."""
        known = CachedFile(self.path, self.key, self.tokens)
        known.file, known.inputs, known.sink, known.state = self.file, self.inputs, self.sink, self.state
        return known

    def slice_kv(self, layers: range, heads: range) -> Sequence[torch.Tensor]:
        """Return ``[2, heads, n, head_dim]`` for each layer; in another process, as a mapping of the file whose layers
        this process has verified.

        Raises:
            CorruptFile, OSError: in another process, when the file is gone, damaged, or another chunk's.
        """
        if self.kv is not None:
            return self.kv[layers.start : layers.stop, :, heads.start : heads.stop]
        file = ChunkFile(Path(self.file), inputs=False)
        try:
            if file.key.digest != self.key:
                raise CorruptFile(f"{self.path} holds another chunk by now")
            return [layer[:, heads.start : heads.stop] for layer in file.map_layers(layers)]
        finally:
            file.close()

    def outcome(self, token_ids: np.ndarray) -> tuple[str, str, ChunkInputs | None]:
        """Check whether the chunk can be linked into a prompt that has ``token_ids [n]`` at its place. Return a code
        (empty if it can), the reason, and the chunk's inputs if they can be used."""
        if self.state == "failed":
            return self.code, self.reason, None
        if self.inputs is not None and not np.array_equal(self.inputs.token_ids.numpy(), token_ids):
            return "mismatch", f"{self.path} holds other tokens than the prompt", None
        if self.state != "ready":
            return "late", f"{self.path} was not read in time", self.inputs
        return "", "", self.inputs

    def given_inputs(self) -> ChunkInputs:
        """Return its inputs, read from the file if need be.

        Raises:
            CorruptFile, OSError: in another process, when the file is gone, or cannot be read.
        """
        if self.inputs is None:
            file = ChunkFile(Path(self.file))
            self.inputs = first_layer_inputs(file)
            file.close()
        return self.inputs


def _in_another_process(file: str, path: str, key: str, tokens: int, sink: int) -> CachedFile:
    """Return the chunk in the form for a worker in another process: ready, with its bytes still in the file."""
    chunk = CachedFile(path, key, tokens)
    chunk.file, chunk.sink, chunk.state = file, sink, "ready"
    return chunk


class FileLoad:
    """A request's chunks, pinned until ``HostMemory.release``.

    Attributes:
        chunks: in the order in which they were requested.
        started: False while there is no memory for them.
        asked: time of the request, by the monotonic clock.
        seconds: time from the request until all were read or given up; None before that.
    """

    def __init__(self, chunks: Sequence[CachedFile]) -> None:
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
    """A cache of chunk files. The least recently used ones are evicted first; those of waiting links are pinned.

    Loads start in the order of arrival, each when its bytes fit beside the pinned ones. A load larger than the whole
    budget starts when nothing else is pinned, so that every request gets its turn. The inputs of all requested chunks
    are read before any KV, because a link can proceed without KV but not without its images. A chunk is skipped if no
    load holds it when its turn comes.

    Args:
        folders: absolute; nothing outside of them is ever opened.
        budget: maximum bytes of KV, or of embeddings if KV is not kept.
        readers: threads that read files.
        keep_kv: True if the workers run in this process. Workers in other processes map the files themselves; reading
            here then only verifies a file, so the KV is dropped and its memory is not page-locked.
    """

    def __init__(
        self, folders: Sequence[Path], budget: int, readers: int, expected: Expected, keep_kv: bool = True
    ) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._budget, self._expected, self._keep_kv = budget, expected, keep_kv
        self._pinned_memory = keep_kv and torch.cuda.is_available()
        if self._pinned_memory:
            PAGE_LOCKED.allow(self, budget)
        self._changed = threading.Condition()
        self._chunks: OrderedDict[tuple[str, str], CachedFile] = OrderedDict()
        self._waiting: deque[FileLoad] = deque()
        self._held: set[FileLoad] = set()
        self._inputs: deque[CachedFile] = deque()  # chunks whose inputs are to be read
        self._kv: deque[CachedFile] = deque()  # chunks whose inputs are known and whose KV is to be read
        self._readers = ThreadPoolExecutor(readers, "mpic-read")

    def load(self, wanted: Sequence[tuple[str, str, int]], first: bool = False) -> FileLoad:
        """Start to read chunks.

        Args:
            wanted: ``(path, key digest, tokens)`` of each.
            first: put the load ahead of those that wait for memory (for a preempted request).
        """
        with self._changed:
            load = FileLoad([self._chunk(*one) for one in wanted])
            (self._waiting.appendleft if first else self._waiting.append)(load)
            self._start()
        return load

    def release(self, load: FileLoad) -> None:
        """Unpin a load's chunks; harmless when repeated."""
        with self._changed:
            if load in self._held:
                self._held.discard(load)
                for chunk in load.chunks:
                    chunk.pins -= 1
            elif load in self._waiting:
                self._waiting.remove(load)
            self._start()
            self._evict()

    def wait(self, seconds: float) -> None:
        """Wait until a chunk is read or given up, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def _chunk(self, path: str, key: str, tokens: int) -> CachedFile:
        found = self._chunks.get((path, key))
        if found is None or found.tokens != tokens:
            return CachedFile(path, key, tokens)
        self._chunks.move_to_end((path, key))
        return found

    def _bytes(self, chunk: CachedFile) -> int:
        expected = self._expected
        width = expected.shape.per_token if self._keep_kv else expected.hidden * (1 + expected.deepstack)
        size = chunk.tokens * width * expected.dtype.itemsize
        return page_locked_bytes(size) if self._pinned_memory else size

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

    def _enter(self, chunk: CachedFile) -> CachedFile:
        """Pin a chunk, and read it unless another load of the same chunk has already begun."""
        name = (chunk.path, chunk.key)
        known = self._chunks.get(name)
        if known is None or known.tokens != chunk.tokens:
            # make a new object, because a reader may still hold an evicted one
            self._chunks[name] = known = CachedFile(*name, chunk.tokens)
            self._inputs.append(known)
            self._readers.submit(self._read_next)
        known.pins += 1
        return known

    def _evict(self) -> None:
        excess = sum(map(self._bytes, self._chunks.values())) - self._budget
        for name, chunk in list(self._chunks.items()):
            if excess <= 0:
                return
            if not chunk.pins:
                del self._chunks[name]
                excess -= self._bytes(chunk)

    def _read_next(self) -> None:
        """Read one chunk's inputs, or, when no chunk lacks them, one chunk's KV."""
        with self._changed:
            queue = self._inputs or self._kv
            chunk, read = queue.popleft(), self._read_inputs if queue is self._inputs else self._read_kv
            if self._abandoned(chunk):
                return
        code = reason = ""
        try:
            with as_errors():
                read(chunk)
        except FileRefused as error:
            code, reason = error.code, str(error)
        except FileNotFoundError:
            code, reason = "missing", f"{chunk.path} does not exist"
        except CorruptFile as error:
            code, reason = "corrupt", error.message
        except OutOfMemory as error:
            logger.warning("chunk file %s could not be read: %s", chunk.path, error)
            code, reason = error.code, f"{chunk.path} could not be read: {error.message}"
        except OSError as error:
            code, reason = "corrupt", f"{chunk.path} cannot be read: {error}"
        except Exception as error:  # otherwise the chunk would be lost, and the request would wait for ever
            logger.exception("chunk file %s could not be read", chunk.path)
            code, reason = "internal_error", f"{chunk.path} could not be read: {error!r}"
        with self._changed:
            if code:
                chunk.code, chunk.reason, chunk.state = code, reason, "failed"
                self._forget(chunk)  # the file may be repaired by the next request
            elif queue is self._inputs:
                self._kv.append(chunk)
                self._submit()
            else:
                chunk.state = "ready"
                self._evict()  # its load may have ended in the meantime
            del chunk  # if it is evicted from now on, its memory is freed at once
            self._changed.notify_all()

    def _submit(self) -> None:
        with suppress(RuntimeError):  # closed in the meantime
            self._readers.submit(self._read_next)

    def _abandoned(self, chunk: CachedFile) -> bool:
        """Return whether no load waits for a chunk any more; a later load reads it again."""
        if chunk.pins:
            return False
        self._forget(chunk)
        return True

    def _forget(self, chunk: CachedFile) -> None:
        if self._chunks.get((chunk.path, chunk.key)) is chunk:
            del self._chunks[chunk.path, chunk.key]

    def _read_inputs(self, chunk: CachedFile) -> None:
        file = self._open(chunk)
        chunk.file, chunk.sink = str(file.path), file.key.recipe.sink
        chunk.inputs = prompt_inputs(file, self._expected.adapter)
        file.close()

    def _read_kv(self, chunk: CachedFile) -> None:
        file = self._open(chunk, inputs=False)  # reopened, because many chunks may wait at once
        shape = self._expected.shape.extent(chunk.tokens)
        allocate = PAGE_LOCKED.empty if self._pinned_memory else torch.empty
        kv = allocate(shape, dtype=self._expected.dtype)
        for number in file.read_layers(kv):
            check_layer(chunk.path, number, kv[number], self._expected)
        file.close()
        chunk.kv = kv if self._keep_kv else None

    def _open(self, chunk: CachedFile, inputs: bool = True) -> ChunkFile:
        file = ChunkFile(self._resolve(chunk.path), inputs=inputs)
        try:
            if file.key.digest != chunk.key:
                raise FileRefused("mismatch", f"{chunk.path} holds another chunk than the order names")
            if (file.shape, file.dtype) != self._expected[:2]:
                raise FileRefused("mismatch", f"{chunk.path} is of another model: {file.shape}, {file.dtype}")
            if file.tokens != chunk.tokens:
                raise FileRefused("mismatch", f"{chunk.path} has {file.tokens} tokens, not {chunk.tokens}")
            if inputs:
                check_inputs(chunk.path, file.key, file.inputs, self._expected)
        except FileRefused:
            file.close()
            raise
        except CorruptFile as error:  # reading verifies its checksums
            file.close()
            raise FileRefused("mismatch", error.message) from error
        return file

    def _resolve(self, path: str) -> Path:
        for folder in self._folders:
            try:
                file = (folder / path).resolve(strict=True)
            except OSError:
                continue
            if not file.is_relative_to(folder):
                raise FileRefused("forbidden", f"{path} leads out of the folders that may be read")
            if not file.is_file():  # opening a pipe could block for ever
                raise FileRefused("mismatch", f"{path} is not a file")
            return file
        raise FileNotFoundError(path)
