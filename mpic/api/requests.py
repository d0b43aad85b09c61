"""Bodies of requests. OpenAI's fields keep OpenAI's names and meaning; our own are in ``mpic``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mpic.api.openai_fields import annotation, of_the_request

FIRST_ERROR = Field(fail_fast=True)
"""Reports only the first error of a list, because a list of thousands could have thousands."""


class WrongField(ValueError):
    """A validator of several fields found one of them wrong.

    Args:
        field: path of that field, from the object that was validated.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Strict(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


def only(why: str) -> WrapValidator:
    """Annotate a field whose type has the values that change nothing: all others are refused as not supported, for
    this reason."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("unsupported", "{why}", {"why": why}) from None

    return WrapValidator(check)


# ---- chat: request


class CacheControl(Strict):
    """Marks a text that is worth reusing: it is a chunk even if it is not long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextPart(Strict):
    """Text. In messages of users `IMAGE#NAME` and `FILE#NAME` in it link uploads in place; `IMAGE\\#NAME` is text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class RefusalPart(Strict):
    """Text with which an earlier answer declined; only assistant messages may contain it."""

    type: Literal["refusal"]
    refusal: str


class ImageURL(Strict):
    url: str = Field(description="a data URL, or the id of an uploaded image (`file-...`)")
    detail: annotation("detail") = None  # ty: ignore[invalid-type-form] (made from OpenAI's schema)


LABEL = Field(None, description="label in this conversation")


class ImageURLPart(Strict):
    type: Literal["image_url"]
    image_url: ImageURL
    name: str | None = LABEL


class VideoURL(Strict):
    url: str = Field(
        description="a data URL (a video, or an animated GIF, WebP or PNG), or the id of an uploaded clip"
    )


class VideoURLPart(Strict):
    """A clip, in the form that vLLM takes it: one chunk, for models that take videos. They sample its frames."""

    type: Literal["video_url"]
    video_url: VideoURL
    name: str | None = LABEL


class ImagePart(Strict):
    """An image by one of `image` (a data URL or file id), `file_id` and `handle`."""

    type: Literal["image"]
    image: str | None = None
    file_id: str | None = None
    handle: str | None = None
    name: str | None = LABEL


class FileRef(Strict):
    """A file: an upload, or the file itself, by one of `file_id` and `file_data`."""

    file_id: str | None = None
    file_data: str | None = Field(None, description="a data URL: a document, a text, an image or a clip")
    filename: str | None = Field(None, description="label of `file_data` in this conversation")


class FilePart(Strict):
    """A document (or image, or clip) by one of `file`, `file_id` and `handle`. `[3-5]` behind an id or a handle names
    pages."""

    type: Literal["file"]
    file: FileRef | None = None
    file_id: str | None = None
    handle: str | None = None
    name: str | None = LABEL


class DocumentPart(Strict):
    """A document inside the request: its own chunk, compiled on first use and found again by its content."""

    type: Literal["document"]
    text: str
    name: str | None = LABEL


class CachePart(Strict):
    """A cached text: one chunk (`cache-...`), or a whole cache in order (`group-...`)."""

    type: Literal["cache"]
    cache_id: str
    name: str | None = LABEL


Part = Annotated[
    TextPart | ImageURLPart | VideoURLPart | ImagePart | FilePart | DocumentPart | CachePart | RefusalPart,
    Field(discriminator="type"),
]


class Answered(Strict):
    """A part of an earlier answer. Clients send it back with fields of their own that are null."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):  # in place: errors find the field by the identity of what holds it
            for name in [name for name, inner in value.items() if inner is None]:
                del value[name]
        return value


class CalledFunctionParam(Answered):
    name: str
    arguments: str = Field("", description="JSON of an object, as the model wrote it; empty or `null`: `{}`")
    parsed_arguments: Any = Field(None, description="what a client made of `arguments`; ignored")


class ToolCallParam(Answered):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunctionParam
    index: StrictInt | None = Field(None, description="its number in the stream it came in; ignored")


Parts = Annotated[list[Part], FIRST_ERROR]
ToolCallParams = Annotated[list[ToolCallParam], FIRST_ERROR]
Annotations = Annotated[list[dict[str, Any]], FIRST_ERROR]


class MessageParam(Answered):
    """A message. Earlier answers may be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = Field(
        None, description="only an assistant's message may be without; an empty system message is left out"
    )
    name: str | None = Field(
        None, description="who speaks; shown to the model if its chat template prints it"
    )
    tool_calls: ToolCallParams | None = Field(None, description="only in assistant messages")
    tool_call_id: str | None = Field(None, description="only in tool messages")
    refusal: str | None = Field(
        None, description="stands for content that is missing; ignored beside content"
    )
    reasoning_content: str | None = Field(
        None, description="thoughts of an earlier answer, for a chat template that prints them"
    )
    reasoning: str | None = Field(None, description="a newer name of reasoning_content")
    annotations: Annotations | None = Field(None, description="annotations of an earlier answer; ignored")
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> MessageParam:
        if self.tool_calls and self.role != "assistant":
            raise WrongField("tool_calls", "tool_calls belong to assistant messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise WrongField(
                "tool_call_id", "a tool_call_id is needed in tool messages, and allowed in no others"
            )
        return self


class Function(Strict):
    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of the arguments; they follow it with `strict` or a `tool_choice`"
    )
    strict: StrictBool | None = None


class Tool(Strict):
    """A function the model may call, if its chat template supports tools."""

    type: Literal["function"]
    function: Function


class ToolName(Strict):
    name: str


class NamedTool(Strict):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: ToolName


class JSONSchema(Strict):
    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$", description="shown to nobody")
    description: str | None = Field(None, description="shown to nobody: say in the prompt what to write")
    schema_: dict[str, Any] = Field({}, alias="schema", description="JSON Schema of the answer")
    strict: StrictBool | None = Field(None, description="the answer follows the schema in any case")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = Field(None, description="only with `json_schema`")

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise WrongField(
                "json_schema", "a json_schema is needed with that type, and allowed with no other"
            )
        return self


class StructuredOutputs(Strict):
    """Forms of an answer that OpenAI does not have, as vLLM names them: one of the two."""

    regex: str | None = Field(None, min_length=1, description="the whole answer matches it (Rust's syntax)")
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)] | None
    ) = Field(None, description="the answer is one of these")

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        if (self.regex is None) == (self.choice is None):
            raise WrongField("regex", "give one of regex and choice")
        return self


class StreamOptions(Strict):
    include_usage: StrictBool | None = None
    include_obfuscation: annotation("include_obfuscation") = None  # ty: ignore[invalid-type-form] (as above)


FilterValue = StrictBool | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | float | str
FilterValues = Annotated[list[FilterValue], FIRST_ERROR]
Filter = dict[str, FilterValue | FilterValues | dict[str, FilterValue]]


class RetrievalOptions(Strict):
    """Settings of the search of the reference library for an answer."""

    mode: Literal["off", "always", "auto"] = Field(
        "off",
        description="`always`: by the last user message, before the answer; `auto`: when the model asks, while it "
        "answers; what is found is linked at that place",
    )
    trigger: Literal["call", "prompted", "confidence"] | None = Field(
        None,
        description="what asks (`auto`): `call`, the model, by its search tokens or a tool; `prompted`, the model, by "
        "a line `SEARCH: words` at the start of its answer, of which the system message tells it; `confidence`, the "
        "server, with the last user message, where the first tokens are improbable. Default: `call` if the model has "
        "such tokens or tools, else `prompted`, without a chat template `confidence`",
    )
    confidence: float = Field(
        0.5,
        gt=0,
        le=1,
        description="`confidence`: search where the geometric mean of the first 4 tokens' probabilities is below",
    )
    top_k: StrictInt = Field(1, ge=1, le=16, description="maximum number of references of one search")
    min_score: float | None = Field(None, ge=-1, le=1, description="leave out less similar references")
    filter: Filter | None = Field(
        None,
        description="`id`, `kind`, `title` or metadata keys -> a value, values, or comparisons (`gt`, `gte`, `lt`, "
        "`lte`, `ne`)",
    )
    rounds: StrictInt = Field(2, ge=1, le=8, description="maximum number of searches in one answer (`auto`)")


class MPICOptions(Strict):
    """Our own options."""

    policy: str | None = Field(
        None,
        description="which chunk tokens are recomputed, e.g. `mpic-16`, `reuse`, `full`; `auto`: what a calibration of "
        "the model allows, else `prefix`",
    )
    press: str | None = Field(
        None,
        description="how images and documents are compressed for this answer, e.g. `snapkv-50` (half of their tokens "
        "leave every layer and head); `none`: not at all",
    )
    trace: StrictBool = Field(False, description="add `usage.mpic.trace`, the source of every token")
    top_k: StrictInt = Field(
        0, ge=0, le=2**31 - 1, description="sample from the k most likely tokens; 0: from all"
    )
    handles: StrictBool = Field(True, description="false: `IMAGE#NAME` and `FILE#NAME` in texts link nothing")
    ignore_eos: StrictBool = Field(False, description="continue to max_tokens (benchmarks)")
    retrieval: RetrievalOptions = RetrievalOptions()

    @field_validator("retrieval", mode="before")
    @classmethod
    def _mode_alone(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value


class ReferenceSearch(Strict):
    """A search of the reference library, by text, by image, or both."""

    query: str | None = Field(None, description="text to search for")
    image: str | None = Field(None, description="a data URL")
    top_k: StrictInt = Field(5, ge=1, le=100)
    min_score: float | None = Field(None, ge=-1, le=1)
    filter: Filter | None = None


Stops = Annotated[list[str], Field(max_length=64, fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateOptions = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        StrictBool | StrictInt | float | Annotated[str, Field(max_length=1024)],
    ],
    Field(max_length=16),
]


TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024, fail_fast=True)
]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Penalized(Strict):
    """Changes of the logits that tokens are drawn from, in OpenAI's words and in vLLM's."""

    presence_penalty: Penalty | None = Field(
        None, description="taken off the logits of tokens that the answer has already"
    )
    frequency_penalty: Penalty | None = Field(None, description="the same, for each time that it has them")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="above 1, tokens that prompt or answer have become less likely"
    )
    logit_bias: LogitBias | None = Field(None, description="id of a token -> what is added to its logit")
    min_p: float | None = Field(
        None, ge=0, le=1, description="leave out tokens less likely than this share of the most likely one"
    )


class ChatFields(Penalized):
    """The fields of a chat completion that have an effect."""

    messages: Annotated[list[MessageParam], FIRST_ERROR]
    model: str | None = Field(None, description="the served model's name; may be left out")
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = Field(None, ge=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: StrictInt | None = Field(
        None,
        ge=1,
        le=16,
        description="number of answers; more than one have a temperature of 1 if none is given",
    )
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**63 - 16)
    top_k: StrictInt | None = Field(None, ge=-1, le=2**31 - 1, description="`mpic.top_k`; -1, too, is all")
    stop: str | Stops | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: an answer ends after its first tool call"
    )
    reasoning_effort: Effort | None = Field(
        None, description="for a chat template that reads it; others take `none` alone"
    )
    chat_template_kwargs: TemplateOptions | None = Field(
        None,
        description="variables of the chat template, such as `enable_thinking`; refused if it does not read them",
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="`none`: tools are not shown; `required`, or one by its name: the answer is a call"
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    mpic: MPICOptions = MPICOptions()


AllChatFields = create_model("AllChatFields", __base__=ChatFields, **of_the_request())
"""With those that change nothing."""


class ChatRequest(AllChatFields):  # ty: ignore[unsupported-base] (made at run time, from OpenAI's schema)
    """A chat completion. Without `temperature` answers are greedy, so that policies can be compared."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "messages": [
                        {"role": "user", "content": "Compare IMAGE#EIFFEL2025 with IMAGE#LOUVRE2025."}
                    ],
                    "max_tokens": 64,
                    "mpic": {"policy": "mpic-16"},
                }
            ]
        },
    )

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "stream_options needs stream")
        if self.top_logprobs and not self.logprobs:
            raise WrongField("top_logprobs", "top_logprobs needs logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise WrongField(
                "max_tokens",
                "max_tokens and max_completion_tokens differ; max_tokens is the older name of the other",
            )
        if self.top_k is not None and self.mpic.top_k not in (0, self.top_k):
            raise WrongField("top_k", "top_k and mpic.top_k differ; they are the same")
        if "" in self.stops:
            at = "" if isinstance(self.stop, str) else f"[{self.stops.index('')}]"
            raise WrongField(f"stop{at}", "stop strings must not be empty")
        self._check_form()
        return self

    def _check_form(self) -> None:
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise WrongField("tool_choice.function.name", "must be the name of one of the tools")
        if self.tool_choice == "required" and not names:
            raise WrongField("tool_choice", "a call is required, and there are no tools")
        formed = self.response_format is not None and self.response_format.type != "text"
        if formed and self.structured_outputs is not None:
            raise WrongField(
                "structured_outputs", "the answer has one form: give no response_format beside it"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


# ---- caches


class SplitOptions(Strict):
    """Settings by which a text is cut (KVSplit). Chunks hold as many whole sentences, paragraphs or sections as fit
    into `tokens`; `fixed` cuts between any two tokens; `none` does not cut."""

    mode: Literal["none", "fixed", "sentence", "paragraph", "section"] = "none"
    tokens: StrictInt = Field(512, ge=1, le=1 << 20, description="maximum number of tokens of a chunk")
    overlap: StrictInt = Field(
        0, ge=0, description="maximum number of tokens that neighbours share; at most half of `tokens`"
    )


class CacheRequest(Strict):
    """Either `text`, which is cut according to `split`, or `chunks`, which are not cut."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "text": "A long manual. It has many sentences.",
                    "split": {"mode": "paragraph", "tokens": 512},
                    "name": "manual",
                    "ttl": 86400,
                }
            ]
        },
    )

    text: str | None = Field(None, min_length=1)
    chunks: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)] | None
    ) = None
    split: SplitOptions = SplitOptions()
    name: str | None = Field(None, min_length=1, max_length=255, description="shown in lists and traces")
    ttl: StrictInt | None = Field(
        None, ge=1, description="seconds until it expires; null: never; left out: as the server is configured"
    )

    @model_validator(mode="after")
    def _one_source(self) -> CacheRequest:
        if (self.text is None) == (self.chunks is None):
            raise WrongField("text", "send either text or chunks")
        if self.chunks is not None and self.split.mode != "none":
            raise WrongField("split", "split applies to text alone; chunks are not cut")
        return self


class Life(Strict):
    """Fields that are left out do not change."""

    ttl: StrictInt | None = Field(None, ge=1, description="seconds from now; null: it never expires")
    pinned: StrictBool = Field(
        False, description="whether its compiled KV is kept when its owner's newer ones need room"
    )

    @model_validator(mode="after")
    def _changes_something(self) -> Life:
        if not self.model_fields_set:
            raise ValueError(f"give one at least of {', '.join(type(self).model_fields)}")
        return self


class KVLife(Life):
    kv_ttl: StrictInt | None = Field(
        None,
        ge=1,
        description="seconds for which its compiled KV is kept unused; null: as the server is configured",
    )


class FileChange(KVLife):
    """New lifetimes, a pin or a new handle of a file. Fields that are left out do not change."""

    handle: StrictStr | None = Field(None, description="NAME for `IMAGE#NAME` and `FILE#NAME`; null: none")


class ExpiresAfter(Strict):
    """OpenAI's name for `ttl`."""

    anchor: Literal["created_at"]
    seconds: StrictInt = Field(ge=1)


class UploadCreate(Strict):
    """A file that will come in parts. The fields of OpenAI, and those of ours that `POST /v1/files` has."""

    filename: StrictStr = Field(min_length=1, max_length=1024)
    purpose: StrictStr = "user_data"
    bytes: StrictInt = Field(ge=1, description="the number of bytes of all parts together")
    mime_type: StrictStr | None = Field(None, description="not looked at: a file is what it decodes to")
    expires_after: ExpiresAfter | None = None
    handle: StrictStr | None = Field(None, description="NAME for `IMAGE#NAME` and `FILE#NAME` in prompts")
    replace: StrictBool = Field(False, description="take the handle from another file, which is deleted")
    split: StrictStr | SplitOptions | None = Field(
        None, description="the way a document is cut into chunks, see `POST /v1/files`"
    )
    press: StrictStr | None = Field(None, description="the press that compresses it, e.g. `snapkv-50`")
    ttl: StrictInt | None = Field(
        None,
        ge=1,
        description="seconds until the file expires; null: never; left out: as the server is configured",
    )
    kv_ttl: StrictInt | None = Field(
        None, ge=1, description="seconds for which its compiled KV is kept unused"
    )


MOST_PARTS = 1000
"""Most parts of an upload."""


class UploadComplete(Strict):
    """The parts of the file, in order."""

    part_ids: Annotated[list[StrictStr], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
    md5: StrictStr | None = Field(
        None, pattern="^[0-9a-fA-F]{32}$", description="MD5 of the whole file, in hexadecimal"
    )


class CacheChange(KVLife):
    """New lifetimes or a pin of a cache. Fields that are left out do not change."""


class ReferenceChange(Life):
    """A new lifetime or a pin of a reference. Fields that are left out do not change."""
