"""Places chunks in a GPU's paged cache layer by layer, while the forward computes.

Keys and values cross the bus on a stream of their own, in transfers of a few layers each (``transfers.py``),
alternating between two buffers. Before a layer attends, vLLM asks for it (``MPICConnector.wait_for_layer_load``): the
computing stream then waits for the transfers of this layer, picks the linked tokens from the buffer, rotates their keys
and writes them into the cache; then the next transfer begins. So layers compute while later layers are copied.

If scheduler and worker share a process, all chunks are in page-locked memory and are copied from there: the host
touches none of their bytes and waits for nothing. A worker in another process maps a chunk from its file, and the host
first reads the bytes into page-locked memory.

The cache itself is written on the computing stream only: its blocks may have belonged to another request a moment ago,
and the order on that stream keeps the two apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mpic.engine.vllm.plugin.key_rotation import KeyRotation
from mpic.engine.vllm.plugin.kv_import import PagedWrite
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.transfers import Transfer, TransferSizes, transfers
from mpic.kernels.attention import QueryRotation, rotate
from mpic.kernels.upload import send
from mpic.kv.copies import Copies, copies_for


class CopiesAtOnce:
    """The part of ``mpic.kv.copies.Copies`` that a placement uses, for a device without streams: copies run in order
    with the computation."""

    def order(self) -> None:
        pass

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def start_all(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in copies:
            target.copy_(source)

    def follow(self, mark: Any) -> None:
        pass

    def wait(self, mark: Any) -> None:
        pass


class PendingTransfer(NamedTuple):
    """A transfer under way: the buffer that it fills, the transferred tensor in that buffer, and the mark of its
    copies."""

    transfer: Transfer
    buffer: Buffer
    memory: torch.Tensor
    mark: Any


class Buffer:
    """Device memory that transfers pass through one after another, and page-locked memory of the same size, allocated
    with the first chunk that is not page-locked."""

    def __init__(self, device: torch.device, copies: Copies | CopiesAtOnce, size: int) -> None:
        self._copies = copies
        self._mark: Any = None  # of the latest copy, which may still read page-locked memory
        with torch.inference_mode(False):  # else only inference mode could write it
            self._device = torch.empty(size, dtype=torch.uint8, device=device)

    @cached_property
    def _host(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._copies.buffer(self._device.shape, self._device.dtype)

    def fill(self, transfer: Transfer) -> PendingTransfer:
        """Start a transfer into the buffer. Work that reads the buffer must already be on the computing stream, and the
        copies must be ordered after it."""
        kv = transfer.write.kv[transfer.layers.start : transfer.layers.stop]
        memory = _shaped(self._device, transfer)
        tokens = slice(transfer.crossing.start, transfer.crossing.stop)
        if not isinstance(kv, torch.Tensor):
            mark = self._mark = self._copies.start(memory, self._read(kv, tokens, transfer))
        elif memory.shape == kv.shape and kv.is_contiguous():
            mark = self._copies.start(memory, kv)
        else:
            heads = (head[tokens] for layer in kv for half in layer for head in half)
            mark = self._copies.start_all(zip(memory.flatten(0, 2), heads, strict=True))
        return PendingTransfer(transfer, self, memory, mark)

    def _read(self, kv: Sequence[torch.Tensor], tokens: slice, transfer: Transfer) -> torch.Tensor:
        """Read the bytes to transfer from a mapped file into the page-locked memory. This waits for the copy of two
        transfers ago, the last to use this memory, while the copy after that is still running."""
        if self._mark is not None:
            self._copies.wait(self._mark)
        memory = _shaped(self._host, transfer)
        for to, layer in zip(memory, kv, strict=True):
            to.copy_(layer[:, :, tokens])
        return memory


def _shaped(memory: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    """Return the beginning of a buffer as the tensor that is transferred."""
    layers, *_ = shape = transfer.shape
    size = layers * len(transfer.crossing) * transfer.write.token_bytes
    return memory[:size].view(transfer.write.kv[0].dtype).view(shape)


class TransferBuffers:
    """The stream of transfers and the memory that they pass through, kept for the life of the engine.

    Args:
        copies: None chooses by the device.
        sizes: sizes of transfers. There are two buffers of the largest size, allocated on first use, which is the
            self-test before any request.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Copies | CopiesAtOnce | None = None,
        sizes: TransferSizes = TransferSizes(),  # noqa: B008 (a tuple)
    ) -> None:
        self.copies = copies or copies_for(device) or CopiesAtOnce()
        self.device, self.sizes = device, sizes

    @cached_property
    def buffers(self) -> list[Buffer]:
        return [Buffer(self.device, self.copies, self.sizes.most) for _ in range(2)]


class Placement:
    """The chunks that one step places. Transfers begin at once.

    Args:
        writes: writes of any number of requests.
    """

    def __init__(
        self, paged: PagedCache, rotation: KeyRotation, writes: Sequence[PagedWrite], staging: TransferBuffers
    ) -> None:
        self._paged, self._copies = paged, staging.copies
        self._waiting = deque(transfers(writes, staging.sizes))
        self._sent: deque[PendingTransfer] = deque()
        self._slots = {id(write): send(write.slots, paged.device) for write in writes}
        scattered = [write for write in writes if not isinstance(write.tokens, slice)]
        self._tokens = {id(write): send(write.tokens, paged.device) for write in scattered}
        turns = {write.delta: rotation.by(write.delta) for write in writes}
        self._turns = {delta: self._sent_turn(turn) for delta, turn in turns.items()}
        self._free = list(staging.buffers)
        self._copies.order()  # their memory was last used on the computing stream
        self._send()

    def layer(self, number: int) -> None:
        """Queue the device work that must be done before decoder layer ``number`` attends."""
        index = number - self._paged.layers.start
        while self._sent and self._sent[0].transfer.layers.start <= index:
            self._write(self._sent.popleft())
            self._send()

    @property
    def done(self) -> bool:
        return not self._sent

    def finish(self) -> None:
        """Place all remaining layers."""
        self.layer(self._paged.layers.stop)

    def _sent_turn(self, turn: QueryRotation | None) -> QueryRotation | None:
        if turn is None:
            return None
        cos, sin = (send(table, self._paged.device) for table in turn[:2])
        return turn._replace(cos=cos, sin=sin)

    def _send(self) -> None:
        """Start transfers while there is a free buffer."""
        while self._free and self._waiting:
            self._sent.append(self._free.pop().fill(self._waiting.popleft()))

    def _write(self, sent: PendingTransfer) -> None:
        """Queue the rotation and write of a transfer's tokens, and then the next transfer into its buffer."""
        write, layers, picks, span, crossing = sent.transfer
        self._copies.follow(sent.mark)
        inside = slice(span.start - crossing.start, span.stop - crossing.start)
        keys, values = (half[:, :, inside] for half in sent.memory.unbind(1))
        if (turn := self._turns[write.delta]) is not None:
            keys = rotate(keys, turn)
        chosen = slice(picks.start, picks.stop)
        slots = self._slots[id(write)][chosen]
        index = None if len(picks) == len(span) else self._tokens[id(write)][chosen] - span.start
        for i, layer in enumerate(layers):
            both = (half[i].transpose(0, 1) for half in (keys, values))
            if index is not None:
                both = (half.index_select(0, index) for half in both)
            self._paged.write(self._paged.layers[layer], *both, slots)
        self._copies.order()
        self._free.append(sent.buffer)
