"""Single rows on the CPU at the speed of memory: builds ``stream.c`` for this machine, loads it, fills its tables.

The floor of decoding on a CPU is the time to read the weights and every span once, ``bytes / bandwidth``. Two cores of
an AMD EPYC (Zen 4) stream 50 to 56 GB/s. A model of 110 M fp32 parameters with 4,160 tokens (307 MB of KV) a request
cannot take a step in less than 14 ms, and with eight such requests in less than 53 ms. Torch's flash kernel reads KV
at 27 GB/s when there is one query a key head and at 9 when there are four, because it multiplies for blocks of
queries; this one was seen at 40 to 48 and at 33. What is left above the floor is mostly torch's matrix products, which
read weights at 12 GB/s for one row.

The C file is compiled once for each head dimension and dtype, in less than a second, and kept in the user's cache
folder under a name that covers the source, the compiler and its options. Where that cannot be done (no C compiler, no
OpenMP, another dtype) ``load`` says why, and single rows go through torch (``singles.py``), slower.
Threads are torch's own: the object leaves OpenMP's symbols open, and they resolve to the runtime torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mpic.kernels.spans import Shift, rotate

SOURCE = Path(__file__).with_name("stream.c")
PIECE = 512
"""Most tokens of a task. Long enough for the memory to stream, short enough that two cores end together."""

_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC", f"-DPIECE={PIECE}")
_LEVELS = {"AVX512": "-march=x86-64-v4", "AVX2": "-march=x86-64-v3"}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Unavailable(Exception):
    """The kernel cannot run here; the message says why."""


class Reading(NamedTuple):
    """A span and the single rows that read it.

    Args:
        kv: ``[layers, 2, kv_heads, n, head_dim]``, any strides with head_dim dense, n >= 1.
        readers: (number of the row among the single rows, base at which the row sees the span).
    """

    kv: torch.Tensor
    readers: Sequence[tuple[int, int]]


class _Step(ctypes.Structure):
    """``Step`` of stream.c."""

    _fields_ = [
        *(
            (n, ctypes.c_int64)
            for n in ["heads", "kv_heads", "half", "interleaved", "threads", "rows", "pieces"]
        ),
        *(
            (n, ctypes.c_void_p)
            for n in ["piece", "source", "angle", "cosine", "sine", "begin", "order", "work"]
        ),
    ]


class StreamRows:
    """See ``mpic.kernels.spans.SingleRows``; made by ``Stream.rows``."""

    def __init__(
        self,
        stream: Stream,
        rows: Sequence[int],
        spans: Sequence[Reading],
        heads: int,
        shifts: Callable[[Sequence[int]], Shift | None],
    ) -> None:
        self.rows = torch.tensor(rows)
        self._stream = stream
        pieces: list[tuple[int, ...]] = []
        numbers: list[int] = []
        angles: list[int] = []
        bases: dict[int, int] = {}
        for kv, readers in spans:
            _, two, kv_heads, n, dim = kv.shape
            layer, half, head, token, one = kv.stride()
            if (
                (dim, kv.dtype, one, two) != (stream.head_dim, stream.dtype, 1, 2)
                or n < 1
                or heads % kv_heads
            ):
                raise ValueError(
                    f"{stream} cannot read a span {tuple(kv.shape)} {kv.dtype} for {heads} heads"
                )
            size, start = kv.element_size(), kv.data_ptr()
            turned = [bases.setdefault(base, len(bases)) if base else -1 for _, base in readers]
            for lo in range(0, n, PIECE):
                at = start + lo * token * size
                count = min(PIECE, n - lo)
                pieces.append((at, at + half * size, layer, head, token, count, len(numbers), len(readers)))
                numbers += [number for number, _ in readers]
                angles += turned
        source, order = np.array(rows)[numbers], np.argsort(numbers, kind="stable")
        begin = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(numbers, minlength=len(rows)), out=begin[1:])
        if not np.diff(begin).all():
            raise ValueError("a row sees no span")
        shift = shifts(list(bases)) if bases else None
        cosine, sine, interleaved = shift or (torch.zeros(0, 0), torch.zeros(0, 0), False)
        work = torch.empty(len(numbers), heads, stream.head_dim + 2)
        tables = [np.array(t, dtype=np.int64) for t in (pieces, source, angles, begin, order)]
        self._kept = (spans, tables, cosine, sine, work)  # C holds their addresses
        at = [t.ctypes.data for t in tables]
        self._step = _Step(
            *(heads, spans[0].kv.shape[2], cosine.shape[1], interleaved, torch.get_num_threads()),
            *(len(rows), len(pieces), *at[:3], cosine.data_ptr(), sine.data_ptr(), *at[3:], work.data_ptr()),
        )

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """See ``SingleRows.attend``."""
        if q.dtype != self._stream.dtype or q.shape[0] != self._step.heads or q.stride(2) != 1:
            raise ValueError(f"{self._stream} cannot read queries {tuple(q.shape)} {q.dtype}")
        out = torch.empty(len(self.rows), q.shape[0], q.shape[2])
        self._stream.function(
            self._step, layer, q.data_ptr(), q.stride(0), q.stride(1), scale, out.data_ptr()
        )
        return out


class Stream:
    """The kernel for one head dimension and dtype; ``load`` makes it."""

    name = "cpu-stream"

    def __init__(self, head_dim: int, dtype: torch.dtype, path: Path) -> None:
        self.head_dim, self.dtype = head_dim, dtype
        self.function = ctypes.CDLL(str(path)).attend
        i64, address = ctypes.c_int64, ctypes.c_void_p
        step = ctypes.POINTER(_Step)
        self.function.argtypes = [step, i64, address, i64, i64, ctypes.c_float, address]
        self.function.restype = None

    def __repr__(self) -> str:
        return f"{self.name} for head_dim {self.head_dim} {self.dtype}"

    def rows(
        self,
        rows: Sequence[int],
        spans: Sequence[Reading],
        heads: int,
        shifts: Callable[[Sequence[int]], Shift | None],
    ) -> StreamRows:
        """Tables of one step.

        Args:
            rows: which of the step's rows stand alone.
            spans: everything they see; each row sees at least one.
            heads: of the queries.
            shifts: rotations of several bases, ``[len(bases), rotary_dim / 2]``.

        Raises:
            ValueError: a span that the kernel cannot read, or a row without any.
        """
        return StreamRows(self, rows, spans, heads, shifts)


@functools.cache
def load(head_dim: int, dtype: torch.dtype) -> Stream:
    """Build the kernel, or take it from the cache folder, and prove it on a small example.

    Raises:
        Unavailable: with the reason.
    """
    if dtype not in _DTYPES:
        raise Unavailable(f"it reads float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(_COMPILERS)})")
    try:
        stream = Stream(head_dim, dtype, _built(compiler, head_dim, dtype))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["nothing"]
        raise Unavailable(f"{compiler} could not build it: {said[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"it could not be built or loaded: {error}") from error
    _prove(stream)
    return stream


def _built(compiler: str, head_dim: int, dtype: torch.dtype) -> Path:
    level = torch.backends.cpu.get_cpu_capability().split("_")[0]
    options = [*_OPTIONS, f"-DDIM={head_dim}", f"-DBFLOAT16={_DTYPES[dtype]}"]
    if platform.machine() in ("x86_64", "AMD64"):
        options += [_LEVELS[level]] if level in _LEVELS else []
    version = _run(compiler, "--version")
    key = hashlib.sha256("\0".join([SOURCE.read_text(), version, *options]).encode()).hexdigest()[:16]
    folder = _cache_folder()
    path = folder / f"stream-{head_dim}-{str(dtype).removeprefix('torch.')}-{key}.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        object_, library = Path(scratch) / "stream.o", Path(scratch) / "stream.so"
        _run(compiler, *options, "-c", str(SOURCE), "-o", str(object_))
        _run(compiler, "-shared", str(object_), "-o", str(library))
        os.replace(library, path)
    return path


def _cache_folder() -> Path:
    """Where built kernels are kept for this user."""
    try:
        import platformdirs
    except ImportError as error:
        raise Unavailable(
            f"the package platformdirs is missing, which says where to keep it: {error}"
        ) from error
    return Path(platformdirs.user_cache_dir("mpic", appauthor=False)) / "kernels"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _prove(stream: Stream) -> None:
    """A compiler that makes something else of it must be found here, not in an answer. Seven heads a key head take
    every path: tiles of four, two and one."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(1, 2, 2, PIECE + 3, stream.head_dim, generator=generator).to(stream.dtype)
    q = torch.randn(14, 1, stream.head_dim, generator=generator).to(stream.dtype)
    angle = torch.linspace(0, 3, stream.head_dim // 2)
    shift = Shift(angle.cos()[None], angle.sin()[None])
    scale = stream.head_dim**-0.5
    got = stream.rows([0], [Reading(kv, [(0, 1)])], 14, lambda bases: shift).attend(q, 0, scale)[0]
    keys, values = kv[0].float().repeat_interleave(7, 1)
    weights = torch.softmax(keys @ rotate(q.float(), shift).transpose(1, 2) * scale, 1)
    difference = float((got - (weights * values).sum(1)).abs().max())
    if not difference < 1e-4:
        raise Unavailable(f"what the compiler made of it is wrong by {difference:.1e}")
