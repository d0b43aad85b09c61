"""Random prompts, policies and batches against the oracle."""

from __future__ import annotations

import random
import time
from contextlib import closing

import pytest
from engine_kit import (
    MemoryChunk,
    MemoryStore,
    assert_oracle,
    family,
    ids,
    image_chunk,
    prompt_of,
    submit,
    text_chunk,
)
from families import VISION_FAMILIES, random_image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpic.engine.native.engine import NativeEngine
from mpic.errors import CorruptFile
from mpic.link import Wrapping


def chunk_pool(name: str) -> list:
    chunks = [text_chunk(ids(50 + i, n)) for i, n in enumerate((1, 8, 23))]
    if name in VISION_FAMILIES:
        chunks += [image_chunk(random_image(60)), image_chunk(random_image(61, 32, 56))]
    return chunks


NAMES = ["full", "prefix", "reuse", "mpic-1", "mpic-8", "legolink-3", "legolink-0", "attnlink-6", "random-30"]
NAMES += ["cacheblend-30", "nocache"]
policies = st.sampled_from(NAMES)


@st.composite
def requests(draw, name: str):
    """Draw text and chunks at sentence and word level in any order, ending in text."""
    pool = chunk_pool(name)
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            parts.append(pool[draw(st.integers(0, len(pool) - 1))])
        else:
            parts.append(ids(draw(st.integers(0, 99)), draw(st.integers(1, 12))))
    parts.append(ids(draw(st.integers(0, 99)), draw(st.integers(1, 9))))
    return prompt_of(*parts), draw(policies)


def answers_equal_the_oracle(name, batch, patience=10.0, **options):
    """Submit a batch of (prompt, policy) at once to a new engine."""
    with closing(NativeEngine(family(name).loaded, page_size=8, **options)) as engine:
        # reading a slot that was never written makes the answer nonsense
        engine.pool.arena.fill_(float("nan"))
        engine.transfers.patience = patience
        streams = [submit(engine, *request) for request in batch]
        for request, stream in zip(batch, streams, strict=True):
            assert_oracle(name, *request, stream)
        engine.check()


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_vl"])
def test_any_interleaving_in_any_batch_equals_the_oracle(name):
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        batch=st.lists(requests(name), min_size=1, max_size=3),
        budget=st.sampled_from([7, 32, 512]),
        pages=st.sampled_from([48, 256]),
    )
    def check(batch, budget, pages):
        answers_equal_the_oracle(name, batch, pages=pages, budget=budget)

    check()


class UnsteadyStore(MemoryStore):
    """Layers arrive late, and now and then one is damaged, as drawn from a seed."""

    def __init__(self, held: MemoryStore, seed: int, failures: float) -> None:
        super().__init__(kind=UnsteadyChunk)
        self.chunks = dict(held.chunks)
        self.random, self.failures = random.Random(seed), failures


class UnsteadyChunk(MemoryChunk):
    def read_layers(self, destination):
        store = self._store
        for layer, values in enumerate(self._chunk.kv):
            time.sleep(store.random.choice([0, 0, 0.001, 0.004]))
            if store.random.random() < store.failures:
                destination[layer].fill_(float("nan"))
                store.chunks.pop(self._chunk.key, None)
                raise CorruptFile(f"layer {layer} is damaged")
            destination[layer].copy_(values)
            yield layer


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_any_interleaving_over_an_unsteady_store_equals_the_oracle(name):
    held = MemoryStore()
    first = NativeEngine(family(name).loaded, held, pages=256, page_size=8)
    for chunk in chunk_pool(name):
        for sink in (0, 4):
            first.compile(chunk, Wrapping(sink)).result(60)
    first.close()

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        batch=st.lists(requests(name), min_size=1, max_size=4),
        budget=st.sampled_from([7, 32, 512]),
        pages=st.sampled_from([48, 256]),
        loaders=st.sampled_from([1, 3]),
        patience=st.sampled_from([0.0, 0.002, 10.0]),
        seed=st.integers(0, 999),
        failures=st.sampled_from([0.0, 0.2]),
        missing=st.booleans(),
    )
    def check(batch, budget, pages, loaders, patience, seed, failures, missing):
        store = UnsteadyStore(held, seed, failures)
        if missing:
            store.chunks.popitem()
        answers_equal_the_oracle(
            name, batch, patience, store=store, pages=pages, budget=budget, loaders=loaders
        )

    check()
