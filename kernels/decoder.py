"""The layers of a Llama-like decoder on the CPU: builds ``decoder.c``, calls it. All of them in one call for rows that
stand alone; ``decoder_blocks.py`` runs blocks of rows.

A step of one row runs about ten modules a layer, each of a few microseconds of Python, and a dozen small operations of
torch between them. For small models and small batches that is more than the numbers take. The C file is made of those
of the kernels that serve such rows layer by layer (``stream.c``, ``linear.c``), and calls the one for blocks of rows on
a matrix unit (``linear_tiles.c``), so the results differ by rounding
alone. Weights are read where they lie. ``whole_decoder.py`` runs the same from tokens to logits.
"""

from __future__ import annotations

import ctypes
import functools
import threading
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
        self._function = kernel.decode
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
        self._pass, self._lock = PassStruct(), threading.Lock()
        self._room: list[torch.Tensor] = []
        self._rows = self._threads = 0  # for which there is room

    def __call__(
        self,
        state: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        writes: RowWrites,
        rows: StreamRows,
    ) -> torch.Tensor:
        """Runs all layers; keys and values are written, then attended to.

        Args:
            state: ``[T, hidden]``, the inputs of the first layer; overwritten.
            cosine, sine: ``[T, half]`` fp32, of the rows' positions.
            writes, rows: the tables of the step, in which all T rows stand alone, in order.

        Returns:
            ``[T, hidden]`` behind the last norm.

        Raises:
            ValueError: tensors of other sizes, dtypes or layouts.
        """
        count = len(state)
        if (
            count > self.most_rows
            or not self.takes(state, cosine, sine)
            or count != len(rows.rows)
            or not self.writes_to(writes, count)
        ):
            raise ValueError(f"cpu-decoder cannot run a step of {tuple(state.shape)} {state.dtype}")
        out, this = torch.empty_like(state), self._pass
        with self._lock:  # the memory to work in is one
            threads = torch.get_num_threads()
            if count > self._rows or threads > self._threads:
                most = max(count, self._rows)
                self._room = self.make_room(this, most)
                self._rows, self._threads = most, threads
            this.step, this.rows, this.threads = rows.address, count, threads
            this.state, this.out = state.data_ptr(), out.data_ptr()
            this.cosine, this.sine = cosine.data_ptr(), sine.data_ptr()
            this.memory, this.slots = writes.memory.data_ptr(), writes.index.data_ptr()
            self._function(self.struct, this)
        return out

    def takes(self, state: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
        """Returns whether these can be the inputs of the first layer, and the rotations of their rows."""
        fits = state.shape == (len(state), self.hidden)
        fits = fits and state.dtype is self.dtype and state.is_contiguous()
        for table in (cosine, sine):
            fits = fits and table.shape == (len(state), self.half) and table.dtype is torch.float32
            fits = fits and table.is_contiguous()
        return fits

    def writes_to(self, writes: RowWrites, rows: int) -> bool:
        """Returns whether keys and values of so many rows can be written as a step's tables say."""
        fits = writes.count == rows and writes.memory.dtype is self._kv_dtype
        slots = len(self.weights.layers), 2 * self._kv_heads * rows
        return fits and writes.index.shape == slots and writes.memory.shape[1] == self.head_dim

    def room(self, rows: int) -> dict[str, torch.Tensor]:
        """Returns memory for a step of so many rows to work in, ``[rows, width]`` each, by the names in ``Pass``."""
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
        """Raises ValueError if weights cannot be read as those of one decoder."""
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
        """Raises ValueError if a weight has another shape, dtype or layout than C reads."""
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
        self.decode, self.between, self.decode_tokens = library.decode, library.between, library.decode_tokens
        structs = [ctypes.POINTER(DecoderStruct), ctypes.POINTER(PassStruct)]
        self.decode.argtypes, self.between.argtypes = structs, [*structs, _I64, _I64]
        self.decode_tokens.argtypes = [*structs, *[_ADDRESS] * 3]
        self.decode.restype = self.between.restype = self.decode_tokens.restype = None

    def decoder(self, weights: DecoderWeights, half: int) -> DecoderLayers:
        """Returns the layers of a model; see ``DecoderLayers``."""
        return DecoderLayers(self, weights, half)


@functools.cache
def load(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> DecoderKernel:
    """Builds the kernel, or takes it from the cache folder. The kernels that it is made of have proved themselves;
    whether it computes what a model does is proved with the model (``mpic.model.fused_proof``).

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
