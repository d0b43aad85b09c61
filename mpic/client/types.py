"""What the server answers, typed. Frozen; fields this version does not know are kept as attributes.

OpenAI's fields have OpenAI's names and meaning. ``model_dump()`` gives the dictionary back.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base: frozen, unknown fields kept."""

    model_config = ConfigDict(frozen=True, extra="allow")


# ---- files, caches, references


class File(Answer):
    """An uploaded image or document.

    ``kind`` is image or text; ``state`` compiling, ready or failed (``status`` is OpenAI's); ``tokens`` the length of
    the compiled chunk, once it is known; ``tiers`` where its compiled KV is below the device.
    """

    id: str
    filename: str
    bytes: int
    created_at: int
    kind: str
    state: str
    purpose: str = "user_data"
    status: str = "uploaded"
    status_details: str | None = None
    expires_at: int | None = None
    handle: str | None = None
    tokens: int | None = None
    tiers: tuple[str, ...] = ()

    @property
    def mention(self) -> str | None:
        """How a prompt names it: ``IMAGE#NAME`` or ``FILE#NAME``; None without a handle."""
        return f"{'IMAGE' if self.kind == 'image' else 'FILE'}#{self.handle}" if self.handle else None


class CacheChunk(Answer):
    """One cached text, ``[start, end)`` of the characters it was cut from."""

    id: str
    name: str
    start: int
    end: int
    bytes: int
    created_at: int
    state: str
    expires_at: int | None = None
    tokens: int | None = None
    error: str | None = None
    tiers: tuple[str, ...] = ()


class Cache(Answer):
    """What was cached together: link all of it by ``id``, or its chunks one by one, in any order."""

    id: str
    name: str
    bytes: int
    created_at: int
    state: str
    chunks: tuple[CacheChunk, ...]
    split: dict[str, Any] | None = None
    expires_at: int | None = None
    tokens: int | None = None


class Reference(Answer):
    """One version of a reference of the dynamic library."""

    id: str
    version: int
    kind: str
    title: str
    bytes: int
    created_at: int
    updated_at: int
    state: str
    description: str = ""
    filename: str = ""
    metadata: dict[str, Any] = {}
    sha256: str = ""
    tokens: int | None = None
    error: str | None = None
    thumbnail: str | None = None


class ReferenceHit(Reference):
    """A reference that was found, and how similar it is (1: the same direction)."""

    score: float


class ReferenceIndex(Answer):
    """The vectors of the references: how many there are, which embedder made them, what is still to do.
    ``failed``: ``id``, ``code`` and ``message`` of references that cannot be embedded."""

    embedder: dict[str, Any]
    references: int
    vectors: int
    missing: int
    reindexing: bool
    mismatch: tuple[str, ...] = ()
    index: str = ""
    problem: str | None = None
    failed: tuple[dict[str, str], ...] = ()


class Deleted(Answer):
    id: str
    deleted: bool


# ---- chat


class TokenCounts(Answer):
    """``prompt_tokens = reused + prefix_hit + computed``; ``computed`` counts ``recomputed`` too."""

    reused: int = 0
    recomputed: int = 0
    prefix_hit: int = 0
    computed: int = 0
    compiled: int = 0


class Milliseconds(Answer):
    """``queue``, ``load`` and ``link`` are parts of ``ttft``, the time to the first token."""

    queue: float = 0.0
    load: float = 0.0
    link: float = 0.0
    ttft: float = 0.0
    total: float = 0.0


class ChunkUsed(Answer):
    """What happened to one linked chunk, in prompt order; ``reason`` says why not all of it was reused."""

    key: str
    tokens: int
    reused: int
    recomputed: int
    tier: str
    label: str | None = None
    reason: str | None = None
    ms: float = 0.0


class RetrievalRound(Answer):
    """One search of the references made for an answer; ``references`` are the ids the model was given."""

    query: str
    references: tuple[str, ...] = ()
    error: str | None = None


class TraceSpan(Answer):
    """Tokens ``[start, end)`` of the prompt and where they came from.

    ``state`` is new, prefix, recomputed, device, host, disk or compiled; ``kind`` text, image or document.
    """

    start: int
    end: int
    state: str
    kind: str
    label: str | None = None
    file_id: str | None = None


class TraceTimes(Answer):
    queue_ms: float = 0.0
    load_ms: float = 0.0
    link_ms: float = 0.0
    first_token_ms: float = 0.0


class Trace(Answer):
    """Spans that tile ``[0, tokens)`` in prompt order."""

    tokens: int
    spans: tuple[TraceSpan, ...]
    times: TraceTimes


class MPICUsage(Answer):
    policy: str
    tokens: TokenCounts
    ms: Milliseconds
    preemptions: int = 0
    chunks: tuple[ChunkUsed, ...] = ()
    retrieval: tuple[RetrievalRound, ...] | None = None
    trace: Trace | None = None


class PromptTokensDetails(Answer):
    cached_tokens: int = 0


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    mpic: MPICUsage
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class Message(Answer):
    """``tool_calls`` and ``annotations`` (references that were used) are as OpenAI's."""

    role: str
    content: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    annotations: tuple[dict[str, Any], ...] | None = None


class Choice(Answer):
    index: int
    message: Message
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class ChatCompletion(Answer):
    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first answer."""
        return self.choices[0].message.content or ""


class Delta(Answer):
    """``annotations`` come as soon as references have been found, before the model reads them."""

    role: str | None = None
    content: str | None = None
    annotations: tuple[dict[str, Any], ...] | None = None


class ChunkChoice(Answer):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class ChatCompletionChunk(Answer):
    """One piece of a streamed answer."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """What it adds to the first answer; may be empty."""
        return "".join(c.delta.content or "" for c in self.choices if c.index == 0)


# ---- the rest


class Model(Answer):
    id: str
    created: int
    context_length: int
    modalities: tuple[str, ...]
    owned_by: str = "mpic"


class Health(Answer):
    """Whether it answers, what runs, and the policies on offer. ``ready`` False is an answer too.

    ``engine`` has the engine's counters where the key is an admin's or none is needed, and is empty for others. When
    the engine is not ready it has ``error``.
    """

    status: str
    live: bool
    ready: bool
    version: str
    model: dict[str, Any]
    engine: dict[str, Any] = {}
    policy: str
    policies: tuple[str, ...]
