"""Chunks into a GPU's paged cache while the forward computes, layer by layer.

Keys and values cross the bus on a stream of their own, in transfers of some layers each, into two buffers by turns.
Before a layer attends, vLLM asks for it (``MPICConnector.wait_for_layer_load``): the computing stream then waits for
the transfers of this layer, rotates their keys and writes them into the cache, and the next transfer begins when that
is done. So layers compute while later ones cross. The host waits for nothing.

The cache itself is written on the computing stream only: its blocks were another request's until a moment ago, and
that order is what keeps the two apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mpic.engine.vllm.plugin.key_rotation import KeyRotation
from mpic.engine.vllm.plugin.kv_import import PagedWrite
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.kernels.attention import QueryRotation, rotate
from mpic.kernels.upload import send
from mpic.kv.copies import Copies, copies_for

MOST, LEAST = 64 << 20, 16 << 20
"""Bytes of a transfer: at most, and at least where the chunk has them. Smaller ones would begin earlier and cost more
launches."""


class Transfer(NamedTuple):
    """A part of a write: some of this worker's layers and some of its tokens, by number."""

    write: PagedWrite
    layers: range
    tokens: range


def transfers(writes: Sequence[PagedWrite], most: int, least: int) -> list[Transfer]:
    """Cuts writes into transfers, those of the first layers first.

    Args:
        most: bytes of the largest.
        least: bytes that one has at least, where that is not above ``most``.

    Raises:
        ValueError: one token in one layer is larger than ``most``.
    """
    found = []
    for write in writes:
        if write.token_bytes > most:
            raise ValueError(f"a token takes {write.token_bytes} bytes, a transfer has {most} at most")
        layer = write.count * write.token_bytes
        group = max(1, min(most // layer, -(-least // layer)))
        step = write.count if layer <= most else most // write.token_bytes
        for first in range(0, len(write.kv), group):
            layers = range(first, min(first + group, len(write.kv)))
            for token in range(0, write.count, step):
                found.append(Transfer(write, layers, range(token, min(token + step, write.count))))
    return sorted(found, key=lambda transfer: transfer.layers.start)


class CopiesAtOnce:
    """The part of ``mpic.kv.copies.Copies`` that a placement uses, on a device without streams: every copy takes its
    turn among what the device computes."""

    def order(self) -> None:
        pass

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def follow(self, mark: Any) -> None:
        pass


class Staging:
    """The stream of transfers and the device memory that they go through, kept for the life of the engine.

    Args:
        copies: None chooses.
        size: bytes of each of the two buffers, which are allocated on first use: in the self-test, before anybody is
            served.
    """

    def __init__(
        self, device: torch.device, copies: Copies | CopiesAtOnce | None = None, size: int = MOST
    ) -> None:
        self.copies = copies or copies_for(device) or CopiesAtOnce()
        self.device, self.size = device, size

    @cached_property
    def buffers(self) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # else only inference mode could write them
            return [torch.empty(self.size, dtype=torch.uint8, device=self.device) for _ in range(2)]


class Placement:
    """The chunks that one step places. Its transfers begin at once.

    Args:
        writes: of any requests.
    """

    def __init__(
        self, paged: PagedCache, rotation: KeyRotation, writes: Sequence[PagedWrite], staging: Staging
    ) -> None:
        self._paged, self._copies = paged, staging.copies
        self._waiting = deque(transfers(writes, staging.size, min(LEAST, staging.size)))
        self._sent: deque[tuple[Transfer, torch.Tensor, torch.Tensor, Any]] = deque()
        self._slots = {id(write): send(write.slots, paged.device) for write in writes}
        turns = {write.delta: rotation.by(write.delta) for write in writes}
        self._turns = {delta: self._sent_turn(turn) for delta, turn in turns.items()}
        self._free = list(staging.buffers)
        self._copies.order()  # whoever used their memory last is on the computing stream
        self._send()

    def layer(self, number: int) -> None:
        """Gives the device what it must do before decoder layer ``number`` attends."""
        index = number - self._paged.layers.start
        while self._sent and self._sent[0][0].layers.start <= index:
            self._write(*self._sent.popleft())
            self._send()

    @property
    def done(self) -> bool:
        return not self._sent

    def finish(self) -> None:
        """Places all layers that are left."""
        self.layer(self._paged.layers.stop)

    def _sent_turn(self, turn: QueryRotation | None) -> QueryRotation | None:
        if turn is None:
            return None
        cos, sin = (send(table, self._paged.device) for table in turn[:2])
        return turn._replace(cos=cos, sin=sin)

    def _send(self) -> None:
        """Starts transfers as long as there is a buffer for them. What reads a buffer must be on the computing stream,
        and the copies ordered behind it, by now."""
        while self._free and self._waiting:
            transfer, buffer = self._waiting.popleft(), self._free.pop()
            source = self._source(transfer)
            memory = buffer[: source.nbytes].view(source.dtype).view(source.shape)
            self._sent.append((transfer, buffer, memory, self._copies.start(memory, source)))

    def _source(self, transfer: Transfer) -> torch.Tensor:
        """Returns ``[layers, 2, heads, tokens, head_dim]`` in contiguous host memory.

        A whole chunk lies so in page-locked memory already and is copied from there. A part of one, or a chunk that
        this process maps from its file, is gathered first: a strided transfer would go through pageable memory.
        """
        write, layers, tokens = transfer
        kv = write.kv[layers.start : layers.stop]
        two, heads, n, width = kv[0].shape
        if isinstance(kv, torch.Tensor) and kv.is_contiguous() and len(tokens) == n:
            return kv
        if isinstance(write.tokens, slice):
            first = write.tokens.start
            picked: slice | torch.Tensor = slice(first + tokens.start, first + tokens.stop)
        else:
            picked = write.tokens[tokens.start : tokens.stop]
        gathered = self._copies.buffer((len(kv), two, heads, len(tokens), width), kv[0].dtype)
        for i, layer in enumerate(kv):
            gathered[i] = layer[:, :, picked]
        return gathered

    def _write(self, transfer: Transfer, buffer: torch.Tensor, memory: torch.Tensor, mark: Any) -> None:
        """Has the device rotate and write what a transfer brings, and then fill its buffer again."""
        write, layers, tokens = transfer
        self._copies.follow(mark)
        keys, values = memory.unbind(1)
        if (turn := self._turns[write.delta]) is not None:
            keys = rotate(keys, turn)
        slots = self._slots[id(write)][tokens.start : tokens.stop]
        for i, layer in enumerate(layers):
            number = self._paged.layers[layer]
            self._paged.write(number, keys[i].transpose(0, 1), values[i].transpose(0, 1), slots)
        self._copies.order()
        self._free.append(buffer)
