"""The contract between an engine and everything above it (server, SDK in process, evaluations)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from mpic.engine.grammar import Grammar
from mpic.kv.chunk import Chunk
from mpic.link import BARE, POLICIES, Need, Policy, Wrapping
from mpic.link.engines import PROVIDES
from mpic.model.info import ModelInfo
from mpic.prompt.segments import Prompt, Segment

Trigger = Literal["call", "prompted", "confidence"]
MOST_TOP_K = 2**31 - 1
"""The largest ``top_k``. Any that is at least as large as the vocabulary keeps all tokens."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request. ``temperature = 0`` is greedy. Given the logits, results depend on
    ``seed`` alone, not on the batch; logits of another batch may differ by rounding.

    Args:
        max_tokens: most new tokens; None: up to the model's context.
        top_k: 0 keeps all tokens; at most ``MOST_TOP_K``.
        min_p: leaves out tokens less likely than this share of the most likely one, 0 to 1, before top-k and top-p.
        presence_penalty, frequency_penalty: taken off the logits of tokens that the answer has already, once and for
            each time.
        repetition_penalty: divides the logits above 0 of tokens that prompt or answer have, and multiplies others; 1
            changes nothing.
        logit_bias: (token, number that is added to its logit), each token once.
        logprobs: number of alternatives to report beside each chosen token (0..20); None reports nothing.
        stop: strings that end generation; they are not part of the answer.
        ignore_eos: generate up to ``max_tokens`` (benchmarks).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def counts_answers(self) -> bool:
        """Return whether logits depend on how often the answer has a token."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def penalizes(self) -> bool:
        """Return whether logits depend on the tokens before."""
        return self.counts_answers or self.repetition_penalty != 1

    @property
    def adjusts(self) -> bool:
        """Return whether logits change before a token is drawn from them."""
        return bool(self.penalizes or self.logit_bias or (self.min_p and self.temperature))


class Hit(NamedTuple):
    """A reference that a search found: the chunk to link, and its citation for the reader (JSON)."""

    chunk: Chunk
    citation: Mapping[str, Any]


class SearchResult(NamedTuple):
    """The outcome of a search: the query as it was understood, the references, best first, and the reason if there are
    none."""

    query: str
    hits: tuple[Hit, ...] = ()
    error: str | None = None


class Retrieval(ABC):
    """Searches for a request while it is being answered. Each request has its own; methods run on a search thread.

    A call is a part of what the model generates that is not part of the answer. After it the request is paused,
    ``search`` runs, and the result of ``insert`` is put after the call as if it had been there from the start.

    Attributes:
        trigger: what counts as a call: ``call``, text between ``opens`` and ``closes``; ``prompted``, a line at the
            start of the answer that begins with ``opens``; ``confidence``, the start of an answer whose tokens are
            improbable (``mpic.engine.detokenize``).
        opens, closes: the strings that begin and end a call, control tokens included.
        confidence: least probability of the first tokens, with ``confidence``; the request needs log-probabilities.
        rounds: maximum number of searches in the request; a further call ends the answer.
        nothing: the text that ends the answer when no reference is found, for models that cannot go on without one.
            None: the model reads what ``insert`` returns in that case, and goes on.
    """

    trigger: Trigger = "call"
    opens: str = ""
    closes: str = ""
    confidence: float = 0.0
    rounds: int
    nothing: str | None = None

    @abstractmethod
    def search(self, call: str) -> SearchResult:
        """Search for the query of the model's call. An MPICError becomes the round's ``error``."""

    @abstractmethod
    def insert(self, hits: Sequence[Hit], number: int) -> tuple[Segment, ...]:
        """Return the segments that the model reads after its call. They must depend on that call and the arguments
        alone.

        Args:
            hits: the references that fit; fewer than were found, or none.
            number: number of the first hit, counted from 1 over the request.
        """


@dataclass
class RetrievalRound:
    """A search of a request.

    Args:
        query: the text that was searched for.
        citations: citations of the references that were inserted, best first.
        at: number of tokens that the model had generated when it called.
        tokens, reused: number of tokens that were inserted, markers included, and how many of them were not computed.
        search_ms: time from the call until the references and their inputs were found.
        link_ms: time from then until the next token.
        error: the reason when nothing was inserted (``nothing_found``, ``rounds``, or an error's code); None otherwise.
        trigger: what asked: that of the ``Retrieval``, or ``always`` for a search before the answer.
    """

    query: str
    citations: tuple[Mapping[str, Any], ...] = ()
    at: int = 0
    tokens: int = 0
    reused: int = 0
    search_ms: float = 0.0
    link_ms: float = 0.0
    error: str | None = None
    trigger: str = "always"


@dataclass(frozen=True)
class GenerationRequest:
    """A request for an answer. ``user`` comes from the server's authentication and isolates every cache. With ``trace``
    the usage shows where every token of the prompt came from. ``exists`` raises if a file of the prompt was deleted; it
    is called, as in ``Engine.compile``, when a later deletion would be noticed. With ``grammar`` the answer follows it,
    and ends where nothing more can."""

    id: str
    prompt: Prompt
    policy: Policy
    sampling: Sampling = Sampling()
    user: str = "local"
    trace: bool = False
    retrieval: Retrieval | None = field(default=None, compare=False)
    exists: Callable[[], object] | None = field(default=None, compare=False)
    grammar: Grammar | None = None


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the most likely alternatives as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Delta(NamedTuple):
    """A part of an answer. The last one carries ``finish_reason`` (stop | length | abort), ``usage`` and, if a stop
    string ended the answer, this string as ``stop``. One with ``retrieval`` reports a search that has ended, before the
    model reads its result."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: GenerationUsage | None = None
    retrieval: RetrievalRound | None = None
    stop: str | None = None


@dataclass(frozen=True)
class ChunkUse:
    """Reports how one linked chunk was used.

    ``tier`` is where its KV came from: ``device`` (resident pages), ``host``, ``disk``, ``remote``,
    ``compiled`` (computed in this request) or ``none`` (the policy recomputes all of it). ``reason`` is why tokens were
    recomputed or the chunk compiled: ``policy``, ``new``, ``recipe``, ``evicted``, ``expired``, ``model_changed``,
    ``corrupt``, ``slower`` (loading it from a remote store would take longer), ``unavailable`` (that store has failed),
    and from vLLM ``missing``, ``mismatch``, ``late``, ``rows`` (docs/vllm.md); None when nothing was.
    ``press`` names the press that compressed its KV. ``bytes`` is the size of the part that the prompt mapped (0:
    none).
    """

    key: str
    label: str | None
    tokens: int
    reused: int
    recomputed: int
    tier: str
    reason: str | None = None
    ms: float = 0.0
    press: str | None = None
    bytes: int = 0


class TraceSpan(NamedTuple):
    """Tokens ``[start, end)`` of a prompt that came from the same place.

    ``state``: ``new`` (the request's own text, computed), ``prefix`` (found in the prefix cache), ``recomputed`` (of a
    chunk, computed again), or of a chunk and reused, by where its KV came from: ``device``, ``host``, ``disk``,
    ``remote``, ``compiled`` (in this request). ``kind``: ``text | image | video | document``; all but the first are
    chunks and may have a ``label`` and a ``file_id``.
    """

    start: int
    end: int
    state: str
    kind: str
    label: str | None
    file_id: str | None


@dataclass
class GenerationUsage:
    """Token counts and times of one request. Times are milliseconds.

    ``prompt_tokens = reused + prefix_hit + computed``: ``reused`` are chunk tokens linked without recomputation,
    ``recomputed`` are chunk tokens computed again, ``prefix_hit`` are tokens found in the prefix cache. ``packet`` are
    those prompt tokens that an adapter adds around chunks. ``attended`` counts the (query, key) pairs of a layer's
    attention that computing the prompt took. ``compiled`` counts tokens of
    chunks that this request had to compile, ``probed`` tokens that passed the first layers so that a dynamic policy
    could decide; both come on top. Tokens that retrieval inserts while decoding count as prompt.

    ``reused`` says how a prompt was put together, ``saved`` and ``spent`` what that cost: tokens linked from a chunk
    that this request had to compile, or whose compiling it waited for, are reused and were not saved.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused: int = 0
    recomputed: int = 0
    prefix_hit: int = 0
    computed: int = 0
    packet: int = 0
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

    @property
    def found(self) -> int:
        """Return the reused tokens of chunks that had been compiled before this request."""
        return self.reused - linked_at_once(self.chunks)

    @property
    def saved(self) -> int:
        """Return the tokens of the prompt that were not computed for this request."""
        return self.found + self.prefix_hit

    @property
    def spent(self) -> int:
        """Return the other tokens of the prompt: those that were computed in it, or in its chunks when these were
        compiled."""
        return self.prompt_tokens - self.saved


def linked_at_once(chunks: Iterable[ChunkUse]) -> int:
    """Return how many tokens were linked from chunks that had only then been compiled."""
    return sum(chunk.reused for chunk in chunks if chunk.tier == "compiled")


class GenerationStream(Protocol):
    """A running answer. Iterate it (sync or async) for Deltas; iteration raises the request's error (an MPICError)."""

    id: str

    def __iter__(self) -> Iterator[Delta]: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abort(self) -> None:
        """End the request; its pages are freed before the next step. Safe to call twice and after the end."""
        ...


class Engine(ABC):
    """Runs requests. Thread-safe; owns the device.

    Attributes:
        provides: the abilities that policies may need and this engine has.
    """

    info: ModelInfo
    provides: frozenset[Need] = PROVIDES["native"]

    def supports(self, policy: Policy | type[Policy]) -> bool:
        """Return whether requests may name the policy; those it does not support are not offered."""
        return policy.needs() <= self.provides

    def policies(self) -> list[str]:
        """Return the names of the policies that it supports, as users write them."""
        return [policy.syntax for policy in POLICIES if self.supports(policy)]

    def presses(self) -> list[str]:
        """Return the names of the presses that can compress chunks of its model, as users write them."""
        return []

    @abstractmethod
    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request. Raise a BadRequest at once when the request is known to fail without computing
        anything."""

    @abstractmethod
    def compile(
        self, chunk: Chunk, wrapping: Wrapping = BARE, exists: Callable[[], object] | None = None
    ) -> Future[int]:
        """Compile a chunk and store it. The result of the future is the chunk's token count, or an error: one that is
        no MPICError is for the log, and not for users.

        Args:
            exists: raises if what the chunk belongs to was deleted. It is called, and what it raises is raised, when
                the engine would notice a later deletion, which then ends the compiling.
        """

    def prefetch(self, chunk: Chunk, wrapping: Wrapping = BARE) -> None:  # noqa: B027 - a hint may be ignored
        """Hint that a chunk may be linked soon: its stored KV may be brought to the device. Never waits, and never
        raises for a chunk that is not stored."""

    @abstractmethod
    def forget(self, *chunks: Chunk) -> None:
        """Drop deleted chunks, together with everything linked with them in the linked prefix namespace. All of them
        are invisible to new requests at once, and each is freed when no running request links it. Of none it does
        nothing."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counters and gauges: queue length, running, pages by state, tokens, hits over requests, evictions."""

    def ready(self) -> None:
        """Raise EngineStopped, or another Unavailable, when no request would be answered."""
        return

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant that can be verified while idle. Raise IntegrityError."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine: finish the running step, fail waiting requests with EngineStopped, and write unsaved
        chunks."""
