"""Requests and answers of ``/v1/completions``, ``/tokenize``, ``/detokenize`` and ``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from mpic.api.base import ClosedObject, ItemList
from mpic.api.completion import FinishReason, Usage
from mpic.api.openai_fields import Name
from mpic.api.requests import (
    FIRST_ERROR,
    MessageParam,
    Penalized,
    Stops,
    StreamOptions,
    Strict,
    TemplateOptions,
    Tool,
    WrongField,
    only,
)

MOST_PROMPTS = 128
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=2048, fail_fast=True)]
Prompts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
TokenPrompts = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


class CompletionRequest(Penalized):
    """Text to go on from. It is the whole prompt: the chat template is not applied, control strings in it are control
    tokens, and handles link nothing."""

    prompt: str | Prompts | Tokens | TokenPrompts = Field(
        description="one prompt, or several, as texts or token ids"
    )
    model: str | None = Field(None, description="the served model's name; may be left out")
    max_tokens: StrictInt | None = Field(16, ge=1, description="null: as many as fit the context")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: StrictInt | None = Field(None, ge=1, le=16, description="answers to each prompt")
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**63 - 16)
    stop: str | Stops | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    top_k: StrictInt | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1: all tokens")
    best_of: StrictInt | None = Field(None, ge=1, le=16, description="n, or left out: all answers are given")
    echo: StrictBool | None = Field(None, description="answers begin with the prompt; not with logprobs")
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | Literal[False] | None = Field(
        None, description="alternatives to report beside each token of the answer"
    )
    suffix: Annotated[Literal[""] | None, only("the model writes at the end")] = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise WrongField("best_of", "best_of must be n: all answers are given")
        if self.echo and self.alternatives is not None:
            raise WrongField("echo", "echo and logprobs do not go together: those of prompts are not kept")
        return self

    @property
    def alternatives(self) -> int | None:
        """Return ``logprobs`` where it asks for any."""
        return None if self.logprobs is False else self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """Return all prompts, each a text or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else [*self.prompt]


class TextLogprobs(ClosedObject):
    """The tokens of an answer, or of the part of it that an event adds; `text_offset` counts from its start."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class TextChoice(ClosedObject):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | None = None


class TextCompletion(ClosedObject):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: Usage | None = None


class TokenizeRequest(Strict):
    """Either `prompt`, as `/v1/completions` takes it, or `messages`, as chat completions do."""

    prompt: str | None = None
    messages: Annotated[list[MessageParam], FIRST_ERROR] | None = None
    model: str | None = Field(None, description="the served model's name; may be left out")
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    add_special_tokens: StrictBool | None = Field(
        None,
        description="begin with what the tokenizer puts in front of a text; default: true for `prompt` alone",
    )
    return_token_strs: StrictBool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: Annotated[Literal[True] | None, only("a prompt ends where the answer begins")] = (
        None
    )
    continue_final_message: Annotated[Literal[False] | None, only("an answer begins a new message")] = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise WrongField("prompt", "send either prompt or messages")
        if self.prompt is not None and self.tools:
            raise WrongField("tools", "tools belong to messages")
        if self.messages is not None and self.add_special_tokens:
            raise WrongField("add_special_tokens", "the chat template writes its own")
        return self


class TokenizedText(ClosedObject):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeRequest(Strict):
    tokens: Annotated[list[Token], FIRST_ERROR]
    model: str | None = Field(None, description="the served model's name; may be left out")


class DetokenizedText(ClosedObject):
    prompt: str


class EmbeddingRequest(Strict):
    """Texts for the embedder of the reference library."""

    input: str | Texts = Field(description="a text, or several; ids of tokens are refused")
    model: str = Field(
        description="the name of the embedder (`[retrieval] embedder`; of a folder its last part)"
    )
    encoding_format: Literal["float", "base64"] | None = None
    user: Name | None = None
    dimensions: StrictInt | None = Field(None, ge=1, description="only the embedder's own")

    @property
    def texts(self) -> list[str]:
        """Return all texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class Embedding(ClosedObject):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: tuple[float, ...] | str = Field(
        description="of length 1; with `base64` its fp32 values, little-endian"
    )


class EmbeddingUsage(ClosedObject):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ItemList[Embedding]):
    model: str
    usage: EmbeddingUsage
