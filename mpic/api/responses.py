"""Requests and answers of OpenAI's ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PrivateAttr, StrictBool, StrictInt, Tag

from mpic.api.base import ClosedObject, Deleted, one_of
from mpic.api.completion import MPICUsage, TokenLogprob
from mpic.api.openai_fields import (
    ONE_TIER,
    CacheOptions,
    Detail,
    Name,
    Names,
    Retention,
    Tier,
    Verbosity,
)
from mpic.api.requests import FIRST_ERROR, Answered, Effort, MPICOptions, Penalty, Strict, only

THINKS = "a model thinks as its chat template says"
Nothing = Annotated[list[Any], Field(max_length=0)]


class InputText(Answered):
    """Text. In messages of users `IMAGE#NAME` and `FILE#NAME` in it link uploads in place."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description="of an earlier answer; ignored")
    logprobs: list[Any] | None = Field(None, description="of an earlier answer; ignored")


class InputRefusal(Answered):
    type: Literal["refusal"]
    refusal: str


class InputImage(Answered):
    """An image by one of `image_url` and `file_id`."""

    type: Literal["input_image"]
    image_url: str | None = Field(None, description="a data URL, or the id of an upload")
    file_id: str | None = None
    detail: Detail | None = Field(
        None, description="changes nothing: images are read at the model's own resolution"
    )


class InputFile(Answered):
    """A file by one of `file_id` and `file_data`."""

    type: Literal["input_file"]
    file_id: str | None = None
    file_data: str | None = Field(None, description="a data URL")
    filename: str | None = None
    file_url: Annotated[None, only("files are not fetched: upload it to /v1/files")] = None
    detail: Literal["auto", "low", "high"] | None = Field(None, description="changes nothing")


Content = Annotated[
    list[Annotated[InputText | InputRefusal | InputImage | InputFile, Field(discriminator="type")]],
    FIRST_ERROR,
]


class Item(Answered):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Content
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="ignored")


class CallItem(Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON of an object")


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Content
    name: str | None = Field(None, description="ignored")


class ReasoningItem(Item):
    """Thoughts of an earlier answer, which the model does not see again."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class ItemReference(Answered):
    """An item of an earlier answer that is still kept."""

    type: Literal["item_reference"]
    id: str


def _kind(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind is not None else "message"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    """A function that the client runs."""

    type: Annotated[Literal["function"], only("tools run at the client")]
    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema; shown to the model, not enforced"
    )
    strict: StrictBool | None = None
    defer_loading: Annotated[Literal[False] | None, only("all tools are shown")] = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(
        None,
        description="changes nothing: say it in the prompt (`usage.mpic.ignored` names it unless it is medium)",
    )


class ReasoningOptions(Strict):
    effort: Effort | None = Field(None, description="for a chat template that reads `reasoning_effort`")
    summary: Annotated[None, only(THINKS)] = None
    generate_summary: Annotated[None, only(THINKS)] = None


class EventOptions(Strict):
    include_obfuscation: Annotated[Literal[False] | None, only("streams are not padded")] = None


Included = Annotated[
    Literal[
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
    ],
    only("answers hold nothing of the kind"),
]


class ResponsesRequest(Strict):
    """A conversation in the form of OpenAI's responses. Without `temperature` answers are greedy."""

    input: str | Annotated[list[AnyItem], FIRST_ERROR] | None = None
    model: str | None = Field(None, description="the served model's name; may be left out")
    instructions: str | None = Field(None, description="a system message in front of everything")
    previous_response_id: str | None = Field(
        None, description="goes on from this response, if it is still kept"
    )
    store: StrictBool | None = Field(None, description="false: the response is not kept")
    stream: StrictBool | None = None
    stream_options: EventOptions | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: an answer ends after its first call"
    )
    max_tool_calls: StrictInt | None = Field(
        None, description="accepted without effect: the server runs no tools itself"
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Included], FIRST_ERROR] | None = None
    metadata: Names | None = Field(None, description="is given back")
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Annotated[Tier | None, only(ONE_TIER)] = None
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="changes nothing: a conversation that does not fit is refused"
    )
    background: Annotated[Literal[False] | None, only("answers are waited for")] = None
    top_logprobs: StrictInt | None = Field(
        None,
        ge=0,
        le=20,
        description="alternatives to report beside each token; above 0, these are included without `include`",
    )
    context_management: Annotated[Nothing | None, only("nothing is left out of a conversation")] = None
    conversation: Annotated[None, only("use previous_response_id")] = None
    moderation: Annotated[None, only("nothing is moderated")] = None
    prompt: Annotated[None, only("prompts are not kept here")] = None
    prompt_cache_options: Annotated[CacheOptions | None, only("chunks are found by their content")] = None
    prompt_cache_retention: Annotated[Retention | None, only("chunks are kept as long as there is room")] = (
        None
    )
    mpic: MPICOptions = MPICOptions()
    _asked: Any = PrivateAttr(None)


# ---- answers


class InputTokens(ClosedObject):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputTokensDetails(ClosedObject):
    cached_tokens: int = Field(description="not computed for this request")
    cache_write_tokens: int = Field(
        description="of images and documents that this request had to compile, and that are kept"
    )


class OutputTokensDetails(ClosedObject):
    reasoning_tokens: int


class ResponseUsage(ClosedObject):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    mpic: MPICUsage


class OutputText(ClosedObject):
    type: Literal["output_text"]
    text: str
    annotations: tuple[()]
    logprobs: tuple[TokenLogprob, ...]


class OutputMessage(ClosedObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Annotated[str, one_of("completed", "incomplete")]
    content: tuple[OutputText, ...]


class OutputCall(ClosedObject):
    id: str
    type: Literal["function_call"]
    status: Annotated[str, one_of("completed", "incomplete")]
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(ClosedObject):
    reason: Annotated[str, one_of("max_output_tokens")]


class ResponseObject(ClosedObject):
    """A response. Fields of the request are given back."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Annotated[str, one_of("completed", "incomplete", "in_progress", "failed")]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: tuple[OutputMessage | OutputCall, ...]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    store: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    top_logprobs: int | None
    tools: tuple[dict[str, Any], ...]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, str | None]
    truncation: Literal["disabled"]
    background: Literal[False]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class ResponseDeleted(Deleted):
    object: Literal["response"] = "response"
