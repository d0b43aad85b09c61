"""Building blocks for tests of the native engine: families made once, chunks, prompts, requests."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from families import TYPES, Family, make_family
from oracle import Oracle

from mpic.engine.base import GenerationRequest, Sampling
from mpic.errors import CorruptFile, StorageFull
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, ChunkKV, KVKey
from mpic.link import ChunkPlace, DynamicPolicy, Evidence, Ranges, parse_policy
from mpic.model.identity import weights_digest
from mpic.model.loaded import LoadedModel
from mpic.packet.adapter import Adapter
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment

_ids = itertools.count()
TOKENS = 4
"""Answered tokens that tests of exactness compare."""


@functools.cache
def family(name: str) -> Family:
    return make_family(name)


@functools.cache
def adapter(name: str = "llama", header: int = 5, trailer: int = 3) -> Adapter:
    """A random adapter for a family's model, as large as its embeddings."""
    model = family(name).stock
    table = model.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(header * 100 + trailer)
    soft = torch.randn(header + trailer, table.shape[1], generator=generator) * table.std() + table.mean()
    return Adapter(soft[:header], soft[header:], weights_digest(model))


def text_chunk(token_ids: list[int] | tuple[int, ...], owner: str = "local") -> Chunk:
    key = ChunkKey.of_text(" ".join(map(str, token_ids)))
    return Chunk(key, owner, tuple(token_ids), label=f"doc{len(token_ids)}")


def image_chunk(image, owner: str = "local") -> Chunk:
    return Chunk(ChunkKey.of_image(image), owner, load_image=lambda: image, label="image")


def prompt_of(*parts) -> Prompt:
    """Lists of ids become text, chunks become links."""
    return Prompt(tuple(ChunkSegment(p) if isinstance(p, Chunk) else TextSegment(tuple(p)) for p in parts))


def request_of(
    prompt: Prompt, policy: str, tokens: int = 4, user: str = "local", **sampling
) -> GenerationRequest:
    settings = Sampling(max_tokens=tokens, ignore_eos=True, **sampling)
    return GenerationRequest(f"r{next(_ids)}", prompt, parse_policy(policy), settings, user)


def fail_a_compile(engine, monkeypatch) -> list[Exception]:
    """Let the next chunk's compile fail as it begins, for want of memory. The returned list is empty once it has."""
    failing, begin = [MemoryError("no memory for the job")], engine.memory._presser.observe

    def observe(job):
        if failing:
            raise failing.pop()
        begin(job)

    monkeypatch.setattr(engine.memory._presser, "observe", observe)
    return failing


def ids(seed: int, n: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 300, (n,), generator=generator).tolist()


def select(prompt, inputs, policy) -> list[Ranges]:
    """Return the ranges that a policy recomputes of each chunk."""
    places, start = [], 0
    following = iter(inputs)
    for segment in prompt.segments:
        n = len(next(following)) if hasattr(segment, "chunk") else len(segment)
        if hasattr(segment, "chunk"):
            places.append(ChunkPlace(n, start, start))
        start += n
    return policy.select(places)


def logits_of(stream, tokens: int, vocabulary: int = 300) -> tuple[list[int], torch.Tensor]:
    """Greedy ids and the full log-distribution of every step."""
    answer = stream.result()
    rows = torch.full((tokens, vocabulary), float("-inf"))
    for i, logprob in enumerate(answer.logprobs):
        for token, value in logprob.top:
            rows[i, token] = value
    return list(answer.token_ids), rows


def inputs_of(loaded: LoadedModel, chunk: Chunk) -> ChunkInputs:
    if chunk.token_ids is None:
        return loaded.image_inputs(chunk.load_image())
    return loaded.text_inputs(chunk.token_ids)


def expected_of(
    name: str, prompt, policy_text: str, tokens: int = TOKENS, kept=(), fam=None, inputs_of=inputs_of
) -> tuple[list[int], torch.Tensor]:
    """The oracle's greedy ids and log-distributions; ``kept`` as ``StockOracle.generate`` takes it."""
    fam, policy = fam or family(name), parse_policy(policy_text)
    loaded = fam.loaded
    oracle = Oracle(fam.stock, loaded.mrope, TYPES.get(name), loaded.stand_ins)
    made = [inputs_of(loaded, chunk) for chunk in prompt.chunks]
    if policy.wrapping.packet:
        soft = adapter(name)
        made = [oracle.wrap(inputs, soft.header, soft.trailer) for inputs in made]
    if isinstance(policy, DynamicPolicy):
        look = {Evidence.DEVIATION: oracle.deviations, Evidence.ATTENTION: oracle.attention}[policy.evidence]
        selection = policy.choose(look(prompt, made, policy.layer))
    else:
        selection = select(prompt, made, policy)
    if not policy.context:
        prompt = Prompt(tuple(s for s in prompt.segments if not hasattr(s, "chunk")))
        made, selection = [], []
    answer, logits = oracle.generate(prompt, made, policy, selection, tokens, loaded.bos_id, kept)
    return answer, torch.log_softmax(logits, -1)


def submit(engine, prompt, policy: str = "mpic-4", tokens: int = TOKENS):
    """A request for greedy tokens and their log-distributions."""
    return engine.submit(request_of(prompt, policy, tokens, logprobs=300))


def assert_same(got, expected) -> None:
    """Equal ids and log-distributions: pairs as ``logits_of`` and ``expected_of`` return them."""
    assert got[0] == expected[0]
    assert (got[1] - expected[1]).abs().max() < 1e-4


def assert_oracle(name: str, prompt, policy: str, stream) -> None:
    """A stream of ``submit`` answers as the oracle does."""
    assert_same(logits_of(stream, TOKENS), expected_of(name, prompt, policy))


def check_and_close(engines) -> None:
    """End engines; the memory of those that still run has to be accounted for."""
    for engine in engines:
        if not engine._inbox.closed:
            engine.check()
        engine.close()


def submit_together(engine, requests) -> list:
    """Submit requests while the engine's thread waits, so that it finds all of them at once."""
    go = pause(engine)
    streams = [engine.submit(request) for request in requests]
    go.set()
    return streams


def pause(engine) -> threading.Event:
    """Stop the engine's thread between two steps until the event is set: what is sent by then is there together."""
    inside, go = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        go.wait(60)

    engine._post(block)
    assert inside.wait(60)
    return go


def until(condition) -> None:
    for _ in range(40_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


class MemoryStore:
    """A ``ChunkStore`` in a dictionary. ``damage(key)`` makes the next read of a chunk fail its checksum; ``delay``
    (seconds) slows reading; ``kind`` is the class of the chunks that it finds."""

    def __init__(self, delay: float = 0.0, kind: type[MemoryChunk] | None = None) -> None:
        self.kind = kind or MemoryChunk
        self.chunks: dict[KVKey, ChunkKV] = {}
        self.damaged: set[KVKey] = set()
        self.delay = delay
        self.reads = 0
        self.full = False

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, MemoryChunk]:
        return {key: self.kind(self, self.chunks[key]) for key in keys if key in self.chunks}

    def touch(self, keys: Iterable[KVKey]) -> None:
        pass

    def open(self, key: KVKey) -> MemoryChunk | None:
        chunk = self.chunks.get(key)
        return self.kind(self, chunk) if chunk is not None else None

    def save(self, chunk: ChunkKV) -> None:
        if self.full:
            raise StorageFull("the disk is full")
        self.chunks[chunk.key] = chunk

    def missing_reason(self, key: KVKey) -> str:
        return "new"

    def damage(self, key: KVKey) -> None:
        self.damaged.add(key)


class MemoryChunk:
    """A stored chunk, as ``MemoryStore.open`` returns it."""

    tier = "disk"

    def __init__(self, store: MemoryStore, chunk: ChunkKV) -> None:
        self.inputs, self._store, self._chunk = chunk.inputs, store, chunk

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        time.sleep(self._store.delay)
        self._store.reads += 1
        if self._chunk.key in self._store.damaged:
            destination.fill_(float("nan"))
            del self._store.chunks[self._chunk.key]
            self._store.damaged.discard(self._chunk.key)
            raise CorruptFile("checksum of layer 0 does not match")
        destination.copy_(self._chunk.kv)
        yield from range(len(destination))


SHARED, OTHER = text_chunk(ids(70, 40)), text_chunk(ids(71, 23))
SHRINKING = {
    prompt_of(ids(1, 5), SHARED, ids(2, 4), OTHER, ids(3, 3)): 5,
    prompt_of(ids(4, 5), SHARED, ids(5, 4)): 2,
    prompt_of(ids(6, 9)): 3,
}
"""Prompts, two of which share a chunk, and numbers of tokens with which a batch of them shrinks twice."""


def answers_at_once(engine, policy: str, asked=SHRINKING) -> tuple[list, dict]:
    """Answers to prompts that arrive at once, with the logits of every token, over memory that is full of NaN at first;
    and the engine's counters."""
    engine.pool.arena.fill_(float("nan"))
    requests = [request_of(prompt, policy, n, logprobs=300) for prompt, n in asked.items()]
    streams = submit_together(engine, requests)
    found = [logits_of(stream, n) for stream, n in zip(streams, asked.values(), strict=True)]
    engine.check()
    return found, engine.stats()["counters"]


def assert_answers_equal(found, expected) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted)
