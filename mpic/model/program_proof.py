"""The proof that a program computes what the model's own modules do, before it serves anything.

Steps are run both ways. In two of them a few rows stand alone, with different lengths, over keys and values of their
own and over those of a chunk that each sees at another base; the second has more rows, whose products may be another
kernel's. In the last step two blocks of rows and one row that stands alone are run. Where decoding begins with tokens
(``mpic.kernels.decoder.WholeDecoder``), the first two are run that way, too. Logits have to agree, and so do the keys
and values that every layer writes. In the first two the operations of the model's way are listed: one that a program
does not have (a limit on values, a choice by their size) may make no difference for these rows and make one for others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpic.errors import ModelRefused
from mpic.kernels.attention import KVView, SpanCall, Write
from mpic.kernels.decoder import WholeDecoder
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites
from mpic.kv.pool import Pool
from mpic.model.hooks import Step
from mpic.model.loaded import LoadedModel
from mpic.model.program import NO_HALVES, NOT_STREAM, NOTE, TOKENS_NOTE, Program, Unfused
from mpic.model.rotary import Rotary
from mpic.model.structure import RowInputs, as_plain, plain_ids

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest ``|difference| / max |value|`` of logits, and of keys and values, by the dtype of these. Both ways round at
the same places."""
_FAR = 100_000
"""A position at which pairs of low frequencies have turned, too."""
_LENGTHS = (3, 17, 41, 5, 29, 11)
"""Tokens before each row."""
_ALONE = (3, len(_LENGTHS))
"""Rows of the steps in which all stand alone. The second is more than ``mpic.kernels.linear_tiles.LEAST_ROWS``
where that kernel serves."""
_CHUNK, _BASES = 30, (0, 60, 200, 9, 130, 77)
"""Tokens of the chunk, and the bases at which the rows see it."""
_BLOCKS = ((0, 20, 13), (20, 37, 0))
"""The first row of each block, the row behind its last, and its own tokens before."""
_COMPUTING = {"add", "cat", "cos", "mul", "neg", "rms_norm", "_fused_rms_norm", "silu", "sin"}
_MOVING = {
    "_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "copy_", "detach", "empty", "empty_like", "expand",
    "index", "index_copy_", "nan_to_num", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "t", "to", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
_OPERATIONS = _COMPUTING | _MOVING
"""The operations that a model's way may have beside its linear layers and attention, which torch does not see."""

Run = Callable[[RowInputs, torch.Tensor, Step, torch.Tensor], "torch.Tensor | None"]
"""A way of running a step; see ``LoadedModel.forward``."""


def use_program(loaded: LoadedModel) -> None:
    """Make a model use its program if the program is proved to compute the same; otherwise note the reason."""
    loaded.program, details = None, loaded.info.details
    details[NOTE], details[TOKENS_NOTE] = "", ""
    try:
        program = _read(loaded)
        error = difference(loaded, program)
    except (Unfused, ModelRefused) as reason:
        details[NOTE] = reason.message if isinstance(reason, ModelRefused) else str(reason)
        return
    log.info("%s: its program is proved, relative error %.1e", loaded.info.name, error)
    try:
        program.whole_decoder()
    except Unfused as reason:
        details[TOKENS_NOTE] = str(reason)
    loaded.program = program


def _read(loaded: LoadedModel) -> Program:
    """Return a model's program. Raise Unfused, or ModelRefused, if it has none."""
    if loaded.device.type != "cpu":
        raise Unfused(f"it runs on the CPU, not on {loaded.device.type}")
    if not loaded.is_plain or loaded.latents or loaded.shape.parts != 2:
        raise Unfused("its layers do not all attend in the plain way")
    if not loaded.streams:
        raise Unfused(loaded.attention_note or NOT_STREAM)
    rotary = loaded.kinds[0].rotary
    if not isinstance(rotary, Rotary):
        raise Unfused(NO_HALVES)
    axes, scale = _axes_and_scale(loaded, rotary.half)
    own = (loaded.shape, loaded.kv_dtype)
    return Program(loaded.model, loaded.text_model, rotary, axes, scale, *own)


@torch.inference_mode()
def difference(loaded: LoadedModel, program: Program) -> float:
    """Return the largest relative difference between the ways of steps: of rows that stand alone, and of blocks.

    Raises:
        ModelRefused: it is too large, or the model's way has operations that a program has not.
    """
    ways: list[Run] = [_watched(loaded), program.run]
    counts = set(_ALONE)
    try:
        decoder = program.whole_decoder()
        ways.append(_from_tokens(program, decoder))
        counts = {min(rows, decoder.most_rows) for rows in counts}
    except Unfused:  # then no step begins with tokens
        pass
    steps: list[tuple[list[Run], int, Callable[[], ProofStep]]] = [
        (ways, rows, functools.partial(_single_step, loaded, rows)) for rows in sorted(counts)
    ]
    in_parts: list[Run] = [loaded.forward, program.run, _in_parts(program.run)]
    steps.append((in_parts, _BLOCKS[-1][1] + 1, functools.partial(_block_step, loaded)))
    try:
        error = max(_difference(loaded, *step) for step in steps)
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"a step of the program could not run: {type(error).__name__}: {error}") from error
    limit = TOLERANCE[loaded.kv_dtype]
    if not error <= limit:
        raise ModelRefused(
            f"a step of the program differs from the model's own by {error:.1e} (limit {limit:.0e})"
        )
    return error


def _difference(loaded: LoadedModel, ways: Sequence[Run], rows: int, make: Callable[[], ProofStep]) -> float:
    """Return the largest relative difference between the first way of a step, the model's own, and the others. The
    step has the same contents each time."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, loaded.text_config.vocab_size, (rows,), generator=generator)
    inputs = loaded.rows(as_plain(loaded.config, ids))
    far = torch.linspace(7, loaded.context_length - 9, rows).long()
    positions = torch.stack([far + 2 * axis for axis in range(loaded.mrope)])
    wanted, found = torch.arange(rows), []
    for run in ways:
        step, written = make()
        logits = run(inputs, positions, step, wanted)
        if logits is None:
            raise ModelRefused("the step of the proof is not one that the program runs")
        found.append((logits, written().float()))
    own, *others = found
    return max(_relative(got, wanted) for other in others for wanted, got in zip(own, other, strict=True))


def _from_tokens(program: Program, decoder: WholeDecoder) -> Run:
    """Return the way that begins with the rows' tokens."""

    def run(inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        singles: Any = step.kinds[0].singles
        assert step.single_writes is not None
        decoder.use(singles, step.single_writes)
        return decoder(inputs.ids.tolist(), *program.rotations(positions)).float()[wanted]

    return run


def _in_parts(run: Run) -> Run:
    """Return the way that wants the first row alone, and then all others: behind the last attention a step computes no
    more rows than are wanted."""

    def parts(
        inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor | None:
        first, others = (run(inputs, positions, step, part) for part in (wanted[:1], wanted[1:]))
        return None if first is None or others is None else torch.cat([first, others])

    return parts


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


class ProofStep(NamedTuple):
    """A step, and a function that returns the keys and values which it has written, as one row of numbers."""

    step: Step
    written: Callable[[], torch.Tensor]


def _pool(loaded: LoadedModel) -> Pool:
    """Return a small pool with random contents, the same each time."""
    extents = [
        _CHUNK,
        *(length + 1 for length in _LENGTHS),
        *(hi - lo + before for lo, hi, before in _BLOCKS),
    ]
    pool = Pool(loaded.shape, sum(extents), 1, loaded.kv_dtype)
    pool.arena.normal_(generator=torch.Generator().manual_seed(3))
    return pool


def _kv(pool: Pool, tokens: int) -> KVView:
    extent = pool.alloc(tokens)
    assert extent is not None  # the pool has the size of all
    return pool.kv(extent)


def _single_step(loaded: LoadedModel, rows: int) -> ProofStep:
    """Return a step of rows that stand alone."""
    pool = _pool(loaded)
    chunk = _kv(pool, _CHUNK)
    own = [_kv(pool, length + 1) for length in _LENGTHS[:rows]]
    calls: list[SpanCall] = []
    for row, (view, length, base) in enumerate(zip(own, _LENGTHS[:rows], _BASES[:rows], strict=True)):
        calls.append(SpanCall(slice(row, row + 1), Span(view, 0, length + 1), first=True))
        calls.append(SpanCall(slice(row, row + 1), Span(chunk, 0, _CHUNK, base=base)))
    kinds = [loaded.kind_calls(0, [])._replace(singles=loaded.single_rows(0, calls))]
    writes = RowWrites(pool.arena, range(rows), [view.data for view in own], _LENGTHS[:rows])
    step = Step([], kinds, loaded.kind_of, loaded.partial, single_writes=writes)
    return ProofStep(step, lambda: writes.memory[writes.index.flatten()].flatten())


def _block_step(loaded: LoadedModel) -> ProofStep:
    """Return a step of two blocks, of which some rows see a part of a chunk, and a row that stands alone."""
    pool = _pool(loaded)
    chunk = _kv(pool, _CHUNK)
    calls: list[SpanCall] = []
    writes: list[Write] = []
    for (lo, hi, before), base in zip(_BLOCKS, _BASES[1:3], strict=True):
        view, rows = _kv(pool, before + hi - lo), slice(lo, hi)
        own = Span(view, before, before + hi - lo)
        writes.append(Write(rows, own))
        calls.append(SpanCall(rows, own, causal=True, first=True))
        if before:
            calls.append(SpanCall(rows, Span(view, 0, before)))
        calls.append(SpanCall(slice(lo + 5, hi), Span(chunk, 4, _CHUNK, base=base)))
    alone, last = _kv(pool, _LENGTHS[0] + 1), _BLOCKS[-1][1]
    single = SpanCall(slice(last, last + 1), Span(alone, 0, _LENGTHS[0] + 1), first=True)
    kinds = [loaded.kind_calls(0, calls)._replace(singles=loaded.single_rows(0, [single]))]
    of_single = RowWrites(pool.arena, [last], [alone.data], [_LENGTHS[0]])
    step = Step(writes, kinds, loaded.kind_of, loaded.partial, single_writes=of_single)
    written = [write.span.source.data[:, :, :, write.span.lo :] for write in writes]
    return ProofStep(
        step,
        lambda: torch.cat(
            [of_single.memory[of_single.index.flatten()].flatten(), *(part.flatten() for part in written)]
        ),
    )


class _Operations(TorchDispatchMode):
    """Raises ModelRefused at an operation that a program has not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in _OPERATIONS:
            raise ModelRefused(f"the model also computes {name}")
        return func(*args, **(kwargs or {}))


def _watched(loaded: LoadedModel) -> Run:
    """Return the model's way, which raises ModelRefused at other operations. Only rows that stand alone can be
    watched, because the attention of blocks may be torch's."""

    def run(inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        with _Operations():
            return loaded.forward(inputs, positions, step, wanted)

    return run


@torch.inference_mode()
def _axes_and_scale(loaded: LoadedModel, half: int) -> tuple[torch.Tensor, float]:
    """Return the axis of the positions ``[half]`` that turns each pair of a head, and the scale of attention scores,
    both as the first layer's attention is seen to have them."""
    inputs = loaded.rows(torch.tensor(plain_ids(loaded.config, 4)))
    none = torch.zeros(loaded.mrope, 4, dtype=torch.int64)
    here = loaded.probe(inputs, none, 0, [4], [[]])
    axes = torch.zeros(half, dtype=torch.int64)
    for axis in range(loaded.mrope):
        moved = none.clone()
        moved[axis] = _FAR
        there = loaded.probe(inputs, moved, 0, [4], [[]])
        assert there.keys is not None and here.keys is not None
        turned = (there.keys != here.keys).any(0).any(0)
        axes[turned[:half] | turned[half : 2 * half]] = axis
    return axes, here.scale
