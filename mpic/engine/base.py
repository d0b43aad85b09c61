"""The contract between an engine and everything above it (server, SDK in process, evaluations)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKV, KVKey
from mpic.link.plan import Policy
from mpic.prompt.segments import Prompt, Segment


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen. ``temperature = 0`` is greedy. Results depend on ``seed`` alone, not the batch.

    Args:
        max_tokens: at most this many new tokens; None: up to the model's context.
        top_k: 0 keeps all tokens.
        logprobs: None for none, else how many alternatives to report beside the chosen token (0..20).
        stop: strings that end generation; they are not part of the answer.
        ignore_eos: go on to max_tokens (benchmarks).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


class Hit(NamedTuple):
    """A reference that a search found: what to link, and what to tell the reader about it (JSON-able)."""

    chunk: Chunk
    citation: Mapping[str, Any]


class Found(NamedTuple):
    """The outcome of a search: the query as it was understood, references best first, and why there are none."""

    query: str
    hits: tuple[Hit, ...] = ()
    error: str | None = None


class Retrieval(ABC):
    """How a request looks things up while it is being answered. One object a request; methods run on a search thread.

    The model calls by saying ``opens``, the call, ``closes``; none of it is part of the answer. The request is then
    paused, ``search`` runs, and what ``insert`` returns is put after the call as if it had stood there from the start.

    Attributes:
        opens, closes: strings around a call, control tokens included.
        rounds: most searches in the request; a call beyond ends the answer.
        nothing: for models that cannot go on without a reference: what the answer ends with when there is none. None:
            the model reads what ``insert`` says then, and goes on.
    """

    opens: str
    closes: str
    rounds: int
    nothing: str | None = None

    @abstractmethod
    def search(self, call: str) -> Found:
        """Look up what the model asked for. An error of the tree becomes the round's ``error``."""

    @abstractmethod
    def insert(self, hits: Sequence[Hit], number: int) -> tuple[Segment, ...]:
        """What the model reads after its call; must not depend on anything but the arguments.

        Args:
            hits: the references that fit, maybe fewer than were found, maybe none.
            number: of the first of them, counted from 1 over the request.
        """


@dataclass
class RetrievalRound:
    """One search of a request.

    Args:
        query: what was searched for.
        citations: of the references that were inserted, best first.
        at: tokens the model had said when it called.
        tokens, reused: inserted, markers included, and those of them that were linked without computing them.
        search_ms: from the call to the references, their inputs included.
        link_ms: from there to the next token.
        error: why nothing was inserted (``nothing_found``, ``rounds``, or the code of an error); None when all is well.
    """

    query: str
    citations: tuple[Mapping[str, Any], ...] = ()
    at: int = 0
    tokens: int = 0
    reused: int = 0
    search_ms: float = 0.0
    link_ms: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. ``user`` comes from the server's authentication and isolates every cache. With ``trace`` the
    usage says where every token of the prompt came from."""

    id: str
    prompt: Prompt
    policy: Policy
    sampling: Sampling = Sampling()
    user: str = "local"
    trace: bool = False
    retrieval: Retrieval | None = field(default=None, compare=False)


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the most likely alternatives as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Delta(NamedTuple):
    """A piece of an answer. The last one carries ``finish_reason`` (stop | length | abort) and ``usage``; one that
    carries ``retrieval`` says that references have been found, before the model reads them."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    retrieval: RetrievalRound | None = None


@dataclass(frozen=True)
class ChunkUse:
    """What happened to one linked chunk, in prompt order.

    ``tier`` is where its KV came from: ``device`` (resident pages), ``host``, ``disk``, a remote tier's name,
    ``compiled`` (computed in this request) or ``none`` (the policy recomputes all of it). ``reason`` says why tokens
    were recomputed or the chunk compiled: ``policy``, ``new``, ``recipe``, ``evicted``, ``expired``, ``model_changed``,
    ``corrupt``; None when nothing was.
    """

    key: str
    label: str | None
    tokens: int
    reused: int
    recomputed: int
    tier: str
    reason: str | None = None
    ms: float = 0.0


class TraceSpan(NamedTuple):
    """Tokens ``[start, end)`` of a prompt that came from the same place.

    ``state``: ``new`` (the request's own text, computed), ``prefix`` (found in the prefix cache), ``recomputed`` (of a
    chunk, computed again), or of a chunk and reused, by where its KV came from: ``device``, ``host``, ``disk``,
    ``compiled`` (in this request). ``kind``: ``text | image | document``; the last two are chunks and may have a
    ``label`` and a ``file_id``.
    """

    start: int
    end: int
    state: str
    kind: str
    label: str | None
    file_id: str | None


@dataclass
class Usage:
    """Token counts and times of one request. Times are milliseconds.

    ``prompt_tokens = reused + prefix_hit + computed``; ``reused`` are chunk tokens linked without recomputation,
    ``recomputed`` are chunk tokens computed again, ``prefix_hit`` are tokens found in the request's own prefix cache.
    ``attended`` counts the (query, key) pairs of a layer's attention that computing the prompt took.
    ``compiled`` counts tokens of chunks this request had to compile, ``probed`` tokens that passed the first layers so
    that a dynamic policy could decide; both come on top. What
    retrieval inserted while decoding counts as prompt.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused: int = 0
    recomputed: int = 0
    prefix_hit: int = 0
    computed: int = 0
    attended: int = 0
    compiled: int = 0
    probed: int = 0
    queue_ms: float = 0.0
    load_ms: float = 0.0
    link_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    preemptions: int = 0
    policy: str = ""
    chunks: tuple[ChunkUse, ...] = ()
    trace: tuple[TraceSpan, ...] = ()
    retrieval: tuple[RetrievalRound, ...] = ()


class GenerationStream(Protocol):
    """The running answer. Iterate it (sync or async) for Deltas; errors of the tree are raised from iteration."""

    id: str

    def __iter__(self) -> Iterator[Delta]: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abort(self) -> None:
        """Stop; pages are freed at the next step. Safe to call twice and after the end."""
        ...


class StoredChunk(Protocol):
    """A ChunkKV on some tier below the device. What was found may be gone, or turn out damaged, when it is read."""

    tier: str
    """Where it lies: ``host``, ``disk`` or a remote tier's name."""

    @property
    def inputs(self) -> ChunkInputs:
        """Verified; may be read from the tier when first asked for.

        Raises:
            NotFound: it has left the tier meanwhile.
            CorruptFile: it is damaged. It has then been moved aside and counted.
        """
        ...

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Fill ``destination [layers, 2, kv_heads, n, head_dim]`` (host memory; each layer may be strided), verifying
        checksums. One ``next`` should be one read of 1 to a few MiB; calls may come from different threads, one at a
        time.

        Yields:
            Every layer's number, in order, as soon as its bytes are in place and verified: others may read them then,
            and must not be changed any more.

        Raises:
            NotFound, CorruptFile: as ``inputs``.
        """
        ...


class ChunkStore(Protocol):
    """Where compiled chunks live below the device pages (the library's disk tier implements it).

    Attributes:
        root: folder that every ``path`` is in; nothing else writes to ``spool`` below it than an engine.
    """

    root: Path

    def find(self, keys: Sequence[KVKey]) -> Mapping[KVKey, StoredChunk]:
        """Those that are stored. One cheap question for a whole prompt: it opens and reads nothing."""
        ...

    def open(self, key: KVKey) -> StoredChunk | None:
        """The stored chunk, its inputs read, or None when there is none (never raises for a bad file: it is moved
        aside)."""
        ...

    def save(self, chunk: ChunkKV) -> None:
        """Make the chunk durable. Called from a background thread. Raises StorageFull."""
        ...

    def path(self, key: KVKey) -> Path:
        """Where a chunk's file lies, if it does (``mpic.kv.file``), for engines that read it in other processes."""
        ...

    def missing_reason(self, key: KVKey) -> str:
        """Why ``find`` or ``open`` found nothing: ``new | evicted | expired | model_changed | recipe | corrupt``."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model is, for /v1/models, /health and the catalogue."""

    name: str
    digest: str
    family: str
    context_length: int
    dtype: str
    device: str
    modalities: tuple[str, ...]
    attention: str
    details: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """Runs requests. Thread-safe; owns the device."""

    info: ModelInfo

    @abstractmethod
    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request. Raises BadRequest errors at once for what can be known without computing."""

    @abstractmethod
    def compile(self, chunk: Chunk, sink: int = 0) -> Future[int]:
        """Compile a chunk and store it; the future gives its token count (or raises from the error tree)."""

    def prefetch(self, chunk: Chunk, sink: int = 0) -> None:  # noqa: B027 - a hint may be ignored
        """A hint that a chunk may be linked soon: its stored KV may be brought to the device. Never waits, never raises
        for a chunk that cannot be had."""

    @abstractmethod
    def forget(self, chunk: Chunk) -> None:
        """Drop a deleted chunk: invisible to new requests at once, freed when no running request links it, together
        with everything linked with it in the linked prefix namespace."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters and gauges: queue length, running, pages by state, tokens, hits over requested, evictions."""

    def ready(self) -> None:
        """Raises EngineStopped (or another Unavailable) when no request would be answered."""
        return

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant that can be verified while idle. Raises IntegrityError."""

    @abstractmethod
    def close(self) -> None:
        """Finish the running step, fail what waits with EngineStopped, write what is unsaved, stop."""
