"""Engines made, checked and closed per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine_kit import adapter, check_and_close, family

from mpic.engine.native.engine import NativeEngine
from mpic.model.loaded import LoadedModel


@pytest.fixture
def make_engine() -> Iterator[Callable[..., NativeEngine]]:
    engines: list[NativeEngine] = []

    def make(name: str = "llama", loaded: LoadedModel | None = None, **options) -> NativeEngine:
        options = {"pages": 256, "page_size": 8, "budget": 512} | options
        if "adapter" not in options:
            options["adapter"] = adapter(name)
        engines.append(NativeEngine(loaded or family(name).loaded, **options))
        # reading a slot that was never written makes the answer nonsense
        engines[-1].pool.arena.fill_(float("nan"))
        return engines[-1]

    yield make
    check_and_close(engines)
