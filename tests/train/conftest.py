"""Settings that training makes for its own process are undone here, where other tests run in the same one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def subnormal_numbers() -> Iterator[None]:
    """Has subnormal numbers computed again, which training and its evaluation turn off; Hypothesis needs them."""
    yield
    torch.set_flush_denormal(False)
