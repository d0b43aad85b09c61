"""Settings that training makes for its own process are undone here, where other tests run in the same one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.train import curriculum


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(autouse=True)
def subnormal_numbers() -> Iterator[None]:
    """Has subnormal numbers computed again, which training and its evaluation turn off; Hypothesis needs them."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def few_conversations(monkeypatch) -> None:
    """Has a step's batch chosen from few conversations, where one of many would be drawn for long."""
    monkeypatch.setattr(curriculum, "_READY", 4)
