"""Imitates a CUDA graph on the CPU: recorded work runs again over the same memory with the same numbers from the host,
and none of the host's code runs. A step that is right when it is replayed depends only on the content of its
buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mpic.kernels.triton import attention, merge, scatter

KERNELS = ((attention, "attend"), (merge, "merge"), (scatter, "scatter"))


class Tape(TorchDispatchMode):
    """Records a piece of work: torch's operations that write memory, and launches of our kernels.

    Attributes:
        calls: functions that repeat each of them.
        reads: data pointer, shape, strides and dtype of everything that was there before, in order of use.
        storages: where the memory of all that begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.reads: list[tuple[object, ...]] = []
        self.storages: set[int] = set()
        self._made: set[int] = set()  # storages of this work
        self._kept: list[object] = []  # so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.note(args, kwargs)
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        fresh = [t for t in made if t.untyped_storage()._cdata not in given]
        self._kept.append((args, kwargs, out))
        self._made |= {t.untyped_storage()._cdata for t in fresh}
        if fresh and "empty" in func.name():  # memory without numbers
            assert len(fresh) == len(made)
        elif fresh:
            assert len(fresh) == len(made)

            def again() -> None:
                for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    old.copy_(new)

            self.calls.append(again)
        elif func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
        return out

    def note(self, *given: object) -> None:
        for value in tree_leaves(given):
            if not isinstance(value, torch.Tensor):
                self.reads.append((value,))
            elif value.untyped_storage()._cdata not in self._made:
                self.reads.append((value.data_ptr(), value.shape, value.stride(), value.dtype))
                self.storages.add(value.untyped_storage().data_ptr())

    def launcher(self, kernel):
        tape = self

        class Launcher:
            def __getitem__(self, grid):
                def launch(*args, **kwargs):
                    tape.note(grid, args, kwargs)
                    tape._kept.append((args, kwargs))
                    tape.calls.append(lambda: kernel[grid](*args, **kwargs))
                    # the interpreter's own use of torch is not part of the work
                    with _disable_current_modes():
                        return kernel[grid](*args, **kwargs)

                return launch

        return Launcher()

    def record(self, work):
        """Record the work and return its result."""
        kept = [(module, name, getattr(module, name)) for module, name in KERNELS]
        for module, name, kernel in kept:
            setattr(module, name, self.launcher(kernel))
        try:
            with self:
                return work()
        finally:
            for module, name, kernel in kept:
                setattr(module, name, kernel)


def _tensors(out):
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


def captured(work):
    """Replace ``mpic.engine.native.graph_capture.GraphCapture``."""
    work()
    tape = Tape()
    out = tape.record(work)

    def replay():
        _play(tape.calls)
        return out

    return replay


def captured_pieces(work):
    """Replace ``mpic.engine.native.graph_capture.GraphCapture.pieces``."""
    work(lambda: None)
    tape, pieces = Tape(), []

    def cut():
        pieces.append(tape.calls)
        tape.calls = []

    tape.record(lambda: work(cut))
    cut()
    return [functools.partial(_play, calls) for calls in pieces]


def _play(calls):
    for call in calls:
        call()
