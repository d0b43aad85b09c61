"""The shapes of responses. OpenAI's fields keep OpenAI's names and meaning; ours are said to be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Exact(BaseModel):
    """Nothing more and nothing less than what is written here."""

    model_config = ConfigDict(extra="forbid")


# ---- chat


class TopLogprob(Exact):
    token: str = Field(description="as text; U+FFFD where it is part of a character")
    logprob: float
    bytes: list[int] | None = Field(
        description="joined, those of a text's tokens are the text; null: not known"
    )


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(Exact):
    content: list[TokenLogprob]
    refusal: None = None


class Citation(Exact):
    """A reference of the library that the model was given."""

    reference_id: str
    version: int
    title: str
    kind: Literal["image", "text"]
    score: float = Field(description="similarity to what was searched for, -1 to 1")
    thumbnail: str | None = Field(description="path of a small picture, for images")
    query: str


class Annotation(Exact):
    type: Literal["reference_citation"] = "reference_citation"
    reference_citation: Citation


class CalledFunction(Exact):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it: check it before use")


class ToolCall(Exact):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Exact):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    annotations: list[Annotation] | None = None


class Choice(Exact):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: Logprobs | None


class PromptTokensDetails(Exact):
    cached_tokens: int = Field(description="reused + prefix_hit: what was not computed for this answer")


class TokenCounts(Exact):
    """`prompt_tokens = reused + prefix_hit + computed`."""

    reused: int = Field(description="tokens of images and documents linked without recomputation")
    recomputed: int = Field(description="tokens of images and documents computed again")
    prefix_hit: int = Field(description="tokens found in the prompt's own prefix cache")
    computed: int = Field(description="tokens computed, recomputed ones included")
    compiled: int = Field(description="tokens of chunks that had to be compiled first; they come on top")


class Milliseconds(Exact):
    """Time to the first token (`ttft`), its parts (`queue`, `load`, `link`), and to the last (`total`)."""

    queue: float
    load: float
    link: float
    ttft: float
    total: float


class ChunkUsed(Exact):
    """What happened to one linked image or document, in prompt order."""

    key: str
    label: str | None
    tokens: int
    reused: int
    recomputed: int
    tier: str = Field(
        description="where its KV came from: device, host, disk, a remote tier's name, compiled; none: all recomputed"
    )
    reason: str | None = Field(
        description="why not all was reused: policy, new, recipe, evicted, expired, model_changed, corrupt"
    )
    ms: float


class TraceSpan(Exact):
    """Tokens `[start, end)` of the prompt that came from the same place."""

    start: int
    end: int
    state: Literal["new", "prefix", "recomputed", "device", "host", "disk", "compiled"] = Field(
        description="new: your text, computed; prefix: found in the prefix cache; recomputed: of an image or document, "
        "computed again; else reused, from where: device, host, disk, or compiled in this request"
    )
    kind: Literal["text", "image", "document"]
    label: str | None
    file_id: str | None


class TraceTimes(Exact):
    """`first_token_ms` is from arrival to the first token: queue, load and link are its parts."""

    queue_ms: float
    load_ms: float
    link_ms: float
    first_token_ms: float


class Trace(Exact):
    """Where every token of the prompt came from: the spans tile `[0, tokens)` in prompt order."""

    tokens: int
    spans: list[TraceSpan]
    times: TraceTimes


class RetrievalRound(Exact):
    """One search of the reference library."""

    query: str
    references: list[str] = Field(description="ids of what the model was given, best first")
    at: int = Field(description="tokens of the answer before the search; 0 before the answer")
    tokens: int = Field(description="inserted into the answer's context (part of the prompt tokens)")
    reused: int = Field(description="of those, linked without computing them")
    search_ms: float
    link_ms: float = Field(description="from the references to the next token")
    error: str | None = Field(
        description="why nothing was given: nothing_found, rounds, bad_call, or an error's code"
    )


class MPICUsage(Exact):
    policy: str
    tokens: TokenCounts
    ms: Milliseconds
    preemptions: int
    chunks: list[ChunkUsed]
    retrieval: list[RetrievalRound] | None = Field(None, description="with `mpic.retrieval`: its searches")
    trace: Trace | None = Field(None, description="with `mpic.trace`: where every token came from")


class Usage(Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    mpic: MPICUsage


class ChatCompletion(Exact):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ToolCallDelta(ToolCall):
    """A whole call: calls are sent when they are complete."""

    index: int


class ChunkDelta(Exact):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    annotations: list[Annotation] | None = None


class ChunkChoice(Exact):
    index: int
    delta: ChunkDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: Logprobs | None


class ChatCompletionChunk(Exact):
    """One frame of a stream. With `stream_options.include_usage` the last frame has no choices, but the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


# ---- files


class FileObject(BaseModel):
    """An uploaded image or document. `status` is OpenAI's, `state` is ours."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None = None
    handle: str | None = Field(None, description="NAME in `IMAGE#NAME` or `FILE#NAME`")
    kind: Literal["image", "text"]
    tokens: int | None = Field(None, description="length of the compiled chunk, once it is compiled")
    state: Literal["compiling", "ready", "failed"]
    tiers: list[str] = Field(default_factory=list, description="where compiled KV of this file is now")


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


# ---- references


class ReferenceObject(BaseModel):
    """An image or text of the reference library, its newest version."""

    id: str
    object: Literal["reference"] = "reference"
    version: int
    kind: Literal["image", "text"]
    title: str
    description: str
    metadata: dict[str, str | int | float | bool]
    filename: str
    bytes: int
    sha256: str = Field(description="of the original's bytes")
    created_at: int
    updated_at: int
    tokens: int | None = Field(None, description="length of the compiled chunk, once it is compiled")
    state: Literal["compiling", "ready", "failed"]
    error: str | None = None
    thumbnail: str | None = Field(None, description="path of a small picture, for images")


class ReferenceFound(ReferenceObject):
    score: float = Field(description="similarity to what was searched for, -1 to 1")


class ReferenceList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ReferenceObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ReferencesFound(BaseModel):
    object: Literal["list"] = "list"
    data: list[ReferenceFound]


class ReferenceDeleted(BaseModel):
    id: str
    object: Literal["reference"] = "reference"
    deleted: bool = True


class IndexFailure(BaseModel):
    """A reference that no search finds: it cannot be read or embedded."""

    id: str
    code: str
    message: str


class IndexState(BaseModel):
    """The vectors of the reference library."""

    object: Literal["reference_index"] = "reference_index"
    embedder: dict[str, str | int]
    references: int
    vectors: int
    missing: int = Field(description="references without a vector of this embedder")
    reindexing: bool
    mismatch: list[str] = Field(description="other embedders that made the vectors: reindex")
    index: str = Field(description="`file`, or why it was rebuilt")
    problem: str | None = Field(description="why the last batch was not embedded at all")
    failed: list[IndexFailure] = Field(description="references that cannot be embedded, the newest 100")


# ---- caches


class CacheChunkObject(BaseModel):
    """One cached text. Link it by `id`: `{"type": "cache", "cache_id": id}`."""

    id: str
    object: Literal["cache.chunk"] = "cache.chunk"
    name: str
    start: int = Field(description="first of its characters in the text it was cut from")
    end: int = Field(description="the one after its last")
    bytes: int
    created_at: int
    expires_at: int | None = None
    tokens: int | None = Field(None, description="once it is compiled")
    state: Literal["compiling", "ready", "failed"]
    error: str | None = Field(None, description="why it failed")
    tiers: list[str] = Field(default_factory=list, description="where its compiled KV is now")


class CacheObject(BaseModel):
    """What was cached together. Link all of it by `id`, or its chunks one by one in any order."""

    id: str
    object: Literal["cache"] = "cache"
    name: str
    split: dict[str, Any] | None = Field(None, description="how the text was cut")
    bytes: int
    created_at: int
    expires_at: int | None = None
    tokens: int | None = None
    state: Literal["compiling", "ready", "failed"]
    chunks: list[CacheChunkObject]


class CacheList(BaseModel):
    object: Literal["list"] = "list"
    data: list[CacheObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CacheDeleted(BaseModel):
    id: str
    object: Literal["cache"] = "cache"
    deleted: bool = True


# ---- the rest


class ModelObject(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mpic"
    context_length: int
    modalities: list[str]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str
    details: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    """Every error looks like this."""

    error: ErrorDetail
