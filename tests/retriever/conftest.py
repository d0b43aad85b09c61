"""Libraries with retrievers, opened, checked and closed for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from retriever_tools import Shelf


@pytest.fixture
def open_shelf(tmp_path) -> Iterator[Callable[..., Shelf]]:
    shelves: list[Shelf] = []

    def make(embedder=None, **options) -> Shelf:
        for shelf in shelves:
            shelf.close()
        shelves.append(Shelf(tmp_path / "library", embedder, **options))
        return shelves[-1]

    yield make
    for shelf in shelves:
        if not shelf.closed:
            shelf.retriever.check()
        shelf.close()
