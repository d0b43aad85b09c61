"""The rows of a step that map resident chunks, as they go from the model runner to the attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mpic.kernels.attention import QueryRotation


class MappedSpan(NamedTuple):
    """A span (``step_messages.ResidentSpan``) as attention sees it: its blocks ``[n]``, tokens from ``lo`` to ``hi`` of
    them, the first own token that sees it, and the rotation of queries (None for none)."""

    blocks: torch.Tensor
    lo: int
    hi: int
    row: int
    turn: QueryRotation | None


class SharedRows(NamedTuple):
    """Rows of one request in a step.

    Args:
        rows: its rows of the step.
        index: index in vLLM's sequence of the first of them.
        blocks: ``[n]`` the request's own blocks.
        spans: what it maps, in prompt order.
    """

    rows: slice
    index: int
    blocks: torch.Tensor
    spans: Sequence[MappedSpan]


@dataclass
class SpanMetadata:
    """The attention metadata of a step with rows that map resident chunks.

    Args:
        stock: vLLM's own, of the other rows; None if there are none.
        index: ``[m]`` int64 numbers of those in the step.
        shared: the rows that map chunks, by request.
    """

    stock: Any
    index: torch.Tensor
    shared: Sequence[SharedRows]
