"""``/v1/chat/completions``: one prompt in, one answer out, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mpic.engine.base import Delta, GenerationRequest, RetrievalRound, Sampling, Usage
from mpic.errors import UnsupportedParameter
from mpic.link import parse_policy
from mpic.prompt import build_prompt
from mpic.prompt.bounds import check_conversation
from mpic.prompt.calls import search_tools
from mpic.retriever import SearchHit
from mpic.server import errors, retrieval
from mpic.server.answers import Answer
from mpic.server.auth import CurrentUser
from mpic.server.body import ChatRoute
from mpic.server.choices import Choices, together
from mpic.server.errors import CLIENT_CLOSED
from mpic.server.metrics import Metrics
from mpic.server.replies import ChatCompletion
from mpic.server.resolver import LibraryResolver
from mpic.server.routers.models import check_model
from mpic.server.schemas import ChatRequest
from mpic.server.sse import DONE, ClientGone, EventStream, frame, while_connected
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/chat", tags=["chat"], route_class=ChatRoute)

SAID_ONLY = {"refusal", "annotations", "audio", "function_call"}
"""Fields of an earlier answer that say nothing to the model."""


@router.post(
    "/completions",
    response_class=JSONResponse,
    responses={
        200: {
            "model": ChatCompletion,
            "description": "the answer; with `stream`, server-sent events of `chat.completion.chunk` objects",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def create(body: ChatRequest, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Answer a conversation that may contain images and documents, uploaded or inline."""
    check_model(state, body.model)
    job, given = await state.rooms.prompts.run(request, prepare, body, state, user.id)
    # to the end: what has been submitted must be aborted if the client has left
    choices = await state.rooms.prompts.call(user.id, Choices.submit, state.engine.submit, job, body.n or 1)
    rounds = None if body.mpic.retrieval.mode == "off" else given
    answer = Answer(
        job.id,
        state.engine.info.name,
        int(time.time()),
        state.template.tokenizer,
        job.trace,
        rounds,
        tools=offers_tools(body),
    )
    if not body.stream:
        return await _whole(request, choices, answer, bool(body.logprobs), state.metrics)
    return await _streamed(request, choices, answer, body, state.metrics)


def prepare(
    body: ChatRequest, state: State, user: str
) -> tuple[GenerationRequest, tuple[RetrievalRound, ...]]:
    """Everything of a request that is known without the model, and what was searched for it. May tokenize and decode
    images: not for the event loop."""
    if (body.n or 1) > 1 and not body.temperature:
        raise UnsupportedParameter(
            "n greedy answers would all be the same: set a temperature above 0", param="n"
        )
    policy = parse_policy(body.mpic.policy or state.config.engine.policy)
    resolver = LibraryResolver(state.library, user, state.config.server.max_chunks)
    messages = [m.model_dump(exclude_none=True, exclude=SAID_ONLY) for m in body.messages]
    check_conversation(messages, state.engine.info.context_length, state.template.longest_token)
    options = body.mpic.retrieval
    if offered := tools_of(body):
        if options.mode != "off":
            raise UnsupportedParameter("tools are not offered together with mpic.retrieval", param="tools")
        if not state.template.abilities.tools:
            raise UnsupportedParameter("the model's chat template does not print tools", param="tools")
        if state.template.calls is None:
            raise UnsupportedParameter(
                "this server does not read the form in which the model calls tools (only <tool_call> JSON)",
                param="tools",
            )
    if (body.n or 1) > 1 and options.mode == "auto":
        raise UnsupportedParameter("n is 1 while the model searches as it answers", param="n")
    given: tuple[RetrievalRound, ...] = ()
    hits: list[SearchHit] = []
    tokens = None
    searching = retrieval.Searching(state.retriever, options)
    query = retrieval.Query()
    if options.mode != "off":
        seen = LibraryResolver(state.library, user, state.config.server.max_chunks)
        query = retrieval.query_of(messages, seen)
    if options.mode == "always":
        hits, round = retrieval.look_up(searching, query)
        given = (round,)
        tokens = retrieval.search_tokens(state.template, state.config.retrieval)
        messages = messages if tokens is not None else retrieval.with_references(messages, hits)
    style = retrieval.style_of(state.template, state.config.retrieval) if options.mode == "auto" else None
    tools = search_tools(style) if style is not None else None
    prompt = build_prompt(messages, state.template, resolver, tools or offered)
    if tokens is not None and hits:
        shelf = state.library.references
        prompt = retrieval.as_if_asked(prompt, state.template, tokens, query, hits, shelf)
    auto = None
    if style is not None:
        auto = retrieval.AutoRetrieval(searching, state.template, style)
        state.retriever.soon(retrieval.guess, searching, query, state.engine, policy)
    sampling = Sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.mpic.top_k,
        seed=body.seed,
        stop=body.stops,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ignore_eos=body.mpic.ignore_eos,
    )
    id = f"chatcmpl-{uuid.uuid4().hex}"
    return GenerationRequest(id, prompt, policy, sampling, user, body.mpic.trace, auto), given


def offers_tools(body: ChatRequest) -> bool:
    """Whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def tools_of(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools a request offers."""
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if offers_tools(body) else []


async def _whole(
    request: Request, choices: Choices, answer: Answer, logprobs: bool, metrics: Metrics
) -> Response:
    try:
        answers = await while_connected(request, choices.whole())
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    finally:
        choices.abort()
    usages = [deltas[-1].usage or Usage() for deltas in answers]
    for usage in usages:
        metrics.answered(usage)
    return JSONResponse(answer.whole(answers, together(usages), logprobs))


async def _streamed(
    request: Request, choices: Choices, answer: Answer, body: ChatRequest, metrics: Metrics
) -> Response:
    """Waits for the first delta, so that what goes wrong before it is still an ordinary error response."""
    deltas = aiter(choices)
    try:
        first = await while_connected(request, anext(deltas))
    except ClientGone:
        choices.abort()
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        choices.abort()
        raise
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    frames = _frames(first, deltas, answer, with_usage, bool(body.logprobs), metrics)
    return EventStream(frames, close=choices.abort)


async def _frames(
    first: tuple[int, Delta],
    rest: AsyncIterator[tuple[int, Delta]],
    answer: Answer,
    with_usage: bool,
    logprobs: bool,
    metrics: Metrics,
) -> AsyncIterator[bytes]:
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    usages: list[Usage] = []
    opened: set[int] = set()
    try:
        found: tuple[int, Delta] | None = first
        while found is not None:
            i, delta = found
            if i not in opened:
                opened.add(i)
                yield frame({**answer.opening(i), **extra})
            if delta.usage is not None:
                metrics.answered(delta.usage)
                usages.append(delta.usage)
            if delta.text or delta.finish_reason or delta.retrieval or (logprobs and delta.logprobs):
                yield frame({**answer.piece(delta, logprobs, i), **extra})
            found = await anext(rest, None)
    except Exception as exc:
        # the status line is long gone: the error travels as a frame, and no [DONE] follows
        yield frame(errors.as_mpic_error(exc).body())
        return
    if with_usage:
        yield frame(answer.closing(together(usages)))
    yield DONE
