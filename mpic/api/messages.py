"""Requests and answers of Anthropic's ``/v1/messages``, and of ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, StrictBool, StrictInt

from mpic.api.base import ClosedObject, one_of
from mpic.api.completion import MPICUsage
from mpic.api.openai_fields import Name
from mpic.api.requests import FIRST_ERROR, Answered, CacheControl, Effort, MPICOptions, Strict, only
from mpic.api.resources import ErrorDetail

UNCUT = "what is sent is read as it is"
ONE = "there is one way to answer"
Nothing = Annotated[list[Any], Field(max_length=0)]


class PartBlock(Answered):
    cache_control: CacheControl | None = None


class TextBlock(PartBlock):
    """Text. In turns of users `IMAGE#NAME` and `FILE#NAME` in it link uploads in place."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, description="of an earlier answer; ignored")


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern="^[a-z]+/[a-z0-9.+-]+$", max_length=128)]
    data: str


class ImageSource(Base64Source):
    media_type: Annotated[str, Field(pattern="^image/[a-z0-9.+-]+$", max_length=128)]


class UrlSource(Strict):
    type: Literal["url"]
    url: str = Field(description="a data URL: nothing is fetched")


class FileSource(Strict):
    type: Literal["file"]
    file_id: str = Field(description="of an upload (`POST /v1/files`)")


class TextSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ImageBlock(PartBlock):
    type: Literal["image"]
    source: Annotated[ImageSource | UrlSource | FileSource, Field(discriminator="type")]
    transformations: Annotated[dict[str, Literal["downsize"]] | None, only(UNCUT)] = None


class ContentSource(Strict):
    type: Literal["content"]
    content: (
        str | Annotated[list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], FIRST_ERROR]
    )


class Citations(Strict):
    enabled: Annotated[Literal[False] | None, only("answers do not cite passages")] = None


class AttachedBlock(PartBlock):
    """A document: its own chunk, compiled on first use and found again by its content."""

    type: Literal["document"]
    source: Annotated[
        Base64Source | TextSource | ContentSource | UrlSource | FileSource, Field(discriminator="type")
    ]
    title: str | None = Field(None, description="its label in this conversation")
    context: str | None = Field(None, description="text in front of it")
    citations: Citations | None = None


class SearchResultBlock(PartBlock):
    """A document of several texts."""

    type: Literal["search_result"]
    content: Annotated[list[TextBlock], FIRST_ERROR]
    source: str
    title: str
    citations: Citations | None = None


class ThinkingBlock(Answered):
    """Thoughts of an earlier answer, which the model does not see again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class ToolUseBlock(PartBlock):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="ignored")


ResultPart = Annotated[
    TextBlock | ImageBlock | AttachedBlock | SearchResultBlock, Field(discriminator="type")
]


class ToolResultBlock(PartBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultPart], FIRST_ERROR] | None = None
    is_error: StrictBool | None = Field(None, description="true puts `Error:` in front of the result")


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | AttachedBlock
    | SearchResultBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]


class MessageTurn(Strict):
    """Turns of one role that follow one another are one message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], FIRST_ERROR]


class CustomTool(Strict):
    """A function that the client runs."""

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    input_schema: dict[str, Any] = Field(description="JSON Schema; shown to the model, not enforced")
    type: Annotated[Literal["custom"] | None, only("tools run at the client")] = None
    description: str | None = None
    cache_control: CacheControl | None = None
    strict: StrictBool | None = None
    eager_input_streaming: StrictBool | None = Field(
        None, description="calls are sent when they are complete"
    )
    input_examples: Annotated[
        list[Any] | None, Field(max_length=0), only("write them into the description")
    ] = None
    defer_loading: Annotated[Literal[False] | None, only("all tools are shown")] = None
    allowed_callers: (
        Annotated[list[Annotated[Literal["direct"], only("the model calls all tools itself")]], FIRST_ERROR]
        | None
    ) = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: JsonFormat | None = None
    effort: Effort | None = Field(None, description="for a chat template that reads `reasoning_effort`")


class Thinking(Strict):
    type: Annotated[Literal["disabled", "adaptive"], only("a model thinks as its chat template says")]
    display: Literal["summarized", "omitted"] | None = Field(None, description="thoughts are not shown")


class ThreadCreate(Strict):
    """The conversation is kept, with its system prompt and tools."""

    type: Literal["create"]


class ThreadContinue(Strict):
    """Goes on from an answer that is kept; system prompt and tools are those of the thread."""

    type: Literal["continue"]
    previous_message_id: str


class Requester(Strict):
    user_id: Name | None = None


class CountRequest(Strict):
    """A conversation in Anthropic's form."""

    messages: Annotated[list[MessageTurn], FIRST_ERROR]
    model: str | None = Field(None, description="the served model's name; may be left out")
    system: str | Annotated[list[TextBlock], FIRST_ERROR] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    speed: Annotated[Literal["standard"] | None, only(ONE)] = None
    mcp_servers: Annotated[Nothing | None, only("tools run at the client")] = None
    mpic: MPICOptions = MPICOptions()
    _asked: Any = PrivateAttr(None)


class MessagesRequest(CountRequest):
    """A conversation in Anthropic's form to answer. Without `temperature` answers are greedy."""

    max_tokens: StrictInt = Field(ge=1)
    stream: StrictBool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=0, le=2**31 - 1)
    stop_sequences: list[str] | None = None
    metadata: Requester | None = None
    thread: Annotated[ThreadCreate | ThreadContinue, Field(discriminator="type")] | None = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, only("there is one tier")] = None
    container: Annotated[None, only("tools run at the client")] = None
    diagnostics: Annotated[None, only("usage.mpic says what was reused")] = None
    inference_geo: Annotated[None, only("it is computed here")] = None


# ---- answers


class MessagesUsage(ClosedObject):
    """The prompt has `input_tokens`, `cache_read_input_tokens` and `cache_creation_input_tokens` together."""

    input_tokens: int = Field(description="computed, and not kept as part of an image or document")
    output_tokens: int
    cache_read_input_tokens: int = Field(description="not computed for this request")
    cache_creation_input_tokens: int = Field(
        description="of images and documents that this request had to compile, and that are kept"
    )
    mpic: MPICUsage


class AnswerText(ClosedObject):
    type: Literal["text"]
    text: str


class AnswerToolUse(ClosedObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnswerTurn(ClosedObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: tuple[AnswerText | AnswerToolUse, ...]
    stop_reason: Annotated[str, one_of("end_turn", "max_tokens", "stop_sequence", "tool_use")] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ClosedObject):
    input_tokens: int


class MessagesError(ClosedObject):
    type: Literal["error"]
    error: ErrorDetail
