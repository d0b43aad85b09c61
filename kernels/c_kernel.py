"""Builds a kernel's C file for this machine, keeps what was built, and loads it.

A file is compiled once for each set of options, in about a second, and kept in the user's cache folder under a name
that covers the source, the compiler and its options, and tells its length. Threads are torch's own: the object leaves
OpenMP's symbols open, and they resolve to the runtime that torch has loaded. Builds of torch come with GCC's, so clang
will do only where torch's is LLVM's or Intel's; each compiler is tried in turn.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mpic.kernels import instructions

_COMPILERS = ("gcc", "cc", "clang")
_OPTIONS = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC")
_LEVELS = {"AVX512": "-march=x86-64-v4", "AVX2": "-march=x86-64-v3"}

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class KernelUnavailable(Exception):
    """A kernel cannot run here; the message says why."""


def variant(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[str, list[str]]:
    """Return the name and the options of a kernel of attention for queries of one dtype over keys and values of
    another (``vectors.h``).

    Raises:
        KernelUnavailable: it reads other dtypes.
    """
    name, kept = (str(one).removeprefix("torch.") for one in (dtype, kv_dtype))
    if dtype not in (torch.float32, torch.bfloat16):
        raise KernelUnavailable(f"it reads float32 and bfloat16, not {name}")
    half = kv_dtype is torch.float16
    if not half and kv_dtype is not dtype:
        raise KernelUnavailable(f"it reads keys and values in {name} or float16, not {kept}")
    options = [f"-DDIM={head_dim}", f"-DBFLOAT16={int(dtype is torch.bfloat16)}", f"-DHALF_KV={int(half)}"]
    return f"{head_dim}-{name}" + ("-half" if half else ""), options


def unit_options(*, emulated: bool) -> list[str]:
    """Return the options of a kernel that multiplies on the processor's matrix unit (``tiles.h``), which this process
    may use from now on.

    Args:
        emulated: the unit's work is done by plain C, which is slow and runs on any processor (for tests).

    Raises:
        KernelUnavailable: there is none, or programs may not use it.
    """
    if emulated:
        return ["-DEMULATED=1", "-Wno-psabi", "-O1", "-ftree-vectorize"]
    if reason := why_no_unit():
        raise KernelUnavailable(reason)
    return ["-mamx-tile", "-mamx-bf16", "-mavx512bf16"]


def why_no_unit() -> str:
    """Return why the processor's matrix unit for bfloat16 cannot be used; empty if it can. The operating system is
    asked to let this process use it."""
    if not instructions.unit():
        return "the processor has no matrix unit that torch may use"
    if not instructions.pairs():
        return "the processor has a matrix unit, but does not round to bfloat16 by itself"
    if not torch.cpu._init_amx():
        return "the operating system does not let programs use the matrix unit"
    return ""


def build(source: Path, name: str, options: Sequence[str]) -> ctypes.CDLL:
    """Load what the compiler makes of a C file, which it does the first time only.

    Args:
        name: tells variants of the source apart, for readers of the cache folder.
        options: of the compiler, beside those that every kernel has.

    Raises:
        KernelUnavailable: with the reason.
    """
    compilers: dict[str, str] = {}
    for found in filter(None, map(shutil.which, _COMPILERS)):
        compilers.setdefault(os.path.realpath(found), found)  # one may be another name of the one before
    if not compilers:
        raise KernelUnavailable(f"no C compiler ({', '.join(_COMPILERS)})")
    reasons: list[str] = []
    folder = _folder()
    for compiler in compilers.values():
        try:
            library = _built(folder, compiler, source, name, options)
            try:
                return ctypes.CDLL(str(library))
            except OSError:  # what lies in the cache folder is damaged
                library.unlink(missing_ok=True)
                return ctypes.CDLL(str(_built(folder, compiler, source, name, options)))
        except subprocess.CalledProcessError as error:
            output = error.stderr.strip().splitlines() or ["nothing"]
            reasons.append(f"{compiler} could not build it: {output[0]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"what {compiler} builds could not be built or loaded: {error}")
    raise KernelUnavailable("; ".join(reasons))


def _built(folder: Path, compiler: str, source: Path, name: str, wanted: Sequence[str]) -> Path:
    options, machine = list(_OPTIONS), platform.machine()
    if machine in ("x86_64", "AMD64"):
        options += [_LEVELS[level]] if (level := instructions.level()) in _LEVELS else []
    options += wanted
    version = _run(compiler, "--version")
    parts = [*_texts(source), machine, version, *options]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    prefix = f"{source.stem}-{name}-{key}-"
    if (kept := _kept(folder, prefix)) is not None:
        return kept
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        object_, library = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        _run(compiler, *options, "-c", str(source), "-o", str(object_))
        _run(compiler, "-shared", str(object_), "-o", str(library), "-lm")
        with library.open("rb+") as file:
            os.fsync(file.fileno())  # the name must not survive a power failure without the bytes
            path = folder / f"{prefix}{os.fstat(file.fileno()).st_size}.so"
        os.replace(library, path)
    return path


def _folder() -> Path:
    """Return the folder of the built files, which it makes if there is none.

    Raises:
        KernelUnavailable: there can be none, or others can write there.
    """
    folder = _cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = _others_can_write(folder.stat())
    except OSError as error:
        raise KernelUnavailable(f"what is built has no place: {error}") from error
    if others:
        raise KernelUnavailable(
            f"{folder} belongs to another user, or others can write there (chmod go-w): what is kept there is run"
        )
    return folder


def _kept(folder: Path, prefix: str) -> Path | None:
    """Return the library that was built before, if nobody else can have put it there and it is as long as its name
    says: loading one that ends too early would end the process."""
    for path in folder.glob(f"{prefix}*.so"):
        found = path.lstat()
        whole = path.name == f"{prefix}{found.st_size}.so"
        if whole and stat.S_ISREG(found.st_mode) and not _others_can_write(found):
            return path
    return None


def _others_can_write(found: os.stat_result) -> bool:
    return found.st_uid not in (os.geteuid(), 0) or bool(found.st_mode & 0o022)


def _texts(source: Path) -> list[str]:
    """Return the text of a C file, and those of the files beside it that it includes."""
    text = source.read_text()
    beside = [source.with_name(name) for name in _INCLUDE.findall(text)]
    return [text, *(part for file in beside for part in _texts(file))]


def _cache_folder() -> Path:
    """Return the folder in which built kernels are kept for this user."""
    try:
        import platformdirs
    except ImportError as error:
        raise KernelUnavailable(
            f"the package platformdirs is missing, which says where to keep it: {error}"
        ) from error
    return Path(platformdirs.user_cache_dir("mpic", appauthor=False)) / "kernels"


def _run(*command: str) -> str:
    # a compiler that hangs must not hold a start for ever; one on a busy machine may take minutes
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
