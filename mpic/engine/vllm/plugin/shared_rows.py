"""The attention metadata of a step with rows that map resident chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpic.kernels.paged_spans import PagePlan, SharedRows


@dataclass
class SpanMetadata:
    """The attention metadata of a step with rows that map resident chunks.

    Args:
        stock: vLLM's own metadata of the other rows; None if every row maps chunks.
        index: ``[m]`` int64 indices of the other tokens in the step.
        shared: the rows that map chunks, by request.
    """

    stock: Any
    index: torch.Tensor
    shared: Sequence[SharedRows]
    _plans: dict[int, PagePlan] = field(default_factory=dict)

    def plan(self, group: int) -> PagePlan:
        """Return the rows that map chunks, for all layers in which ``group`` heads share a key head."""
        if group not in self._plans:
            self._plans[group] = PagePlan(self.shared, group)
        return self._plans[group]
