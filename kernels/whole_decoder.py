"""Decoding steps on the CPU from the rows' tokens to their logits, in one call of ``decoder.c``.

Beside the layers (``decoder.py``) it looks up the embeddings and multiplies with the output projection, so that a step
which continues the one before is a call with two arrays of a few numbers: no operation of torch is left, each of which
takes as long as a small layer and lets other threads run in between.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from mpic.kernels.decoder import DecoderKernel, DecoderLayers, PassStruct
from mpic.kernels.linear import Product
from mpic.kernels.stream import StreamRows
from mpic.kernels.writes import RowWrites


class EndsStruct(ctypes.Structure):
    """``Ends`` of decoder.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ["embedding", "head", "head_bias"]),
        ("outputs", ctypes.c_int64),
    ]


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
        self._rotations: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps, self._step_bytes, self._addresses = 0, 0, (0, 0)  # of the rotations

    def use(self, rows: StreamRows, writes: RowWrites) -> None:
        """Has the steps that follow use these tables, with what they say by then.

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
        if count != this.rows:
            self._rotations, self._steps = None, 0
        this.step, this.rows = rows.address, count
        this.memory, this.slots = writes.memory.data_ptr(), writes.index.data_ptr()
        self._tables = rows, writes

    def rotate(self, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Sets the rotations of steps: cosine and sine ``[steps, rows, half]`` fp32 of the rows' positions.

        Raises:
            ValueError: tensors of another size, dtype or layout.
        """
        for table in (cosine, sine):
            shape, layout = (self._pass.rows, self._layers.half), table.is_contiguous()
            if (
                table.shape[1:] != shape
                or len(table) != len(cosine)
                or table.dtype is not torch.float32
                or not layout
            ):
                raise ValueError(f"{tuple(table.shape)} {table.dtype} are no rotations of {shape}")
        self._rotations = cosine, sine
        self._steps, self._step_bytes = len(cosine), cosine[:1].nbytes
        self._addresses = cosine.data_ptr(), sine.data_ptr()

    def __call__(self, tokens: list[int], step: int) -> torch.Tensor:
        """Runs a step: keys and values are written, then attended to.

        Args:
            tokens: of the rows, each below ``vocabulary``.
            step: number of the rotations.

        Returns:
            Logits ``[rows, outputs]`` in the model's dtype, valid until the next step.

        Raises:
            ValueError: numbers that are no tokens, or rotations that were not set.
        """
        this = self._pass
        rows = this.rows
        if len(tokens) != rows or min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise ValueError(f"{len(tokens)} tokens, up to {max(tokens)}, of {rows} rows")
        if not 0 <= step < self._steps:
            raise ValueError(f"no rotations of step {step} of {rows} rows")
        self._tokens[:rows] = tokens
        this.threads = torch.get_num_threads()
        if this.threads > self._threads:
            self._room, self._threads = self._layers.make_room(this, self.most_rows), this.threads
        skipped = step * self._step_bytes
        this.cosine, this.sine = self._addresses[0] + skipped, self._addresses[1] + skipped
        self._function(self._layers.struct, this, *self._places)
        return self._logits[:rows]
