"""Chat completions as the server answers them, whole and streamed. OpenAI's fields keep OpenAI's names and meaning."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from mpic.api.base import CLOSED, ClosedObject, one_of

FinishReason = Annotated[str, one_of("stop", "length", "tool_calls")]

Origin = Annotated[str, one_of("new", "prefix", "recomputed", "device", "host", "disk", "remote", "compiled")]

# ---- dictionaries inside messages: clients send them back as they came


@with_config(CLOSED)
class TopLogprob(TypedDict):
    token: Annotated[str, Field(description="as text; U+FFFD where the token is part of a character")]
    logprob: float
    bytes: Annotated[
        list[int] | None,
        Field(description="the token's bytes; joined over all tokens they are the text; null: not known"),
    ]


@with_config(CLOSED)
class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


@with_config(CLOSED)
class Logprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: NotRequired[None]


@with_config(CLOSED)
class Citation(TypedDict):
    """A reference of the library that the model was given."""

    reference_id: str
    version: int
    title: str
    kind: Annotated[str, one_of("image", "text")]
    score: Annotated[float, Field(description="similarity to the query, -1 to 1")]
    words: NotRequired[
        Annotated[float | None, Field(description="BM25 of the query's words in it; null: not found by them")]
    ]
    found_by: NotRequired[
        Annotated[list[str], Field(description="lists that it was in, fused by rank: `vector`, `words`")]
    ]
    thumbnail: Annotated[str | None, Field(description="path of a small picture, for images")]
    query: str


@with_config(CLOSED)
class Annotation(TypedDict):
    type: NotRequired[
        Annotated[Literal["reference_citation"], Field(json_schema_extra={"default": "reference_citation"})]
    ]
    reference_citation: Citation


@with_config(CLOSED)
class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it: check it before use")]


@with_config(CLOSED)
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@with_config(CLOSED)
class ToolCallDelta(ToolCall):
    """A whole call: calls are sent when they are complete."""

    index: int


# ---- usage


class PromptTokensDetails(ClosedObject):
    cached_tokens: int = Field(
        description="reused + prefix_hit: the tokens that were not computed for this request"
    )


class TokenCounts(ClosedObject):
    """`prompt_tokens = reused + prefix_hit + computed`."""

    reused: int = Field(
        description="tokens of images and documents linked without recomputation, from what was compiled before this "
        "request"
    )
    recomputed: int = Field(description="tokens of images and documents computed again")
    prefix_hit: int = Field(description="tokens found in the prompt's own prefix cache")
    computed: int = Field(
        description="all other tokens: computed in the prompt, recomputed ones included, or in images and documents "
        "that had to be compiled first"
    )
    packet: int = Field(
        description="tokens of `prompt_tokens` that trained adapters add around chunks (policy packet)"
    )
    compiled: int = Field(
        description="all tokens of chunks that had to be compiled first, recomputed ones included"
    )


class Milliseconds(ClosedObject):
    """Time to the first token (`ttft`), its parts (`queue`, `load`, `link`), and to the last (`total`)."""

    queue: float
    load: float
    link: float
    ttft: float
    total: float


class ChunkUsed(ClosedObject):
    """The use of one linked image or document. Chunks are listed in prompt order."""

    key: str
    label: str | None
    tokens: int
    reused: int
    recomputed: int
    tier: str = Field(
        description="where its KV came from: device, host, disk, remote, compiled; none: all recomputed"
    )
    reason: str | None = Field(
        description="why not all was reused: policy, new, recipe, evicted, expired, model_changed, corrupt, "
        "slower (than computing it), unavailable (the remote store); with vLLM also missing, mismatch, late, "
        "rows (too many ranges to link)"
    )
    ms: float
    press: str | None = Field(description="name of the press that compressed its KV, or null")
    bytes: int = Field(description="size of its KV, after compression; 0 where none was read")


class TraceSpan(ClosedObject):
    """Tokens `[start, end)` of the prompt that came from the same place."""

    start: int
    end: int
    state: Origin = Field(
        description="new: your text, computed; prefix: found in the prefix cache; recomputed: of an image or document, "
        "computed again; else reused, from where: device, host, disk, remote, or compiled in this request"
    )
    kind: Annotated[str, one_of("text", "image", "video", "document")]
    label: str | None
    file_id: str | None


class TraceTimes(ClosedObject):
    """`first_token_ms` is the time from arrival to the first token; queue, load and link are its parts."""

    queue_ms: float
    load_ms: float
    link_ms: float
    first_token_ms: float


class Trace(ClosedObject):
    """The source of every token of the prompt: the spans tile `[0, tokens)` in prompt order."""

    tokens: int
    spans: tuple[TraceSpan, ...]
    times: TraceTimes


class RetrievalRound(ClosedObject):
    """A search of the reference library."""

    query: str
    references: tuple[str, ...] = Field(description="ids of the references the model was given, best first")
    at: int = Field(description="tokens of the answer before the search; 0 before the answer")
    tokens: int = Field(description="tokens inserted into the answer's context (part of the prompt tokens)")
    reused: int = Field(description="inserted tokens that were linked from what was compiled before")
    search_ms: float
    link_ms: float = Field(description="time from the references to the next token")
    error: str | None = Field(
        description="why nothing was given: nothing_found, rounds, bad_call, or an error's code"
    )
    trigger: str = Field("", description="what asked: always (every request), call, prompted, confidence")


class UnlinkedHandle(ClosedObject):
    """A handle in a message that named no file, and stayed text."""

    handle: str
    reason: str


class MPICUsage(ClosedObject):
    policy: str
    tokens: TokenCounts
    ms: Milliseconds
    preemptions: int
    chunks: tuple[ChunkUsed, ...]
    unlinked_handles: tuple[UnlinkedHandle, ...] | None = Field(
        None, description="handles in the messages that named no file, and stayed text; 32 at most"
    )
    ignored: tuple[str, ...] | None = Field(
        None, description="fields of the request that were taken and had no effect, such as `store`"
    )
    retrieval: tuple[RetrievalRound, ...] | None = Field(
        None, description="with `mpic.retrieval`: the searches made"
    )
    trace: Trace | None = Field(None, description="with `mpic.trace`: the source of every token")


class Usage(ClosedObject):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    mpic: MPICUsage


# ---- answers


class AnswerMessage(ClosedObject):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    annotations: tuple[Annotation, ...] | None = None


class Choice(ClosedObject):
    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: Logprobs | None


class ChatCompletion(ClosedObject):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].message.content or ""


class ChunkDelta(ClosedObject):
    """``annotations`` come as soon as references have been found, before the model reads them."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None
    annotations: tuple[Annotation, ...] | None = None


class ChunkChoice(ClosedObject):
    index: int
    delta: ChunkDelta
    finish_reason: FinishReason | None
    logprobs: Logprobs | None


class ChatCompletionChunk(ClosedObject):
    """An event of a stream. With `stream_options.include_usage` the last one has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The text it adds to the first answer; may be empty."""
        return "".join(c.delta.content or "" for c in self.choices if c.index == 0)
