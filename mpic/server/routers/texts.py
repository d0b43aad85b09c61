"""``/v1/completions``, which goes on from a text, and ``/tokenize`` and ``/detokenize`` in vLLM's shapes."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mpic.api.requests import ChatRequest, Penalized
from mpic.api.texts import (
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    TextCompletion,
    TokenizedText,
    TokenizeRequest,
)
from mpic.engine.base import GenerationRequest
from mpic.engine.checks import check_prompt
from mpic.errors import UnsupportedModality, UnsupportedParameter
from mpic.http.sse import event
from mpic.link import named_policy
from mpic.prompt import Prompt, TextSegment
from mpic.prompt.messages import Handles
from mpic.server.auth import CurrentUser
from mpic.server.json_routes import PromptRoute
from mpic.server.routers import chat
from mpic.server.routers.models import check_model
from mpic.server.routers.translation import Translation
from mpic.server.state import State, StateDep


class _TextRoute(PromptRoute):
    text = "prompt"


router = APIRouter(tags=["texts"], route_class=_TextRoute)
PROMPT = "prompt"


class TextDialect(Translation):
    """Writes text completions.

    Args:
        echo: an answer begins with its prompt.
    """

    def __init__(self, texts: Sequence[str | list[int]], echo: bool) -> None:
        super().__init__()
        self.texts, self.prompts, self._echo = texts, len(texts), echo
        self._begins: list[str] = []  # the text in front of each answer
        self._written: Counter[int] = (
            Counter()
        )  # characters of each answer, where log-probabilities are asked for
        self.places = {"messages": PROMPT}

    def prepare(self, body: ChatRequest, state: State, user: str, handles: Handles) -> chat.Prepared:
        if (body.n or 1) > 1 and body.temperature == 0:
            raise UnsupportedParameter(chat.SAME_ANSWERS, param="n")
        policy = named_policy(state.config.engine.policy) or state.auto.default
        sampling = chat.sampling_of(body, state.template)
        requests = []
        for i, text in enumerate(self.texts):
            if len(self.texts) > 1:  # errors name the one that is refused
                self.places = dict.fromkeys(("messages", PROMPT), f"{PROMPT}[{i}]")
            prompt = Prompt((TextSegment(_ids(text, state)),))
            check_prompt(prompt)
            requests.append(GenerationRequest(f"cmpl-{uuid.uuid4().hex}", prompt, policy, sampling, user))
            begin = text if isinstance(text, str) else state.template.tokenizer.decode(text)
            self._begins += [begin if self._echo else ""] * (body.n or 1)
        self.places = {"messages": PROMPT}
        return requests, ()

    def whole(self, completion: dict[str, Any], stop: str | None) -> dict[str, Any]:
        texts = [choice["message"]["content"] or "" for choice in completion["choices"]]
        return self._translated(completion, [self._begins[i] + text for i, text in enumerate(texts)])

    def events(self, chunk: dict[str, Any], stop: str | None) -> Iterable[bytes]:
        texts = []
        for choice in chunk["choices"]:
            first = "role" in choice["delta"]
            if first and not self._echo:
                return ()
            texts.append(self._begins[choice["index"]] if first else choice["delta"].get("content") or "")
        return (event(self._translated(chunk, texts)),)

    def _translated(self, body: dict[str, Any], texts: Iterable[str]) -> dict[str, Any]:
        choices = [
            {
                "index": choice["index"],
                "text": text,
                "finish_reason": choice["finish_reason"],
                "logprobs": self._logprobs(choice),
            }
            for choice, text in zip(body["choices"], texts, strict=True)
        ]
        return {**body, "object": "text_completion", "choices": choices}

    def _logprobs(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return log-probabilities of a chat in the older form: of each token the most likely ones and itself."""
        if not choice["logprobs"]:
            return None
        content, offsets = choice["logprobs"]["content"], []
        for one in content:
            offsets.append(self._written[choice["index"]])
            self._written[choice["index"]] += len(one["token"])
        return {
            "tokens": [one["token"] for one in content],
            "token_logprobs": [one["logprob"] for one in content],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in (*reversed(one["top_logprobs"]), one)}
                for one in content
            ],
            "text_offset": offsets,
        }


def _ids(text: str | list[int], state: State) -> tuple[int, ...]:
    if isinstance(text, list):
        state.template.check_ids(text, PROMPT)
    ids = state.template.tokenize_whole(text) if isinstance(text, str) else tuple(text)
    state.template.check_text(ids, PROMPT)
    return ids


@router.post(
    "/v1/completions",
    response_class=JSONResponse,
    responses={
        200: {
            "model": TextCompletion,
            "description": "the answers; with `stream`, server-sent events of the same objects",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def complete(body: CompletionRequest, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Go on from a text, or from several. No chat template is applied."""
    same = (
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "top_k",
    )
    fields = {name: getattr(body, name) for name in (*same, *Penalized.model_fields)}
    fields |= {"logprobs": body.alternatives is not None, "top_logprobs": body.alternatives}
    dialect = TextDialect(body.prompts, bool(body.echo))
    return await chat.answer(request, dialect.chat({"messages": [], **fields}), state, user, dialect)


@router.post("/tokenize")
async def tokenize(
    body: TokenizeRequest, request: Request, state: StateDep, user: CurrentUser
) -> TokenizedText:
    """Show the tokens of a text, or those of a conversation as the model would read it."""
    check_model(state, body.model)
    return await state.pools.prompts.run(request, _tokenized, body, state, user.id)


def _tokenized(body: TokenizeRequest, state: State, user: str) -> TokenizedText:
    if body.prompt is not None:
        ids = state.template.tokenize_whole(body.prompt, bare=body.add_special_tokens is False)
    else:
        asked = ChatRequest(
            messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
        )
        ids = _tokens(chat.prepare(asked, state, user, Handles())[0].prompt)
    strings = map(state.template.tokenizer.convert_ids_to_tokens, ids) if body.return_token_strs else None
    return TokenizedText(
        count=len(ids),
        max_model_len=state.engine.info.context_length,
        tokens=ids,
        token_strs=strings and tuple(strings),
    )


def _tokens(prompt: Prompt) -> tuple[int, ...]:
    ids: list[int] = []
    for segment in prompt.segments:
        found = segment.token_ids if isinstance(segment, TextSegment) else segment.chunk.token_ids
        if found is None:
            raise UnsupportedModality(
                "images and videos have no tokens of text: /v1/messages/count_tokens counts them",
                param="messages",
            )
        ids += found
    return tuple(ids)


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeRequest, request: Request, state: StateDep, user: CurrentUser
) -> DetokenizedText:
    """Show the text of tokens, control tokens included."""
    check_model(state, body.model)
    return await state.pools.prompts.run(request, _detokenized, body, state)


def _detokenized(body: DetokenizeRequest, state: State) -> DetokenizedText:
    state.template.check_ids(body.tokens, "tokens")
    return DetokenizedText(prompt=state.template.tokenizer.decode(body.tokens))
