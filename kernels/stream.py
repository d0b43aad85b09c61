"""Single rows on the CPU at the speed of memory: builds ``stream.c`` for this machine, loads it, fills its tables.

The floor of decoding on a CPU is the time to read the weights and every span once, ``bytes / bandwidth``. Two cores of
an AMD EPYC (Zen 4) stream 50 to 56 GB/s. A model of 110 M fp32 parameters with 4,160 tokens (307 MB of KV) a request
cannot take a step in less than 14 ms, and with eight such requests in less than 53 ms. Torch's flash kernel reads KV at
27 GB/s with one query per key head and at 9 GB/s with four, because it multiplies for blocks of queries; this kernel
reached 40 to 48 and 33 GB/s. The time above the floor is mostly that of torch's matrix products, which read weights at
12 GB/s for one row. With AVX2 vectors are half as wide, so that sums stay in the processor's 16 registers: a core of
Zen 3 streams 12 GB/s in fp32 for one row, and eight rows that share chunks take half as long as torch's.

The C file is compiled once for each head dimension and dtype (``c_kernel.py``). Where that cannot be done (no C
compiler, no OpenMP, another dtype) ``load`` says why, and single rows go through torch (``singles.py``), slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch

from mpic.kernels import c_kernel
from mpic.kernels.attention import PLAIN, Extras, KVView, QueryRotation, Rotations, SpanCall, rotate
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.gathered import LEAST
from mpic.kernels.singles import SharedSpan, share
from mpic.kernels.span import Span

SOURCE = Path(__file__).with_name("stream.c")
SECTION = 512
"""Most tokens of a task. Long enough for the memory to stream, short enough that two cores end together."""

_COUNT = 5
"""Column of a section's number of tokens."""


class _StepStruct(ctypes.Structure):
    """``Step`` of stream.c."""

    _fields_ = [
        *(
            (n, ctypes.c_int64)
            for n in ["heads", "kv_heads", "half", "interleaved", "turned", "threads", "rows", "sections"]
        ),
        *(
            (n, ctypes.c_void_p)
            for n in ["section", "source", "angle", "cosine", "sine", "begin", "order", "work"]
        ),
    ]


class StreamRows:
    """See ``mpic.kernels.attention.SingleRows``; made by ``StreamKernel.rows``."""

    def __init__(
        self,
        kernel: StreamKernel,
        calls: Sequence[SpanCall],
        heads: int,
        rotations: Rotations,
        kv_heads: int | None = None,
    ) -> None:
        rows, shared = share(calls)
        self.rows, self._count = torch.tensor(rows), len(rows)
        self._kernel = kernel
        sections: list[tuple[int, ...]] = []
        numbers: list[int] = []
        angles: list[int] = []
        bases: dict[int, int] = {}
        growing: list[int] = []  # numbers of the sections at the end of rows' own tokens
        for span in shared:
            kernel.check(span, heads, kv_heads)
        together = list(_listed(shared))
        for span, slots in together:
            rotated = [bases.setdefault(base, len(bases)) if base else -1 for _, base in span.readers]
            for place in _sections(span, slots):
                sections.append((*place[:-1], len(numbers), len(span.readers), place[-1]))
                numbers += [number for number, _ in span.readers]
                angles += rotated
            if span.grows:
                growing.append(len(sections) - 1)
        source, order = np.array(rows)[numbers], np.argsort(numbers, kind="stable")
        begin = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(numbers, minlength=len(rows)), out=begin[1:])
        turn = rotations(list(bases)) if bases else None
        cosine, sine, interleaved, turned = turn or QueryRotation(torch.zeros(0, 0), torch.zeros(0, 0))
        work = torch.empty(len(numbers), heads, kernel.head_dim + 2)
        tables = [np.array(t, dtype=np.int64) for t in (sections, source, angles, begin, order)]
        self._kept = (together, tables, cosine, sine, work)  # kept alive, because C holds their addresses
        self._ends = tables[0].reshape(len(sections), -1)[:, _COUNT]
        self._growing = np.array(growing, dtype=np.int64)
        self._left = SECTION - int(self._ends[self._growing].max(initial=0))  # steps until a section is full
        addresses = [t.ctypes.data for t in tables]
        self._step = _StepStruct(
            *(heads, kv_heads or shared[0].view.data.shape[2], cosine.shape[1], interleaved, turned),
            *(torch.get_num_threads(), len(rows), len(sections)),
            *(*addresses[:3], cosine.data_ptr(), sine.data_ptr(), *addresses[3:]),
            work.data_ptr(),
        )

    @property
    def address(self) -> int:
        """Address of the tables (``Step`` of stream.c), valid as long as this object."""
        return ctypes.addressof(self._step)

    def advance(self) -> StreamRows | None:
        """See ``SingleRows.advance``; None when a row's last section is full."""
        if not self._left:
            return None
        self._left -= 1
        self._ends[self._growing] += 1
        return self

    def attend(self, q: torch.Tensor, layer: int, scale: float, extras: Extras = PLAIN) -> torch.Tensor:
        """See ``SingleRows.attend``."""
        if q.dtype != self._kernel.dtype or q.shape[0] != self._step.heads or q.stride(2) != 1:
            raise ValueError(f"{self._kernel} cannot read queries {tuple(q.shape)} {q.dtype}")
        out = torch.empty(self._count, q.shape[0], q.shape[2])
        sinks = None if extras.sinks is None else extras.sinks.float().contiguous()
        self._kernel.function(
            *(self._step, layer, q.data_ptr(), q.stride(0), q.stride(1), scale, extras.softcap or 0.0),
            *(None if sinks is None else sinks.data_ptr(), out.data_ptr()),
        )
        return out


def _listed(shared: Sequence[SharedSpan]) -> Iterator[tuple[SharedSpan, np.ndarray | None]]:
    """Yield the spans. Many of one chunk, which the same rows read, are yielded once, as the first of them and the
    slots of all, ``[slots]`` int32: a task for every few tokens took longer than reading them (random-15 of 8 chunks of
    576 tokens: 30 ms a token in place of 18, one core, 6 layers with 8 heads of 64)."""
    key = lambda span: (id(span.view), span.readers, span.grows)
    for (_, _, grows), of_chunk in groupby(shared, key):
        spans = list(of_chunk)
        if len(spans) < LEAST or grows:
            yield from ((span, None) for span in spans)
        else:
            yield spans[0], np.concatenate([np.arange(span.lo, span.hi, dtype=np.int32) for span in spans])


def _sections(span: SharedSpan, slots: np.ndarray | None) -> Iterator[tuple[int, ...]]:
    """Yield the first and the last columns of a span's sections (``Section`` of stream.c): addresses, strides and the
    number of tokens; the address of the slots."""
    kv = span.view.data
    to_layer, to_part, to_head, to_slot, _ = kv.stride()
    size = kv.element_size()
    to_value = to_part * size if kv.shape[1] == 2 else 0  # else the values are the keys
    lo, hi = (span.lo, span.hi) if slots is None else (0, len(slots))
    for at in range(lo, hi, SECTION):
        keys = kv.data_ptr() + (at * to_slot * size if slots is None else 0)
        address = 0 if slots is None else slots.ctypes.data + at * slots.itemsize
        yield keys, keys + to_value, to_layer, to_head, to_slot, min(SECTION, hi - at), address


class StreamKernel:
    """The kernel for one head dimension, dtype of queries and dtype of keys and values; ``load`` makes it."""

    name = "cpu-stream"

    def __init__(
        self, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, library: ctypes.CDLL
    ) -> None:
        self.head_dim, self.dtype, self.kv_dtype = head_dim, dtype, kv_dtype
        self.function = library.attend
        i64, address = ctypes.c_int64, ctypes.c_void_p
        step = ctypes.POINTER(_StepStruct)
        f32 = ctypes.c_float
        self.function.argtypes = [step, i64, address, i64, i64, f32, f32, address, address]
        self.function.restype = None

    def __repr__(self) -> str:
        return f"{self.name} for head_dim {self.head_dim} {self.dtype}"

    def rows(
        self, calls: Sequence[SpanCall], heads: int, rotations: Rotations, kv_heads: int | None = None
    ) -> StreamRows:
        """Build the tables of one step.

        Args:
            calls: the calls of the rows that stand alone, one or more per row.
            heads: number of query heads.
            kv_heads: number of the layers' KV heads, if views have more or larger ones.

        Raises:
            ValueError: the kernel cannot read a span.
        """
        return StreamRows(self, calls, heads, rotations, kv_heads)

    def check(self, span: SharedSpan, heads: int, part: int | None = None) -> None:
        """Raise ValueError if the kernel cannot read the span (``part`` heads of it, if given) for this number of
        heads."""
        kv = span.view.data
        _, parts, kv_heads, slots, dim = kv.shape
        if part is not None and part <= kv_heads and self.head_dim <= dim:
            kv_heads, dim = part, self.head_dim
        readable = (dim, kv.dtype, kv.stride(4)) == (self.head_dim, self.kv_dtype, 1)
        if not readable or parts not in (1, 2) or not 0 <= span.lo < span.hi <= slots or heads % kv_heads:
            raise ValueError(
                f"{self} cannot read a span {tuple(kv.shape)} {kv.dtype} of slots {span.lo} to {span.hi} "
                f"for {heads} heads"
            )


@functools.cache
def load(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> StreamKernel:
    """Build the kernel, or take it from the cache folder, and prove it on a small example.

    Args:
        kv_dtype: of keys and values; None: that of the queries.

    Raises:
        KernelUnavailable: the kernel cannot be built or is wrong; the message says why.
    """
    kv_dtype = kv_dtype or dtype
    name, options = c_kernel.variant(head_dim, dtype, kv_dtype)
    built = c_kernel.build(SOURCE, name, [f"-DSECTION={SECTION}", *options])
    kernel = StreamKernel(head_dim, dtype, kv_dtype, built)
    _prove(kernel)
    return kernel


def _prove(kernel: StreamKernel) -> None:
    """Compare the kernel with torch on a small example, so that a miscompiled kernel is found here and not in an
    answer. Seven heads per key head take every path: tiles of four, two and one.

    Raises:
        KernelUnavailable: the results differ.
    """
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(1, 2, 2, SECTION + 3, kernel.head_dim, generator=generator).to(kernel.kv_dtype)
    q = torch.randn(14, 1, kernel.head_dim, generator=generator).to(kernel.dtype)
    angle = torch.linspace(0, 3, kernel.head_dim // 2)
    turn = QueryRotation(angle.cos()[None], angle.sin()[None])
    scale = kernel.head_dim**-0.5
    view = KVView(kv)
    whole = [SpanCall(slice(0, 1), Span(view, 0, SECTION + 3, base=1))]
    # the same in pieces, which are listed
    ends = [*range(0, SECTION, 50), SECTION + 3]
    pieces = [SpanCall(slice(0, 1), Span(view, lo, hi, base=1)) for lo, hi in pairwise(ends)]
    keys, values = kv[0].float().repeat_interleave(7, 1)
    weights = torch.softmax(keys @ rotate(q.float(), turn).transpose(1, 2) * scale, 1)
    expected = (weights * values).sum(1)
    got = [kernel.rows(calls, 14, lambda bases: turn).attend(q, 0, scale)[0] for calls in (whole, pieces)]
    difference = max(float((one - expected).abs().max()) for one in got)
    if not difference < 1e-4:
        raise KernelUnavailable(f"the compiled kernel gives wrong results (difference {difference:.1e})")
