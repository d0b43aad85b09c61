"""The load-time self-test: it catches wrong results that no list of model families can foresee.

A prompt of text, chunk, text, chunk, text is run once by the stock model and once as a step in which each chunk has its
own extent with keys rotated at chunk-local positions, and every query is rotated by the bases. Nothing is approximated,
so the logits must agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from mpic.errors import ModelRefused
from mpic.kernels.attention import KVView, SpanCall, Write
from mpic.kernels.patterns import Pattern, fresh_calls
from mpic.kernels.span import Span
from mpic.kernels.windows import Stretch
from mpic.model.bidirectional import Scope
from mpic.model.hooks import NAME, Step
from mpic.model.loaded import LoadedModel
from mpic.model.structure import RowInputs, as_plain

log = logging.getLogger(__name__)

Segments = tuple[tuple[int, int, bool], ...]
"""(start, end, is_chunk) in sequence order."""
_SEGMENTS: Segments = ((0, 9, False), (9, 23, True), (23, 30, False), (30, 41, True), (41, 47, False))
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Largest ``|difference| / max |logit|`` of a model with few layers (float32 rounding of a packed product)."""
ROUNDED_KV = 4e-3
"""The same of a float32 model whose keys and values are rounded to 16 bits."""
ROUNDINGS, MOST = 3.0, 4.0
"""A model in half precision that exceeds ``TOLERANCE`` may differ by ``ROUNDINGS`` times its own rounding error, but by
no more than ``MOST`` times the tolerance. 32 random layers of LLaVA-1.6-7B's shape differ by 7.8e-2 on an H100."""


@torch.inference_mode()
def self_test(loaded: LoadedModel) -> float:
    """Compare with the stock model and return the relative error.

    Raises:
        ModelRefused: the logits differ, or the model cannot be called this way at all.
    """
    why = "something in it depends on more than relative position"
    run = partial(_logits, loaded)
    return compare(loaded, run, "the load-time self-test could not run", "linked logits", why)


def _logits(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the prompt as a step, and the stock model's."""
    ids, positions = _prompt(loaded)
    expected = _stock(loaded, ids, positions)
    return as_step(loaded, loaded.rows(ids), positions, _SEGMENTS), expected


def _prompt(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompt's tokens ``[n]``, and their positions ``[1 or 3, n]`` on the device."""
    n = _SEGMENTS[-1][1]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, loaded.text_config.vocab_size, (n,), generator=generator)
    ids = as_plain(loaded.config, ids)
    positions = torch.arange(n).expand(loaded.mrope, n).clone()
    if loaded.mrope == 3:  # positions of an image: a grid inside the chunk
        for start, end, is_chunk in _SEGMENTS:
            if is_chunk:
                offset = torch.arange(end - start)
                positions[1, start:end] = start + offset // 4
                positions[2, start:end] = start + offset % 4
    return ids, positions.to(loaded.device)


def compare(
    loaded: LoadedModel,
    logits: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    failed: str,
    what: str,
    why: str,
) -> float:
    """Return the relative error of logits.

    Args:
        logits: computes them, and those of the stock model.
        failed, what, why: words for the errors: what could not be done, what differs, and what that means.

    Raises:
        ModelRefused: the logits cannot be computed, or they differ; then its details have a ``difference``.
    """
    try:
        got, expected = logits()
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"{failed}: {type(error).__name__}: {error}") from error
    difference = relative_error(got, expected)
    limit = TOLERANCE.get(loaded.dtype, 2e-4) if loaded.kv_dtype is loaded.dtype else ROUNDED_KV
    if not difference <= limit:
        limit = beyond_rounding(loaded, limit)
    if not difference <= limit:
        raise ModelRefused(
            f"{loaded.config.model_type}: {what} differ from the stock model's by {difference:.1e} "
            f"(limit {limit:.0e}): {why}",
            difference=f"{difference:.1e}",
        )
    return difference


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|difference| / max |logit|`` at its largest."""
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


@torch.inference_mode()
def beyond_rounding(loaded: LoadedModel, tolerance: float) -> float:
    """Return by how much the logits of two computations may differ if nothing but their rounding does.

    Every layer of a model in half precision rounds anew, and how much of that reaches the logits depends on the
    weights. It is measured between two attentions of transformers: where ours is wrong, it cannot set its own limit.
    Models that transformers has no second attention for keep the tolerance.
    """
    special = any(facts.softcap or facts.sinks for facts in loaded.layers)
    if loaded.dtype == torch.float32 or special:
        return tolerance
    prompt = _prompt(loaded)
    try:
        rounding = relative_error(*(_stock(loaded, *prompt, name) for name in ("sdpa", "eager")))
    except Exception as error:
        log.info("%s: what rounding does to it is not known: %s", loaded.config.model_type, error)
        return tolerance
    return max(tolerance, min(ROUNDINGS * rounding, MOST * tolerance))


@contextmanager
def stock_attention(loaded: LoadedModel, name: str = "eager") -> Iterator[None]:
    """Make a loaded model attend as an attention of transformers does."""
    config: Any = loaded.text_model.config
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = NAME


def _stock(
    loaded: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, attention: str = "eager"
) -> torch.Tensor:
    """Return the logits of the stock model, called as its users call it: with token ids."""
    position_ids = positions[:1] if loaded.mrope == 1 else positions[:, None]
    given = ids[None].to(loaded.device)
    mask = torch.ones_like(given)
    with stock_attention(loaded, attention):
        out = loaded.model(input_ids=given, position_ids=position_ids, attention_mask=mask, use_cache=False)
    return out.logits[0].float()


def as_step(
    loaded: LoadedModel,
    inputs: RowInputs,
    positions: torch.Tensor,
    segments: Segments,
    scope: Scope | None = None,
) -> torch.Tensor:
    """Return the logits of a prompt in which every segment has its own extent; a chunk's positions begin at 0.

    Args:
        scope: the tokens that attend to each other in both directions: those of each chunk, which is an image, or all.
    """
    local, writes, views, at = positions.clone(), [], [], bases(positions, segments)
    for start, end, _ in segments:
        shape = loaded.shape.extent(end - start)
        views.append(KVView(torch.full(shape, float("nan"), dtype=loaded.kv_dtype, device=loaded.device)))
        local[:, start:end] -= at[len(views) - 1]
        writes.append(Write(slice(start, end), Span(views[-1], 0, end - start)))

    def calls(pattern: Pattern) -> list[SpanCall]:
        if scope is None:
            pattern = pattern._replace(blocks=None)
        return [c for n in range(len(views)) for c in _calls(views, n, pattern, segments, at, scope)]

    kinds = [loaded.kind_calls(i, calls(kind.pattern)) for i, kind in enumerate(loaded.kinds)]
    step = Step(writes, kinds, loaded.kind_of, loaded.partial)
    return loaded.forward(inputs, local, step, torch.arange(len(inputs.ids), device=loaded.device))


def bases(positions: torch.Tensor, segments: Segments) -> list[int]:
    """Return for each segment the position from which its own positions are counted: that of a chunk's first token,
    else 0."""
    return [int(positions[:, start].min()) if is_chunk else 0 for start, _, is_chunk in segments]


def _calls(
    views: list[KVView],
    at: int,
    pattern: Pattern,
    segments: Segments,
    base_of: list[int],
    scope: Scope | None,
) -> list[SpanCall]:
    """Return the calls of a segment's rows: rows are at ``p - base``, keys of other segments at their own
    positions."""
    start, end, is_chunk = segments[at]
    rows = end - start
    spans = [
        Span(views[number], 0, finish - begin, base_of[number] - base_of[at], place=begin)
        for number, (begin, finish, _) in enumerate(segments)
    ]
    everywhere = scope is Scope.PROMPT and pattern.blocks is not None
    blocks = [(0, rows)] if everywhere or (scope is Scope.IMAGE and is_chunk) else []
    before = [] if everywhere else [Stretch(span, span.place) for span in spans[:at]]
    fresh = Span(views[at], 0, rows)
    made = fresh_calls(pattern, start, np.arange(start, end), fresh, before, blocks)
    if everywhere:
        made += (SpanCall(slice(start, end), span) for n, span in enumerate(spans) if n != at)
    return made
