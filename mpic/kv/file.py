"""A compiled chunk in one file.

The file is valid safetensors, laid out for reading with few large reads straight into place::

    8 bytes            length of the header, little endian
    header             JSON, padded with spaces so that the data starts at a multiple of 4 KiB
    kv.000 kv.001 ...  one ``[parts, kv_heads, m, head_dim]`` a layer: together the bytes of
                       ``[layers, parts, kv_heads, m, head_dim]`` exactly as they lie in memory
    pad                zeros up to a multiple of 4 KiB
    token_ids positions embeds deepstack

Every byte is under an XXH3-64 checksum: one for the header (itself included, with the checksum's digits as zeros), one
for each layer, one for everything after the layers. The first two of these parts are verified when the file is opened.
"""

from __future__ import annotations

import json
import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from mpic.durable import FileSystem, read_all, write_durably
from mpic.errors import CorruptFile, OutOfMemory
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, KVShape, Recipe
from mpic.kv.parts import LayerRange, Piece, PieceReader, cut
from mpic.memory import is_exhaustion

FORMAT = "mpic-chunk-1"
BLOCK = 4096
IO_BYTES = 2 << 20
"""A read covers whole layers and at least this many bytes, where the chunk has them. Larger reads gain nothing, and
smaller ones are still in the processor's cache when they are verified."""

HEAD_BYTES = 64 << 10
MAX_HEADER = 16 << 20
PREFIX = b'{"__metadata__":{"header_xxh3":"'
"""Every header starts with these bytes; the 16 hexadecimal digits of its own checksum follow."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INPUTS = ("token_ids", "positions", "embeds", "deepstack")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, writable, without a copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"needs contiguous host memory, got {tuple(tensor.shape)} on {tensor.device}")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def checksum(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _round_up(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write(path: Path, chunk: ChunkKV, files: FileSystem | None = None) -> int:
    """Write a chunk durably (see ``write_durably``) and return the size of the file in bytes.

    Raises:
        StorageFull: the disk is full; nothing is left behind.
        ValueError: the chunk contradicts its own key (dtype, codec, number of tokens).
    """
    parts = encode(chunk)
    write_durably(files or FileSystem(), path, parts)
    return sum(map(len, parts))


def encode(chunk: ChunkKV) -> list[memoryview]:
    """Return the file's bytes in parts: header, KV, padding, inputs. KV in contiguous host memory is not copied.

    Raises:
        ValueError: the chunk contradicts its own key (dtype, codec, number of tokens).
    """
    _check(chunk)
    kv = chunk.kv.detach().cpu().contiguous()
    body = bytes_of(kv)
    step = len(body) // kv.shape[0]
    pad = torch.zeros(_round_up(len(body)) - len(body), dtype=torch.uint8)
    present = {n: getattr(chunk.inputs, n) for n in INPUTS if getattr(chunk.inputs, n) is not None}
    ordered = sorted(present.items(), key=lambda item: -item[1].element_size())
    tail = [("pad", pad), *((name, t.detach().cpu().contiguous()) for name, t in ordered)]

    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in (*((f"kv.{i:03d}", layer) for i, layer in enumerate(kv)), *tail):
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    after = xxhash.xxh3_64()
    for _, tensor in tail:
        after.update(bytes_of(tensor))
    metadata = {
        "format": FORMAT,
        "owner": chunk.key.owner,
        "kind": chunk.key.chunk.kind,
        "digest": chunk.key.chunk.digest,
        "model": chunk.key.model,
        "recipe": json.dumps(chunk.key.recipe.fields(), sort_keys=True),
        "extent": str(chunk.inputs.rotary_length),
        "layers_xxh3": " ".join(checksum(body[i * step : (i + 1) * step]) for i in range(kv.shape[0])),
        "inputs_xxh3": after.hexdigest(),
    }
    header = _header(metadata, entries)
    return [memoryview(header), body, *(bytes_of(t) for _, t in tail)]


def _check(chunk: ChunkKV) -> None:
    recipe = chunk.key.recipe
    slots = recipe.slots(len(chunk.inputs))
    if recipe.codec != "raw":
        raise ValueError(f"no codec {recipe.codec!r}; there is: raw")
    if chunk.kv.dim() != 5 or chunk.kv.shape[1] != recipe.parts or chunk.kv.shape[3] != slots:
        wanted = f"[layers, {recipe.parts}, kv_heads, {slots}, head_dim]"
        raise ValueError(f"kv is {tuple(chunk.kv.shape)}, not {wanted}")
    if _dtype_name(chunk.kv.dtype) != recipe.dtype:
        raise ValueError(f"kv is {chunk.kv.dtype}, its recipe says {recipe.dtype}")
    if slots == 0:
        raise ValueError("a chunk of no tokens is not stored")


def _header(metadata: dict[str, str], entries: dict[str, Any]) -> bytes:
    rest = json.dumps(metadata)[1:], json.dumps(entries)[1:]
    text = PREFIX + b"0" * 16 + f'",{rest[0]},{rest[1]}'.encode()
    size = _round_up(8 + len(text))
    raw = bytearray((size - 8).to_bytes(8, "little") + text.ljust(size - 8))
    begin = 8 + len(PREFIX)
    raw[begin : begin + 16] = checksum(bytes(raw)).encode()
    return bytes(raw)


class ChunkFile:
    """An open chunk file: its key, its inputs, and its KV on request.

    The file stays open, so a chunk that is deleted or evicted meanwhile can still be read, until it is closed or
    dropped.

    Attributes:
        key: key of the chunk in the file; equal to the requested key.
        inputs: the chunk's inputs, in host memory and verified; None when they were not requested.
        tokens: number of the chunk's tokens.
        slots: number of tokens in the KV; fewer when it is compressed.
        shape: geometry of the KV.
        bytes: size of the file.
    """

    key: KVKey
    inputs: ChunkInputs | None
    tokens: int
    slots: int
    shape: KVShape
    dtype: torch.dtype
    bytes: int

    def __init__(
        self,
        path: Path,
        key: KVKey | None = None,
        files: FileSystem | None = None,
        inputs: bool = True,
        damaged: Callable[[CorruptFile, ChunkFile], None] = lambda error, file: None,
    ) -> None:
        """Open the file and verify everything but the layers.

        Args:
            key: key of the chunk that the file must hold; None accepts any.
            inputs: False does not read the inputs, for a reader that has them already.
            damaged: called with the CorruptFile that is about to be raised, while the file is still open (``named``).

        Raises:
            FileNotFoundError: there is no such file.
            CorruptFile: it is damaged, truncated, not a chunk file, or holds another key.
            OSError, OutOfMemory: it cannot be read now; it may be intact.
        """
        self.path = path
        self._files = files or FileSystem()
        self._fd = self._files.open(path)
        self._close = weakref.finalize(self, self._files.close, self._fd)
        try:
            self._verify(key, inputs)
        except BaseException as error:
            if isinstance(error, CorruptFile):
                damaged(error, self)
            self.close()
            raise

    def named(self) -> bool:
        """Return whether the path still names this file, and not one that has replaced it."""
        return self._files.names(self.path, self._fd)

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        self._close()

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Fill ``destination [layers, parts, kv_heads, slots, head_dim]`` (host memory) and verify every layer.

        Bytes are read straight into the destination where it is contiguous; where it is not (a chunk behind sink
        slots) each layer goes through a buffer of a few MiB. Checksums are computed by the thread that has just read
        the bytes, while they are in its cache. Each ``next`` does at most one read, and another thread may do the
        following one.

        Yields:
            The number of each layer, in order, as soon as its bytes are in place and verified.

        Raises:
            CorruptFile: a layer's checksum does not match, or the file ended early. Only layers that were yielded
                may be used of ``destination``.
            OSError: the file cannot be read now; it may be intact.
            ValueError: the destination has another shape or type, or is not host memory.
        """
        wanted = self.shape.extent(self.slots)
        if tuple(destination.shape) != wanted or destination.dtype != self.dtype:
            got = f"{tuple(destination.shape)} {destination.dtype}"
            raise ValueError(f"the chunk is {wanted} {self.dtype}, the destination {got}")
        if destination.device.type != "cpu":
            raise ValueError(f"a file is read into host memory, not to {destination.device}")
        layers, step = self.shape.layers, math.prod(wanted[1:]) * self.dtype.itemsize
        group = min(layers, -(-IO_BYTES // step))
        direct = destination.is_contiguous()
        buffer = destination if direct else torch.empty((group, *wanted[1:]), dtype=self.dtype)
        view = bytes_of(buffer)
        for first in range(0, layers, group):
            last = min(first + group, layers)
            held = 0 if direct else first  # first layer in the buffer, which begins anew with every group
            self._fill(view[(first - held) * step : (last - held) * step], self._data + first * step)
            for layer in range(first, last):
                i = layer - held  # in the buffer
                if checksum(view[i * step : (i + 1) * step]) != self._sums[layer]:
                    raise CorruptFile(f"layer {layer} of {self.path.name} is damaged")
                if not direct:
                    destination[layer].copy_(buffer[i])
                yield layer

    def map_layers(self, layers: range) -> list[torch.Tensor]:
        """Return ``[parts, kv_heads, slots, head_dim]`` of each layer as a mapping of the file, which outlives it and
        takes no memory of its own. The whole of each layer is read once and verified, through the same mapping.

        Raises:
            CorruptFile: a layer's checksum does not match, or the file ended early.
            OSError: the file cannot be mapped now; it may be intact.
        """
        shape = self.shape.extent(self.slots)[1:]
        count = math.prod(shape)
        step = count * self.dtype.itemsize
        if self._data + step * layers.stop > self._files.size(self._fd):
            raise CorruptFile(f"{self.path.name} ends before layer {layers.stop - 1}")
        mapped = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        found = []
        for layer in layers:
            first = self._data + layer * step
            if checksum(memoryview(mapped)[first : first + step]) != self._sums[layer]:
                raise CorruptFile(f"layer {layer} of {self.path.name} is damaged")
            found.append(torch.frombuffer(mapped, dtype=self.dtype, count=count, offset=first).view(shape))
        return found

    @property
    def kv_end(self) -> int:
        """The offset at which the KV ends: a load reads so many bytes."""
        return self._data + math.prod(self.shape.extent(self.slots)) * self.dtype.itemsize

    def parts(self, most: int) -> list[LayerRange]:
        """Return the KV in parts that can be read at the same time, in pieces of at most ``most`` bytes."""
        return cut(self.shape, self.slots, self.dtype.itemsize, most, IO_BYTES)

    def read_part(self, part: LayerRange) -> Iterator[tuple[Piece, PieceReader]]:
        """Yield every piece of a part, in order, with what reads it: one read into the memory that it is given, and
        the layers' checksums, by the thread that reads. Each must be read before the next is asked for."""
        sums = [xxhash.xxh3_64() for _ in part.layers]
        for piece in part.pieces:
            yield piece, partial(self._read_piece, piece, sums)

    def _read_piece(self, piece: Piece, sums: list[xxhash.xxh3_64], memory: torch.Tensor) -> None:
        wanted = (len(piece.planes), len(piece.slots), self.shape.head_dim)
        if tuple(memory.shape) != wanted or memory.dtype != self.dtype:
            raise ValueError(f"the piece is {wanted} {self.dtype}, not {tuple(memory.shape)} {memory.dtype}")
        view = bytes_of(memory)
        self._fill(view, self._data + piece.offset)
        step = len(view) // len(sums)
        for i, (layer, verified) in enumerate(zip(piece.layers, sums, strict=True)):
            verified.update(view[i * step : (i + 1) * step])
            if piece.last and verified.hexdigest() != self._sums[layer]:
                raise CorruptFile(f"layer {layer} of {self.path.name} is damaged")

    def _fill(self, view: memoryview, offset: int) -> None:
        done = read_all(self._files, self._fd, view, offset)
        if done < len(view):
            raise CorruptFile(f"{self.path.name} ends at byte {offset + done}")

    def _verify(self, key: KVKey | None, inputs: bool) -> None:
        try:
            self._parse(key, inputs)
        except (CorruptFile, OSError):
            raise
        except Exception as error:  # a header that another program wrote may raise almost any exception
            if is_exhaustion(error):
                raise OutOfMemory(f"there is not enough memory now to read {self.path.name}") from error
            message = f"{self.path.name} is not a chunk file that can be used: {error!r}"
            raise CorruptFile(message) from error

    def _parse(self, key: KVKey | None, inputs: bool) -> None:
        header = self._read_header()
        metadata = header.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise CorruptFile(f"{self.path.name} has format {metadata['format']!r}, not {FORMAT!r}")
        recipe = Recipe(**json.loads(metadata["recipe"]))
        chunk = ChunkKey(metadata["kind"], metadata["digest"])
        self.key = KVKey(metadata["owner"], chunk, metadata["model"], recipe)
        if key is not None and self.key != key:
            raise CorruptFile(f"{self.path.name} holds another chunk than was asked for")

        self._sums = metadata["layers_xxh3"].split()
        layers = [header.pop(f"kv.{i:03d}") for i in range(len(self._sums))]
        shape = layers[0]["shape"]
        self.dtype = DTYPES[layers[0]["dtype"]]
        self.shape = KVShape(len(layers), shape[1], shape[3], shape[0])
        step = math.prod(shape) * self.dtype.itemsize
        for i, layer in enumerate(layers):
            expected = {
                "dtype": layers[0]["dtype"],
                "shape": shape,
                "data_offsets": [i * step, (i + 1) * step],
            }
            if layer != expected:
                raise CorruptFile(f"layer {i} of {self.path.name} is not where it should be")
        if _dtype_name(self.dtype) != recipe.dtype or recipe.codec != "raw":
            raise CorruptFile(f"{self.path.name} is not stored as its recipe says")
        self.tokens, self.slots, self.inputs = header["token_ids"]["shape"][0], shape[2], None
        if inputs:
            self.inputs = self._read_inputs(header, len(layers) * step, metadata)
        if shape[0] != recipe.parts or self.slots != recipe.slots(self.tokens):
            raise CorruptFile(f"{self.path.name} has KV of shape {shape} for other inputs")

    def _read_header(self) -> dict[str, Any]:
        self.bytes = self._files.size(self._fd)
        raw = bytearray(min(self.bytes, HEAD_BYTES))
        self._fill(memoryview(raw), 0)
        begin = 8 + len(PREFIX)  # offset of the checksum's digits
        if raw[8:begin] != PREFIX:
            raise CorruptFile(f"{self.path.name} was not written by this system")
        self._data = 8 + int.from_bytes(raw[:8], "little")
        if self._data > min(self.bytes, MAX_HEADER) or self._data % BLOCK:
            raise CorruptFile(
                f"{self.path.name} has a header of {self._data} bytes in a file of {self.bytes}"
            )
        if self._data > len(raw):
            raw = bytearray(self._data)
            self._fill(memoryview(raw), 0)
        del raw[self._data :]
        stated = raw[begin : begin + 16].decode("ascii", "replace")
        raw[begin : begin + 16] = b"0" * 16
        if checksum(bytes(raw)) != stated:
            raise CorruptFile(f"the header of {self.path.name} is damaged")
        return json.loads(raw[8:])

    def _read_inputs(self, entries: dict[str, Any], start: int, metadata: dict[str, str]) -> ChunkInputs:
        end = start
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][0] != end:
                raise CorruptFile(f"{name} of {self.path.name} is not where it should be")
            end = entry["data_offsets"][1]
        if self._data + end != self.bytes:
            raise CorruptFile(f"{self.path.name} should have {self._data + end} bytes, it has {self.bytes}")
        tail = torch.empty(end - start, dtype=torch.uint8)
        self._fill(bytes_of(tail), self._data + start)
        if checksum(bytes_of(tail)) != metadata["inputs_xxh3"]:
            raise CorruptFile(f"the inputs of {self.path.name} are damaged")
        tensors = {}
        for name, entry in entries.items():
            lo, hi = (offset - start for offset in entry["data_offsets"])
            tensors[name] = tail[lo:hi].view(DTYPES[entry["dtype"]]).view(entry["shape"])
        tensors.pop("pad", None)
        return ChunkInputs(rotary_length=int(metadata["extent"]), **tensors)
