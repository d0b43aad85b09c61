"""No step waits for the device. The device here is torch's "meta": its tensors have shapes and strides but no numbers,
so that reading a number fails, and copies between host and device are refused unless they come from staging memory.
Attention goes through torch's CUDA operators, whose shapes torch knows."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import numpy as np
import pytest
import tape
import torch
from engine_kit import family, ids, prompt_of, request_of, text_chunk
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpic.engine.base import Sampling
from mpic.engine.native import sampling
from mpic.engine.native.batch import BatchSlice, Rows
from mpic.engine.native.cuda_executor import CudaExecutor
from mpic.engine.native.piecewise import PiecewiseSteps
from mpic.engine.native.static_decode import StaticDecode
from mpic.kernels import cuda, upload
from mpic.kernels.span import Span
from mpic.kv.pool import Pool

DEVICE = torch.device("meta")


class Waiting(Exception):
    """An operation that makes the host wait for the device."""


class Watch(TorchDispatchMode):
    """Refuses operations between host and device. Numbers that an operation takes from the host do not count as
    copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if len({t.device for t in tensors if t.dim() or t.device == DEVICE}) > 1:
            raise Waiting(f"{func} copies between host and device")
        return out


class Literals(TorchFunctionMode):
    """Refuses tensors that are made on the device from the host's numbers, because these are copies, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and (kwargs or {}).get("device") == DEVICE:
            raise Waiting(f"{func} copies numbers to the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched():
    with Watch(), Literals():
        yield


class Device:
    """A device without numbers. ``copies`` counts the copies from staging memory."""

    def __init__(self, monkeypatch) -> None:
        self.copies = 0
        monkeypatch.setattr(
            upload, "staging", lambda size, device: torch.from_numpy(np.empty(size, np.uint8))
        )
        monkeypatch.setattr(upload, "copied", self._copied)

    def _copied(self, buffer, device):
        self.copies += 1
        return self.empty(buffer)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=DEVICE)

    def moved(self, loaded):
        """Return a loaded model as if it had been loaded on the device."""
        # C libraries that need the CPU
        loaded = copy.deepcopy(
            loaded, {id(kernel): None for kernel in (*loaded.streams, *loaded.block_spans)}
        )
        for module in loaded.model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        moved = self.empty(tensor)
                        is_parameter = tensors is module._parameters
                        tensors[name] = torch.nn.Parameter(moved, False) if is_parameter else moved
        loaded.device = DEVICE
        for rotary in {kind.rotary for kind in loaded.kinds}:
            rotary._device, rotary._rows = DEVICE, {}
            rotary._table = self.empty(torch.empty(2, 0, rotary.half))
        loaded.partial, loaded.streams, loaded.block_spans = cuda.efficient_partial, [], []
        return loaded


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def make(device, name="llama"):
    loaded = device.moved(family(name).loaded)
    pool = Pool(loaded.shape, 64, 8, loaded.dtype, DEVICE)
    return CudaExecutor(loaded, pool), pool


def row(pool, tokens, chunks=(), base=50):
    """Return a request with this number of own tokens over chunks."""
    axes = 1
    rows = Rows(ids(1, tokens), torch.arange(tokens)[None].repeat(axes, 1), extent=pool.alloc(tokens + 32))
    rows.spans = [Span(chunk, 2, chunk.tokens, base + i, 1) for i, chunk in enumerate(chunks)]
    return rows


def grown(rows, by=1):
    rows.computed = len(rows)
    rows.ids = rows.ids + [7] * by
    rows.positions = torch.arange(len(rows.ids))[None]
    return BatchSlice(rows, rows.computed, len(rows))


def run(device, runner, slices):
    with watched():
        return runner.run(slices)


def test_a_step_of_links_and_decoding_rows_waits_for_nothing(device):
    runner, pool = make(device)
    chunks = [pool.alloc(n) for n in (24, 24, 17)]
    prefill, decoding = row(pool, 9, chunks), [row(pool, 5, chunks), row(pool, 6, chunks[:1])]
    slices = [*(grown(r) for r in decoding), BatchSlice(prefill, 0, 9)]
    logits = run(device, runner, slices)
    assert logits.shape == (3, 300) and logits.device == DEVICE
    assert device.copies > 0


def test_a_step_in_pieces_waits_for_nothing(device):
    runner, pool = make(device)
    chunks = [pool.alloc(n) for n in (24, 17)]
    runner.piecewise = PiecewiseSteps(runner.model, 64, 3, in_pieces)
    logits = run(device, runner, [grown(row(pool, 5, chunks)), BatchSlice(row(pool, 9, chunks), 0, 9)])
    assert logits.shape == (2, 300) and logits.device == DEVICE
    assert runner.piecewise.counters["piecewise_steps"] == 1


def in_pieces(work):
    """Run the work as it would be captured; its pieces are not played again, since there are no numbers."""
    ends = []
    with watched():
        work(lambda: ends.append(1))
    return [lambda: None] * (len(ends) + 1)


def test_a_step_of_compiled_rows_alone_waits_for_nothing(device):
    runner, pool = make(device)
    logits = run(device, runner, [BatchSlice(row(pool, 20), 3, 17)])
    assert logits.shape == (0, 300)


def test_a_step_that_continues_the_last_one_copies_its_tokens_and_nothing_else(device):
    runner, pool = make(device)
    chunks = [pool.alloc(n) for n in (24, 24, 17)]
    decoding = [row(pool, 5, chunks), row(pool, 5, chunks), row(pool, 7, chunks[1:])]
    run(device, runner, [grown(r) for r in decoding])
    device.copies = 0
    for _ in range(3):
        run(device, runner, [grown(r) for r in decoding])
    assert device.copies == 3 * 2  # ids; positions and the rows whose logits are wanted
    assert (runner.tables.made, runner.tables.advanced) == (1, 3)


def test_a_step_whose_tokens_only_the_device_knows_waits_for_nothing(device):
    """The tokens of the step before it are drawn, sent for and used, and nobody reads them."""
    runner, pool = make(device)
    decoding = [row(pool, 5), row(pool, 7)]
    logits = run(device, runner, [grown(r) for r in decoding])
    device.copies = 0
    with watched():
        drawing = sampling.Drawing(logits, [sampling.Sampler(Sampling())] * 2)
        following = runner.run([grown(r) for r in decoding], ids=drawing.tokens.clamp_min(0))
    assert following.shape == logits.shape and following.device == DEVICE
    assert device.copies == 1  # positions, and the rows whose logits are wanted


class Nothing:
    """A kernel whose launches do nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def test_a_static_step_copies_tokens_and_positions_and_waits_for_nothing(device, monkeypatch):
    """Its tables, when they are made anew, come in one copy a kind of layer."""
    for module, name in tape.KERNELS:
        monkeypatch.setattr(module, name, Nothing())
    monkeypatch.setattr("mpic.kernels.triton.launch.available", lambda device: True)
    runner, pool = make(device)
    runner.static = StaticDecode(runner.model, pool, 4)
    chunks = [pool.alloc(n) for n in (24, 24, 17)]
    decoding = [row(pool, 5, chunks), row(pool, 6, chunks[1:])]
    copies = []
    for rows in (decoding, decoding, decoding, decoding[:1]):
        device.copies = 0
        logits = run(device, runner, [grown(r) for r in rows])
        assert logits.shape == (len(rows), 300) and logits.device == DEVICE
        copies.append(device.copies)
    assert copies == [2 + 3, 1, 1, 2]  # at first also the rotations by three bases
    assert runner.static.counters["static_steps"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
    ],
)
def test_tokens_are_drawn_without_waiting(device, options):
    logits = device.empty(torch.empty(6, 5000))
    other = Sampling(temperature=0.0)
    for mixed in ([Sampling(**options)] * 6, [Sampling(**options), other] * 3):
        with watched():
            tokens = sampling._draw(logits, mixed, [0.5] * 6)
        assert tokens.shape == (6,) and tokens.dtype == torch.int64 and tokens.device == DEVICE


def test_the_host_waits_once_for_a_step_that_takes_no_token_so_that_none_queue_up(make_engine, monkeypatch):
    engine = make_engine(budget=16)
    waits, steps = [], []
    run = engine.executor.run
    monkeypatch.setattr(engine.executor, "wait", lambda: waits.append(1))
    monkeypatch.setattr(
        engine.executor, "run", lambda *args, **options: steps.append(1) or run(*args, **options)
    )
    engine.compile(text_chunk(ids(5, 40))).result(60)
    engine.check()  # is answered between steps
    assert len(waits) == len(steps) == 3
    engine.submit(request_of(prompt_of(ids(6, 9)), "full", 5)).result()
    assert len(waits) == 3 and len(steps) == 8


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: bool((x > 0).all()),
    ],
)
def test_what_waits_is_seen(device, work):
    x = device.empty(torch.empty(4))
    with pytest.raises(Exception), watched():  # noqa: B017 - torch's own errors, and Waiting
        work(x)
