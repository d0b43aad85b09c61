"""The layers of a Llama-like decoder on the CPU: builds ``decoder.c``, calls it.

For rows that stand alone (``WholeDecoder``) a step is one call, from tokens to logits. A step of one row runs about ten
modules a layer, each of a few microseconds of Python, and a dozen small operations of torch between them; for small
models and small batches that is more than the numbers take. The C file is made of those of the kernels that serve such
rows layer by layer (``stream.c``, ``linear.c``), and calls the one for blocks of rows on a matrix unit
(``linear_tiles.c``), so the results differ by rounding alone. Weights are read where they lie.

Blocks of rows (``BlockLayers``) are products (``products.py``), and between them ``decoder.c``. Written as modules, a
layer has about twenty operations between its products, each of which reads and writes all rows, most of them into new
memory: a sixth of the time of a prompt of 512 tokens (12 layers x 768). Here these are a few calls, on memory that is
used again.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mpic.kernels import c_kernel, linear, linear_tiles, products, stream
from mpic.kernels.linear import Product
from mpic.kernels.products import Products
from mpic.kernels.stream import StreamRows
from mpic.kernels.writes import RowWrites

SOURCE = Path(__file__).with_name("decoder.c")

BLOCK_ROWS = 64
"""Rows of the largest step of rows that stand alone, where blocks of rows are multiplied on a matrix unit. They are one
block there (``linear_tiles.ROWS``)."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, q [heads, T, head_dim], k [kv_heads, T, head_dim], v) -> [T, heads, head_dim]``, fp32 or the model's dtype;
queries and keys are rotated, and keys and values are in their places if these were given."""

_KEPT_ROWS = 1024
"""Rows for which memory is kept from step to step: a larger step computes so long that allocating it does not count."""

_I64, _F32, _ADDRESS = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class LayerWeights(NamedTuple):
    """The weights of a layer, in the order in which they are used. Those of norms are ``[hidden]``, or ``[head_dim]``
    for norms of heads, which are None in models without them."""

    before_attention: torch.Tensor
    query: Product
    key: Product
    value: Product
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Product
    before_gate: torch.Tensor
    gate: Product
    up: Product
    down: Product

    @property
    def flat(self) -> list[torch.Tensor | None]:
        """The tensors in the order of ``Layer`` in decoder.c."""
        return [part for one in self for part in (one if isinstance(one, Product) else [one])]


class DecoderWeights(NamedTuple):
    """A decoder without embeddings and output projection.

    Args:
        last_norm: ``[hidden]``.
        epsilon, head_epsilon: of the norms, and of those of heads.
        scale: of attention scores.
    """

    layers: list[LayerWeights]
    last_norm: torch.Tensor
    epsilon: float
    head_epsilon: float
    scale: float


class UnitStruct(ctypes.Structure):
    """``Unit`` of decoder.c."""

    _fields_ = [*((name, _ADDRESS) for name in linear_tiles.UnitFunctions._fields), ("few_rows", _I64)]


class DecoderStruct(ctypes.Structure):
    """``Decoder`` of decoder.c."""

    _fields_ = [
        ("unit", UnitStruct),
        *((name, _I64) for name in ["layers", "hidden", "heads", "kv_heads", "inner", "half"]),
        *((name, _ADDRESS) for name in ["layer", "last_norm"]),
        *((name, _F32) for name in ["epsilon", "head_epsilon", "scale"]),
    ]


class PassStruct(ctypes.Structure):
    """``Pass`` of decoder.c."""

    _fields_ = [
        ("step", _ADDRESS),
        ("rows", _I64),
        ("threads", _I64),
        *((name, _ADDRESS) for name in ["state", "out", "cosine", "sine", "memory", "slots", "places"]),
        *((name, _ADDRESS) for name in ["normed", "product", "query", "attended", "key", "value"]),
        *((name, _ADDRESS) for name in ["gate", "up", "sums", "packed", "carried"]),
    ]


class EndsStruct(ctypes.Structure):
    """``Ends`` of decoder.c."""

    _fields_ = [
        *((name, _ADDRESS) for name in ["embedding", "head", "head_bias"]),
        ("outputs", _I64),
    ]


class DecoderLayers:
    """The layers of one model; made by ``DecoderKernel.decoder``.

    Args:
        half: pairs of dimensions ``(i, i + half)`` of a head that turn.

    Raises:
        ValueError: weights of other dtypes or devices, or of sizes that do not fit together.

    ``most_rows``: rows of the largest step of rows that stand alone.
    """

    def __init__(self, kernel: DecoderKernel, weights: DecoderWeights, half: int) -> None:
        first = weights.layers[0]
        self._inner, self.hidden = first.gate.weight.shape
        self.head_dim, self._kv_dtype = kernel.head_dim, kernel.kv_dtype
        self._heads, self._kv_heads = (len(p.weight) // self.head_dim for p in (first.query, first.key))
        self.dtype = first.before_attention.dtype
        self.weights, self.half = weights, half  # kept alive, because C holds their addresses
        self._refuse(weights)
        table = [[0 if w is None else w.data_ptr() for w in layer.flat] for layer in weights.layers]
        self._table = np.array(table, dtype=np.int64)
        few, self._blocks = kernel.products.few, kernel.products.tiles
        widths = (self.hidden, self._heads * self.head_dim, self._inner)
        self._widest = max(widths)
        if self._blocks is not None and not all(map(self._blocks.takes, widths)):
            self._blocks = None
        self.most_rows = few.most_rows if self._blocks is None else BLOCK_ROWS
        unit = UnitStruct()
        if self._blocks is not None:
            unit = UnitStruct(*self._blocks.functions, self._blocks.least_rows - 1)
        self.struct = DecoderStruct(
            unit,
            *(len(table), self.hidden, self._heads, self._kv_heads, self._inner, half),
            *(self._table.ctypes.data, weights.last_norm.data_ptr()),
            *(weights.epsilon, weights.head_epsilon, weights.scale),
        )

    def takes(self, state: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
        """Return whether these can be the inputs of the first layer, and the rotations of their rows."""
        fits = state.shape == (len(state), self.hidden)
        fits = fits and state.dtype is self.dtype and state.is_contiguous()
        for table in (cosine, sine):
            fits = fits and table.shape == (len(state), self.half) and table.dtype is torch.float32
            fits = fits and table.is_contiguous()
        return fits

    def writes_to(self, writes: RowWrites, rows: int) -> bool:
        """Return whether keys and values of so many rows can be written as a step's tables say."""
        fits = writes.count == rows and writes.memory.dtype is self._kv_dtype
        slots = len(self.weights.layers), 2 * self._kv_heads * rows
        return fits and writes.index.shape == slots and writes.memory.shape[1] == self.head_dim

    def room(self, rows: int) -> dict[str, torch.Tensor]:
        """Return memory for a step of so many rows to work in, ``[rows, width]`` each, by the names in ``Pass``."""
        own, kv = self._heads * self.head_dim, self._kv_heads * self.head_dim
        widths = {"normed": self.hidden, "product": self.hidden, "query": own, "key": kv, "value": kv}
        widths |= {"gate": self._inner, "up": self._inner}
        return {name: torch.empty(rows, width, dtype=self.dtype) for name, width in widths.items()}

    def make_room(self, step: PassStruct, rows: int) -> list[torch.Tensor]:
        """Has a step of so many rows, and of the threads that torch has now, work in memory that is allocated for it,
        and returns that memory, which has to be kept as long as the step is."""
        room = self.room(rows)
        room["attended"] = torch.empty_like(room["query"])
        is_fp32 = self.dtype is torch.float32
        room["sums"] = room["attended"] if is_fp32 else room["attended"].float()
        unit: list[torch.Tensor] = []
        if self._blocks is not None:
            sizes = self._blocks.memory(rows, self._widest, torch.get_num_threads())
            unit = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            step.packed, step.carried = map(linear_tiles.aligned, unit)
        for name, memory in room.items():  # behind all that may fail
            setattr(step, name, memory.data_ptr())
        return [*room.values(), *unit]

    def _refuse(self, weights: DecoderWeights) -> None:
        """Raise ValueError if weights cannot be read as those of one decoder."""
        own, kv = self._heads * self.head_dim, self._kv_heads * self.head_dim
        inputs = {"query": own, "key": kv, "value": kv, "gate": self._inner, "up": self._inner}
        sizes = {name: (outputs, self.hidden) for name, outputs in inputs.items()}
        sizes |= {"output": (self.hidden, own), "down": (self.hidden, self._inner)}
        norms = {"before_attention": self.hidden, "before_gate": self.hidden}
        norms |= {"query_norm": self.head_dim, "key_norm": self.head_dim}
        self.refuse_tensor("last_norm", weights.last_norm, (self.hidden,))
        for number, layer in enumerate(weights.layers):
            for name, part in layer._asdict().items():
                if isinstance(part, Product):
                    self.refuse_tensor(f"{name} of layer {number}", part.weight, sizes[name])
                    if part.bias is not None:
                        self.refuse_tensor(f"bias of {name} of layer {number}", part.bias, sizes[name][:1])
                elif part is not None:
                    self.refuse_tensor(f"{name} of layer {number}", part, (norms[name],))
        if self._heads % self._kv_heads or 2 * self.half > self.head_dim:
            raise ValueError(f"{self._heads} heads over {self._kv_heads}, of which {self.half} pairs turn")

    def refuse_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a weight has another shape, dtype or layout than C reads."""
        fits = tuple(tensor.shape) == shape and tensor.dtype is self.dtype
        if not fits or not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {shape} {self.dtype}")


class DecoderKernel:
    """The kernel for one head dimension, dtype and dtype of keys and values; ``load`` makes it.

    Args:
        products: those of layers.
    """

    name = "cpu-decoder"

    def __init__(
        self, head_dim: int, kv_dtype: torch.dtype, library: ctypes.CDLL, products: Products
    ) -> None:
        self.head_dim, self.kv_dtype, self.products = head_dim, kv_dtype, products
        self.between, self.decode_tokens = library.between, library.decode_tokens
        structs = [ctypes.POINTER(DecoderStruct), ctypes.POINTER(PassStruct)]
        self.between.argtypes, self.decode_tokens.argtypes = (
            [*structs, _I64, _I64],
            [*structs, *[_ADDRESS] * 3],
        )
        self.between.restype = self.decode_tokens.restype = None

    def decoder(self, weights: DecoderWeights, half: int) -> DecoderLayers:
        """Return the layers of a model; see ``DecoderLayers``."""
        return DecoderLayers(self, weights, half)


class WholeDecoder:
    """Steps of one model in which every row stands alone. One engine uses it, one step at a time: the memory to work in
    and the logits are one.

    Args:
        kernel: that of the layers.
        layers: the model's layers.
        embedding: ``[vocabulary, hidden]``.
        head: the output projection.

    Raises:
        ValueError: weights of other dtypes, devices, sizes or layouts than the layers have.

    Attributes:
        most_rows: rows of the largest step.
        vocabulary: number of tokens that have an embedding.
    """

    def __init__(
        self, kernel: DecoderKernel, layers: DecoderLayers, embedding: torch.Tensor, head: Product
    ) -> None:
        self.vocabulary, outputs = len(embedding), len(head.weight)
        layers.refuse_tensor("the embedding", embedding, (self.vocabulary, layers.hidden))
        layers.refuse_tensor("the output projection", head.weight, (outputs, layers.hidden))
        if head.bias is not None:
            layers.refuse_tensor("the bias of the output projection", head.bias, (outputs,))
        self._layers, self.most_rows = layers, layers.most_rows
        self._function = kernel.decode_tokens
        bias = None if head.bias is None else head.bias.data_ptr()
        self._ends = EndsStruct(embedding.data_ptr(), head.weight.data_ptr(), bias, outputs)
        self._weights = embedding, head  # kept alive, because C holds their addresses
        self._tokens = np.zeros(self.most_rows, np.int64)
        self._logits = torch.empty(self.most_rows, outputs, dtype=layers.dtype)
        self._places = ctypes.addressof(self._ends), self._tokens.ctypes.data, self._logits.data_ptr()
        state = torch.empty(2, self.most_rows, layers.hidden, dtype=layers.dtype)
        self._pass = PassStruct(state=state[0].data_ptr(), out=state[1].data_ptr())
        self._state, self._room, self._threads = state, list[torch.Tensor](), 0
        self._tables: tuple[StreamRows, RowWrites] | None = None

    def use(self, rows: StreamRows, writes: RowWrites) -> None:
        """Bind these tables; later steps read their current contents.

        Args:
            rows: the spans that each row sees.
            writes: the slots of keys and values.

        Raises:
            ValueError: they are not those of one step of this model.
        """
        count = len(rows.rows)
        if not 0 < count <= self.most_rows or not self._layers.writes_to(writes, count):
            raise ValueError(f"a step of {count} rows does not write keys and values of this model")
        this = self._pass
        this.step, this.rows = rows.address, count
        this.memory, this.slots = writes.memory.data_ptr(), writes.index.data_ptr()
        self._tables = rows, writes

    def __call__(self, tokens: list[int], cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Run a step: keys and values are written, then attended to.

        Args:
            tokens: of the rows, each below ``vocabulary``.
            cosine, sine: ``[rows, half]`` fp32, of the rows' positions.

        Returns:
            Logits ``[rows, outputs]`` in the model's dtype, valid until the next step.

        Raises:
            ValueError: numbers that are no tokens, or rotations of another size, dtype or layout.
        """
        this = self._pass
        rows = this.rows
        if len(tokens) != rows or min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise ValueError(f"{len(tokens)} tokens, up to {max(tokens)}, of {rows} rows")
        if not self._layers.takes(self._state[0, :rows], cosine, sine):
            raise ValueError(f"{tuple(cosine.shape)} {cosine.dtype} are no rotations of {rows} rows")
        self._tokens[:rows] = tokens
        this.threads = torch.get_num_threads()
        if this.threads > self._threads:
            self._room, self._threads = self._layers.make_room(this, self.most_rows), this.threads
        this.cosine, this.sine = cosine.data_ptr(), sine.data_ptr()
        self._function(self._layers.struct, this, *self._places)
        return self._logits[:rows]


class BlockPart(IntEnum):
    """A part of a layer that stands between products (``between`` of decoder.c)."""

    BEFORE_ATTENTION = 0
    HEADS = 1
    BEFORE_GATE = 2
    ACTIVATION = 3
    LAST = 4


class BlockLayers:
    """The layers of one model for steps of any rows.

    Args:
        kernel: has made ``layers``.
    """

    def __init__(self, kernel: DecoderKernel, layers: DecoderLayers) -> None:
        self._function, self._products = kernel.between, kernel.products
        self._layers = layers
        self._memory = threading.local()  # a step may wait for loads, and others must not wait with it

    def __call__(
        self,
        state: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        places: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Run all layers. Behind the attention of the last one only the rows whose results are wanted are computed.

        Args:
            state: ``[T, hidden]``, the inputs of the first layer; overwritten.
            cosine, sine: ``[T, half]`` fp32, of the rows' positions.
            places: ``[T, 4]`` int64, where a row's keys and values go: address in layer 0 and key head 0 (0: nowhere),
                and the distances to the next layer, from keys to values and to the next head, in numbers.
            attend: computes a layer's attention.
            wanted: ``[w]`` int64, the rows whose results are wanted.

        Returns:
            ``[w, hidden]`` behind the last norm.

        Raises:
            ValueError: tensors of other sizes, dtypes or layouts.
        """
        count, layers = len(state), self._layers
        fits = layers.takes(state, cosine, sine) and places.shape == (count, 4)
        if not fits or places.dtype is not torch.int64 or not places.is_contiguous():
            raise ValueError(f"cpu-decoder cannot run a step of {tuple(state.shape)} {state.dtype}")
        room = self._room(count)
        this = PassStruct(rows=count, threads=torch.get_num_threads())
        _point(this, {"state": state, "cosine": cosine, "sine": sine, "places": places, **room})
        heads = [
            room[name].view(count, -1, layers.head_dim).transpose(0, 1) for name in ("query", "key", "value")
        ]
        last = len(layers.weights.layers) - 1
        for layer in range(last + 1):
            attended = self._attended(layer, this, room, heads, attend)
            if layer == last and len(wanted) < count:
                state, attended = state[wanted], attended[wanted]
                room = {name: memory[: len(wanted)] for name, memory in room.items()}
                this.rows = len(wanted)
                _point(this, {"state": state})
            if this.rows:
                self._behind_attention(layer, this, room, attended)
        out = torch.empty_like(state)
        if this.rows:
            _point(this, {"out": out})
            self._between(this, BlockPart.LAST, last)
        return out if len(wanted) < count else out[wanted]

    def _attended(
        self,
        layer: int,
        this: PassStruct,
        room: dict[str, torch.Tensor],
        heads: list[torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Compute a layer up to its attention, whose results it returns: ``[T, heads * head_dim]``."""
        weights = self._layers.weights.layers[layer]
        self._between(this, BlockPart.BEFORE_ATTENTION, layer)
        projections = [weights.query, weights.key, weights.value]
        self._products.into(room["normed"], projections, [room[name] for name in ("query", "key", "value")])
        self._between(this, BlockPart.HEADS, layer)
        return attend(layer, *heads).reshape(this.rows, -1).to(self._layers.dtype)

    def _behind_attention(
        self, layer: int, this: PassStruct, room: dict[str, torch.Tensor], attended: torch.Tensor
    ) -> None:
        """Compute the rest of a layer for ``this.rows`` rows, whose state it changes, from what they have attended to,
        ``[rows, heads * head_dim]``; ``room`` has memory for as many."""
        weights, multiply = self._layers.weights.layers[layer], self._products.into
        multiply(attended, [weights.output], [room["product"]])
        self._between(this, BlockPart.BEFORE_GATE, layer)
        multiply(room["normed"], [weights.gate, weights.up], [room["gate"], room["up"]])
        self._between(this, BlockPart.ACTIVATION, layer)
        multiply(room["gate"], [weights.down], [room["product"]])

    def _between(self, this: PassStruct, part: BlockPart, layer: int) -> None:
        self._function(self._layers.struct, this, part, layer)

    def _room(self, count: int) -> dict[str, torch.Tensor]:
        """Return memory for ``count`` rows."""
        if count > _KEPT_ROWS:
            return self._layers.room(count)
        kept: dict[str, torch.Tensor] | None = getattr(self._memory, "room", None)
        if kept is None or len(kept["normed"]) < count:
            kept = self._memory.room = self._layers.room(count)
        return {name: memory[:count] for name, memory in kept.items()}


def _point(this: PassStruct, tensors: dict[str, torch.Tensor]) -> None:
    """Bind the tensors that the next step works on."""
    for name, tensor in tensors.items():
        setattr(this, name, tensor.data_ptr())


@functools.cache
def load(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> DecoderKernel:
    """Build the kernel, or take it from the cache folder. The kernels that it is made of have proved themselves;
    whether it computes what a model does is proved with the model (``mpic.model.program_proof``).

    Args:
        kv_dtype: of keys and values; None: the model's.

    Raises:
        KernelUnavailable: with the reason.
    """
    kv_dtype = kv_dtype or dtype
    multiply = products.load(dtype)
    stream.load(head_dim, dtype, kv_dtype)
    how, options = linear.variant(dtype)
    name, kinds = c_kernel.variant(head_dim, dtype, kv_dtype)
    options = [*options, *kinds, f"-DSECTION={stream.SECTION}"]
    built = c_kernel.build(SOURCE, f"{name}-{how.replace(' ', '-')}", options)
    return DecoderKernel(head_dim, kv_dtype, built, multiply)
