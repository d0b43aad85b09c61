"""Steps with blocks of rows (links, chunks that are compiled), whose parts between the attention of two layers are
captured in CUDA graphs.

Between the attention of one layer and the next a model computes row by row: norms, matrix products, rotations. What
is launched there depends on the number of rows alone, so these *pieces* are captured once, when the engine starts, for
some numbers of rows (a *bucket*; smaller steps are filled up). The attention, whose work depends on what the rows see,
is launched as in any other step, and so a link waits for its loads layer by layer as ever. A step of 32 layers takes
the host 33 replays and 32 attentions instead of 1,200 launches, for which the device would wait.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mpic.errors import IntegrityError
from mpic.kernels.attention import Extras
from mpic.kernels.upload import send
from mpic.model.hooks import LayerCall, Step, attend_layer
from mpic.model.loaded import LoadedModel
from mpic.model.structure import RowInputs, has_layer_embeddings

SIZES = (8, 64, 128, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024)
"""Numbers of rows of buckets. Below 256 a product takes as long as reading the weights, whatever the rows; beyond 1,024
the device computes for longer than the host launches."""

Cut = Callable[[], None]
"""Ends a piece and begins the next."""

Piece = Callable[[], object]
"""Something the device does over memory that stays where it is."""

CapturePieces = Callable[[Callable[[Cut], None]], Sequence[Piece]]
"""Runs some work once or more, then gives the pieces into which it has cut itself, without the host's part."""


def bucket_sizes(budget: int) -> list[int]:
    """Return the numbers of rows that pieces are captured for, the largest first, for steps of up to ``budget`` rows:
    none that every step would leave for a smaller one."""
    return sorted(
        (size for size, below in zip(SIZES, (0, *SIZES), strict=False) if below < budget), reverse=True
    )


class Places(NamedTuple):
    """The buffers of a layer's attention: queries ``[1, heads, rows, d]``, keys and values ``[1, kv_heads, rows, d]``,
    which are one where values are the keys, and the result ``[1, rows, heads, d]``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor

    def of(self, rows: int) -> Places:
        """Return those of the first rows."""
        query, key = self.query[:, :, :rows], self.key[:, :, :rows]
        value = key if self.value is self.key else self.value[:, :, :rows]
        return Places(query, key, value, self.out[:, :rows])


class LayerAttention(NamedTuple):
    """A layer's attention between two pieces.

    Args:
        places: the index of its ``Places`` among those of the bucket. Layers with heads of one size share them.
    """

    layer: int
    places: int
    scale: float
    extras: Extras

    def run(self, step: Step, places: Sequence[Places]) -> None:
        """Compute the attention of the rows at these places, as ``step`` says."""
        query, key, value, out = places[self.places]
        out.copy_(attend_layer(step, LayerCall(self.layer, query, key, value, self.scale, self.extras)))


class Buffers:
    """Memory of queries, keys, values and results, which all layers and all buckets share.

    Args:
        most: rows of the largest bucket, which is the first to use each of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._made.values())

    def fill(self, value: float) -> None:
        """Set every number of every buffer."""
        for tensor in self._made.values():
            tensor.fill_(value)

    def view(self, name: str, like: torch.Tensor, shape: Sequence[int], rows: int) -> torch.Tensor:
        """Return the buffer of this name for tensors of a shape, whose size grows with the number of rows."""
        width = torch.Size(shape).numel() // rows
        flat = self._made.get((name, width))
        if flat is None:
            flat = self._made[name, width] = torch.zeros(
                self._most * width, dtype=like.dtype, device=like.device
            )
        return flat[: rows * width].view(*shape)


class CutForward:
    """The attention of a forward that is captured: it puts a layer's queries, keys and values into buffers, ends the
    piece, and goes on with the buffer of the result.

    Args:
        cut: ends the piece.

    Attributes:
        layers: the attention after each piece but the last.
        places: the buffers that it is over.
    """

    def __init__(self, buffers: Buffers, cut: Cut) -> None:
        self._buffers, self._cut = buffers, cut
        self.layers: list[LayerAttention] = []
        self.places: list[Places] = []
        self._number: dict[tuple[object, ...], int] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See ``mpic.model.hooks.Attends``."""
        number = self._places(call)
        query, key, value, out = self.places[number]
        query.copy_(call.query)
        key.copy_(call.key)
        if value is not key:
            value.copy_(call.value)
        self.layers.append(LayerAttention(call.layer, number, call.scale, call.extras))
        self._cut()
        return out

    def _places(self, call: LayerCall) -> int:
        """Return the number of the places for a layer's sizes."""
        is_pair = call.value is not call.key
        kind = (call.query.shape, call.key.shape, is_pair)
        if kind not in self._number:
            _, heads, rows, dim = call.query.shape
            query, key = (
                self._buffers.view(name, given, given.shape, rows)
                for name, given in (("query", call.query), ("key", call.key))
            )
            value = self._buffers.view("value", call.value, call.value.shape, rows) if is_pair else key
            out = self._buffers.view("out", call.query, (1, rows, heads, dim), rows)
            self._number[kind] = len(self.places)
            self.places.append(Places(query, key, value, out))
        return self._number[kind]


class CapturedPieces(NamedTuple):
    """The captured pieces for a number of rows, and the inputs that they read, which are filled before each step.

    Args:
        ids, embeds, positions: ``[rows]`` int64, ``[rows, hidden]`` and ``[p, rows]`` int64.
        pieces: one more than there are ``layers``.
        places: the buffers of the attention.
    """

    rows: int
    ids: torch.Tensor
    embeds: torch.Tensor
    positions: torch.Tensor
    pieces: Sequence[Piece]
    layers: Sequence[LayerAttention]
    places: Sequence[Places]


class PiecewiseSteps:
    """The steps of a model that fit the captured pieces.

    Args:
        budget: the most rows of a step.
        wanted: the most rows of a step whose logits are wanted.
        capture: captures the pieces of each bucket.

    Raises:
        IntegrityError: the model's layers do not all attend through MPIC.

    Attributes:
        sizes: rows of the buckets, the largest first.

    ``counters``: ``piecewise_steps``.
    """

    def __init__(self, model: LoadedModel, budget: int, wanted: int, capture: CapturePieces) -> None:
        self._model, self.sizes = model, bucket_sizes(budget)
        self._buffers = Buffers(self.most)
        self._embeds = torch.zeros_like(model.embed(torch.zeros(self.most, dtype=torch.int64)))
        # a model that returns the logits of all rows is told by their number
        wanted = next(n for n in itertools.count(wanted) if n not in self.sizes)
        self._wanted = torch.zeros(wanted, dtype=torch.int64, device=model.device)
        self._looks_up_ids = has_layer_embeddings(model.text_model)
        self._logits: torch.Tensor | None = None
        self.counters: Counter[str] = Counter()
        self._buckets = [self._bucket(rows, capture) for rows in self.sizes]

    @property
    def most(self) -> int:
        """Rows of the largest bucket."""
        return self.sizes[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that stay, besides a few for tokens and positions."""
        logits = 0 if self._logits is None else self._logits.nbytes
        return self._buffers.nbytes + self._embeds.nbytes + logits

    @torch.inference_mode()
    def _bucket(self, rows: int, capture: CapturePieces) -> CapturedPieces:
        model, device = self._model, self._model.device
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        embeds = self._embeds[:rows]
        positions = torch.zeros(model.mrope, rows, dtype=torch.int64, device=device)
        forwards: list[CutForward] = []

        def work(cut: Cut) -> None:
            forward = CutForward(self._buffers, cut)
            forwards.append(forward)
            out = model.call(RowInputs(ids, embeds), positions, forward, self._wanted)
            logits = (
                out.logits[0] if out.logits.shape[1] == len(self._wanted) else out.logits[0, self._wanted]
            )
            if self._logits is None:  # set in the first run, which is not captured
                self._logits = torch.zeros(logits.shape, dtype=torch.float32, device=device)
            self._logits.copy_(logits)

        pieces = capture(work)
        captured = forwards[-1]
        layers = [one.layer for one in captured.layers]
        if sorted(layers) != list(range(model.shape.layers)) or len(pieces) != len(layers) + 1:
            raise IntegrityError(f"{len(pieces)} pieces between the attention of layers {layers}")
        return CapturedPieces(rows, ids, embeds, positions, pieces, captured.layers, captured.places)

    @torch.inference_mode()
    def fill(self, value: float) -> None:
        """Fill the buffers between pieces, so that a comparison can see whether rows that fill a bucket up change
        others."""
        self._buffers.fill(value)

    @torch.inference_mode()
    def run(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor | None:
        """Run a step if it fits; arguments as for ``LoadedModel.forward``.

        Returns:
            ``[w, vocabulary]`` fp32, valid until the next step; None when the step has to be run in another way: it has
            too many rows, or features for layers behind the first (Qwen3-VL's images).
        """
        rows = len(inputs.embeds)
        if rows > self.most or len(wanted) > len(self._wanted) or inputs.deepstack is not None:
            return None
        bucket = min((one for one in self._buckets if one.rows >= rows), key=lambda one: one.rows)
        self._fill(bucket, inputs, positions, wanted)
        if self._model.triton is not None and step.kernel is None:
            step.kernel = self._model.triton.prepare(step, rows)
        places = [one.of(rows) for one in bucket.places]
        for piece, layer in zip(bucket.pieces, bucket.layers, strict=False):
            piece()
            layer.run(step, places)
        bucket.pieces[-1]()
        self.counters["piecewise_steps"] += 1
        assert self._logits is not None  # since it was captured
        return self._logits[: len(wanted)]

    def _fill(
        self, bucket: CapturedPieces, inputs: RowInputs, positions: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        """Copy a step's inputs into the buffers of a bucket. The rows beyond them have no embedding, and the
        positions of an earlier step."""
        rows = len(inputs.embeds)
        bucket.embeds[:rows].copy_(inputs.embeds)
        bucket.embeds[rows:].zero_()
        bucket.positions[:, :rows].copy_(positions)
        if self._looks_up_ids:
            bucket.ids[:rows].copy_(send(inputs.ids, self._model.device))
        self._wanted.zero_()  # an earlier step's may lie beyond the bucket
        self._wanted[: len(wanted)].copy_(wanted)
