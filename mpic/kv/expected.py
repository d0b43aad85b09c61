"""Stored chunks, checked against the model before anything of them is used.

Checksums say that a file has the bytes that were written. They do not show that a model can use them: embeddings of
another shape or type, ids outside the vocabulary, or keys that are not finite would fail a step, and with it every
answer in that step. Both engines check here what they read. A file that does not fit is moved aside, like a damaged
one, and the chunk is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from mpic.errors import CompileFailed, CorruptFile, MPICError
from mpic.kv.chunk import ChunkInputs, ChunkKV, KVKey, KVShape
from mpic.kv.parts import LayerRange, Piece, PieceReader
from mpic.kv.store import ChunkStore, PartedChunk, Reservation, StoredChunk, optional
from mpic.memory import is_exhaustion

MOST_POSITIONS = 1 << 24
"""Largest position: rotary embeddings use float32, which cannot tell larger integers apart."""


class Soft(Protocol):
    """The part of an adapter that checks of its chunks need; its length is its number of tokens."""

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...


class Expected(NamedTuple):
    """Properties that a chunk must have to fit the model.

    Args:
        shape, dtype: shape and type of its KV, over all workers.
        hidden: width of embeddings.
        deepstack: layers of an image's DeepStack features.
        adapter: of packets; None if the model has none.
        embeds: type of embeddings.
        vocabulary: rows of the table of embeddings.
        axes: numbers of rotary axes that positions may have; those of a text may always have one.
        image: the token that stands for an image; None where it is not known.
        own: for each layer, the key heads and the size of a head that it uses; the rest of its KV may be anything.
            Empty where every layer uses all.
    """

    shape: KVShape
    dtype: torch.dtype
    hidden: int
    deepstack: int
    adapter: Soft | None = None
    embeds: torch.dtype | None = None
    vocabulary: int | None = None
    axes: tuple[int, ...] = (1, 3)
    image: int | None = None
    own: tuple[tuple[int, int], ...] = ()


def check_inputs(name: str, key: KVKey, inputs: ChunkInputs, expected: Expected) -> None:
    """Check what the first layer gets of a chunk.

    Args:
        name: of the file or the chunk, for the message.

    Raises:
        CorruptFile: it does not fit the model, or the chunk was compiled inside another adapter.
    """
    n, kind, packet, soft = len(inputs), key.chunk.kind, key.recipe.packet, expected.adapter
    if packet and (soft is None or packet != soft.digest or n < len(soft)):
        raise CorruptFile(f"{name} was compiled inside another adapter ({packet[:12]})")
    wanted: list[tuple[int, ...] | None] = [None, None]
    if kind != "text" or packet:
        wanted[0] = (n, expected.hidden)
    if kind != "text" and expected.deepstack:
        wanted[1] = (expected.deepstack, n, expected.hidden)
    floats = (inputs.embeds, inputs.deepstack)
    given = [None if t is None else tuple(t.shape) for t in floats]
    if given != wanted:
        raise CorruptFile(f"{name} has embeddings of shape {given[0]} and {given[1]}, not {wanted}")
    for values in floats:
        if values is not None and values.dtype != (expected.embeds or expected.dtype):
            raise CorruptFile(
                f"{name} has embeddings of {values.dtype}, not {expected.embeds or expected.dtype}"
            )
        if values is not None and not all_finite(values):
            raise CorruptFile(f"{name} has embeddings that are not finite numbers")
    ids = inputs.token_ids
    if ids.dim() != 1 or ids.dtype != torch.int64 or n == 0:
        raise CorruptFile(f"{name} has token ids of shape {tuple(ids.shape)} and {ids.dtype}")
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or (expected.vocabulary is not None and highest >= expected.vocabulary):
        raise CorruptFile(f"{name} has token ids from {lowest} to {highest}, which the model does not know")
    if kind == "image" and expected.image is not None and not (ids == expected.image).any():
        raise CorruptFile(f"{name} has no token that stands for an image")
    _check_positions(name, kind, inputs, expected.axes)


def _check_positions(name: str, kind: str, inputs: ChunkInputs, axes: tuple[int, ...]) -> None:
    positions, n = inputs.positions, len(inputs)
    allowed = {1, *axes} if kind == "text" else axes
    if positions.dtype != torch.int64 or positions.shape not in [(axis, n) for axis in allowed]:
        raise CorruptFile(f"{name} has positions of shape {tuple(positions.shape)} and {positions.dtype}")
    if kind == "text" or len(positions) == 1:
        good = inputs.rotary_length == n and bool((positions == torch.arange(n)).all())
    else:
        lowest, highest = (int(bound) for bound in torch.aminmax(positions))
        good = lowest == 0 and highest < MOST_POSITIONS and 1 <= inputs.rotary_length <= highest + 1
        # the text behind a clip may go on before the positions that the clip's time takes
        good = good and (kind == "video" or inputs.rotary_length == highest + 1)
    if not good:
        raise CorruptFile(f"{name} has positions that no chunk of {n} tokens has")


def all_finite(values: torch.Tensor) -> bool:
    """Return whether a tensor has neither infinite values nor NaN. Its sum shows that at the speed of memory; only if
    the sum is not finite are the values looked at, since finite ones may overflow."""
    if values.numel() == 0 or bool(values.sum().isfinite()):
        return True
    return all(bool(bound.isfinite()) for bound in torch.aminmax(values))


def check_layer(name: str, number: int, layer: torch.Tensor, expected: Expected) -> None:
    """Check ``[parts, kv_heads, slots, head_dim]`` of one layer's KV.

    Raises:
        CorruptFile: there are values that are not finite.
    """
    if expected.own:
        heads, size = expected.own[number]
        layer = layer[:, :heads, :, :size]
    if not all_finite(layer):
        raise CorruptFile(f"layer {number} of {name} has keys or values that are not finite numbers")


def check_piece(name: str, piece: Piece, memory: torch.Tensor, expected: Expected) -> None:
    """Check ``[planes, slots, head_dim]`` of a piece as ``check_layer`` checks a layer."""
    good = True
    if not expected.own:
        good = all_finite(memory)
    else:
        layer = expected.shape.parts * expected.shape.kv_heads
        for plane, values in zip(piece.planes, memory, strict=True):
            heads, size = expected.own[piece.layers.start + plane // layer]
            good = good and (plane % expected.shape.kv_heads >= heads or all_finite(values[:, :size]))
    if not good:
        where = f"{piece.layers.start} to {piece.layers.stop - 1}"
        raise CorruptFile(f"layers {where} of {name} have keys or values that are not finite numbers")


class CheckedStore:
    """A ``ChunkStore`` whose chunks are checked as they are read (see the module)."""

    def __init__(self, store: ChunkStore, expected: Expected) -> None:
        self._store, self._expected = store, expected

    @property
    def root(self) -> Path:
        return self._store.root

    def path(self, key: KVKey) -> Path:
        return self._store.path(key)

    def touch(self, keys: Iterable[KVKey]) -> None:
        self._store.touch(keys)

    def missing_reason(self, key: KVKey) -> str:
        return self._store.missing_reason(key)

    def find(self, keys: Sequence[KVKey]) -> Mapping[KVKey, CheckedChunk]:
        found = self._store.find(keys)
        return {key: CheckedChunk(key, stored, self._expected) for key, stored in found.items()}

    def open(self, key: KVKey) -> CheckedChunk | None:
        stored = self._store.open(key)
        if stored is None:
            return None
        chunk = CheckedChunk(key, stored, self._expected)
        try:
            _ = chunk.inputs
        except (MPICError, OSError):  # the tier that found it has moved it aside, or counted it
            return None
        return chunk

    def save(self, chunk: ChunkKV) -> None:
        """Save a chunk as the store does, unless it would be refused when it is read.

        Raises:
            CompileFailed: the model has computed keys or values that are not finite.
        """
        try:
            for number, layer in enumerate(chunk.kv):
                check_layer(f"compiled chunk {chunk.key.chunk}", number, layer, self._expected)
        except CorruptFile as error:
            raise CompileFailed(error.message) from error
        self._store.save(chunk)


class CheckedChunk:
    """A ``StoredChunk`` that is checked as it is read. Whatever is read first, the inputs are checked first."""

    def __init__(self, key: KVKey, stored: StoredChunk, expected: Expected) -> None:
        self._key, self._stored, self._expected = key, stored, expected
        self._known: torch.Tensor | None = None
        self._inputs: ChunkInputs | None = None

    @property
    def tier(self) -> str:
        return self._stored.tier

    @property
    def _name(self) -> str:
        return f"chunk {self._key.chunk} of tier {self.tier}"

    @property
    def inputs(self) -> ChunkInputs:
        if self._inputs is None:
            inputs = self._stored.inputs
            with self._refusing():
                check_inputs(self._name, self._key, inputs, self._expected)
            self._inputs = inputs
        return self._inputs

    def expect(self, token_ids: torch.Tensor) -> None:
        self._known = token_ids

    def read_ahead(self) -> None:
        optional(self._stored, "read_ahead")

    def worth(self, seconds: float) -> bool:
        return optional(self._stored, "worth", seconds) is not False

    def lend(self) -> torch.Tensor | None:
        self._check()
        return optional(self._stored, "lend")

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> Reservation | None:
        return optional(self._stored, "reserve", shape, dtype)

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        number = -1
        try:
            self._check()
            for number in self._stored.read_layers(destination):
                with self._refusing():
                    check_layer(self._name, number, destination[number], self._expected)
                yield number
        # the destination has the shape that the model and these inputs ask for
        except (ValueError, IndexError, RuntimeError) as error:
            if is_exhaustion(error):
                raise
            with self._refusing():
                raise CorruptFile(f"{self._name} has KV of another shape: {error}") from error
        finally:
            self._close()
        with self._refusing():
            if number + 1 < len(destination):
                raise CorruptFile(f"{self._name} has KV of {number + 1} layers, not {len(destination)}")

    def in_parts(self, most: int) -> CheckedParts | None:
        self._check()
        parted = optional(self._stored, "in_parts", most)
        if parted is None:
            return None
        wanted = self._expected.shape.extent(self._key.recipe.slots(len(self.inputs)))
        checked = CheckedParts(parted, self._check_piece, self._close)
        if (tuple(parted.shape), parted.dtype) != (wanted, self._expected.dtype):
            with closing(checked), self._refusing():
                raise CorruptFile(f"{self._name} has KV of shape {tuple(parted.shape)} and {parted.dtype}")
        return checked

    def _check_piece(self, piece: Piece, memory: torch.Tensor) -> None:
        with self._refusing():
            check_piece(self._name, piece, memory, self._expected)

    def _check(self) -> None:
        """Check the inputs, before KV is read.

        Raises:
            CorruptFile: they do not fit the model, or are those of other tokens.
        """
        token_ids = self.inputs.token_ids
        with self._refusing():
            if self._known is not None and not torch.equal(token_ids, self._known):
                raise CorruptFile(f"{self._name} holds other tokens than its content has")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Tell the tier to move the chunk aside if the block finds that it does not fit the model."""
        try:
            yield
        except CorruptFile as error:
            optional(self._stored, "refuse", error)
            raise

    def _close(self) -> None:
        """Close what was opened for the inputs of a text alone: a prompt may link hundreds, and its engine has their
        ids. An image's inputs are read once, and its KV must be readable when the chunk has been evicted meanwhile."""
        if self._key.chunk.kind == "text":
            self._inputs = None
            optional(self._stored, "close")


class CheckedParts:
    """A ``PartedChunk`` whose pieces are checked as they are read.

    Args:
        check: called with every piece that was read, and its memory.
        closed: called when it is closed.
    """

    def __init__(
        self,
        parted: PartedChunk,
        check: Callable[[Piece, torch.Tensor], None],
        closed: Callable[[], None],
    ) -> None:
        self._parted, self._check, self._closed = parted, check, closed
        self.shape, self.dtype, self.parts = parted.shape, parted.dtype, parted.parts

    def read_part(self, part: LayerRange) -> Iterator[tuple[Piece, PieceReader]]:
        for piece, read in self._parted.read_part(part):
            yield piece, partial(self._read, piece, read)

    def _read(self, piece: Piece, read: PieceReader, memory: torch.Tensor) -> None:
        read(memory)
        self._check(piece, memory)

    def close(self) -> None:
        self._parted.close()
        self._closed()
