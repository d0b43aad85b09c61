"""``/v1/chat/completions``: answers a conversation, whole or streamed. Other dialects are translated to it and back
(``Dialect``)."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mpic.api.completion import ChatCompletion
from mpic.api.requests import ChatRequest, MessageParam
from mpic.cancel import Cancelled, checkpoint
from mpic.engine.base import Delta, GenerationRequest, GenerationUsage, RetrievalRound, Sampling
from mpic.errors import BadRequest, MPICError, UnsupportedParameter
from mpic.http import errors
from mpic.http.body import write
from mpic.http.errors import CLIENT_CLOSED
from mpic.http.sse import DONE, WAITING, ClientDisconnected, EventStream, event, while_connected
from mpic.link import Policy, named_policy
from mpic.press import parse_press
from mpic.prompt import ChatTemplate, build_prompt
from mpic.prompt.bounds import check_conversation
from mpic.prompt.long_texts import link_long_texts
from mpic.prompt.messages import Handles
from mpic.server import retrieval
from mpic.server.answer_form import form_of
from mpic.server.auth import CurrentUser, User, take_answers
from mpic.server.auto import unfit
from mpic.server.completions import CompletionWriter
from mpic.server.json_routes import ChatRoute
from mpic.server.parallel_sampling import ParallelSampling, add_usages
from mpic.server.resolver import LibraryResolver
from mpic.server.routers.models import check_model
from mpic.server.state import State, StateDep
from mpic.server.tool_parser import CLOSE

router = APIRouter(prefix="/v1/chat", tags=["chat"], route_class=ChatRoute)

IGNORED = {
    **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"), True),
    "tool_calls": {"__all__": {"index": True, "function": {"parsed_arguments"}}},
}
"""Fields of an earlier answer that the model does not see."""
Count = Callable[[Mapping[int, GenerationUsage]], GenerationUsage]
"""Counts the answers of a request that have ended, by their numbers, and returns the usage of all."""
Prepared = tuple[list[GenerationRequest], tuple[RetrievalRound, ...]]
"""A request for the engine for each prompt, and the searches made for it."""
INDEX = re.compile(r"\[\d+\]")
SAME_ANSWERS = "n greedy answers would all be the same: set a temperature above 0"
PATIENCE = 15.0
"""Seconds after which a stream begins before its first token, and between the comments that say that it waits."""
MANY_PARTS = 256
"""Conversations of more content parts and messages are built one at a time for each user."""


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
    return await answer(request, body, state, user, Dialect())


class Dialect:
    """Writes the answers to one request. This one writes chat completions, which others translate.

    Attributes:
        prompts: the number of prompts that are answered.
        places: fields of the chat, and those of the client's request that became them.
    """

    prompts = 1

    def __init__(self) -> None:
        self.places: dict[str, str] = {}

    def prepare(self, body: ChatRequest, state: State, user: str, handles: Handles) -> Prepared:
        """Return the requests for the engine; on a thread."""
        generation, rounds = prepare(body, state, user, handles)
        return [generation], rounds

    def place(self, param: str | None) -> str | None:
        """Return the field of the client's request that became a field of the chat, or a part of it."""
        at = param or ""
        while at and at not in self.places:
            at = at[: max(at.rfind("."), at.rfind("["), 0)]
        if not at or param is None:
            return param
        rest = param[len(at) :]
        return self.places[at] + (rest if INDEX.fullmatch(rest) else "")

    def rename(self, error: MPICError) -> None:
        """Rename the fields that an error names to those of the client's request."""
        place = self.place(error.param)
        if error.param and place != error.param:
            error.message = error.message.replace(error.param, place or "", 1)
        error.param = place

    def whole(self, completion: dict[str, Any], stop: str | None) -> dict[str, Any]:
        """Return the body of an answer.

        Args:
            completion: a ``chat.completion``.
            stop: the stop string that ended its first choice.
        """
        return completion

    def events(self, chunk: dict[str, Any], stop: str | None) -> Iterable[bytes]:
        """Return the events for a ``chat.completion.chunk``, and at the end for the one with the usage alone."""
        return (event(chunk),)

    def end(self) -> Iterable[bytes]:
        """Return the events after the last chunk."""
        return (DONE,)

    def failure(self, error: MPICError) -> bytes:
        """Return the event of an error in the middle of a stream, which then ends."""
        return event(error.body())


async def answer(request: Request, body: ChatRequest, state: State, user: User, dialect: Dialect) -> Response:
    """Return the response to a request that has been translated to a chat completion, in its own dialect."""
    try:
        check_model(state, body.model)
        return await _answer(request, body, state, user, dialect)
    except MPICError as error:
        dialect.rename(error)
        raise


async def _answer(
    request: Request, body: ChatRequest, state: State, user: User, dialect: Dialect
) -> Response:
    n = body.n or 1
    take_answers(request, n * dialect.prompts)
    handles = Handles(body.mpic.handles)
    generation, rounds, answers = await _submitted(request, body, state, user.id, handles, dialect)
    writer = CompletionWriter(
        generation.id,
        state.engine.info.name,
        int(time.time()),
        state.template.tokenizer,
        logprobs=bool(body.logprobs),
        trace=generation.trace,
        rounds=None if body.mpic.retrieval.mode == "off" else rounds,
        tools=offers_tools(body),
        unlinked=handles.unlinked,
        ignored=tuple(dialect.place(name) or name for name in _ignored(body)),
    )

    def count(usages: Mapping[int, GenerationUsage]) -> GenerationUsage:
        begun = {i: usage for i, usage in usages.items() if usage.ttft_ms}
        for usage in begun.values():
            state.metrics.answered(usage)
        state.savings.answered(user.id, add_usages(begun, n), len(begun))
        return add_usages(usages, n)

    if not body.stream:
        return await _whole(request, answers, writer, dialect, count, state, user.id)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    return await _streamed(request, answers, writer, dialect, with_usage, count)


def _ignored(body: ChatRequest) -> Iterator[str]:
    """Yield the fields that ask for something that is not done."""
    if body.store:
        yield "store"
    if body.verbosity in ("low", "high"):
        yield "verbosity"


async def _submitted(
    request: Request, body: ChatRequest, state: State, user: str, handles: Handles, dialect: Dialect
) -> tuple[GenerationRequest, tuple[RetrievalRound, ...], ParallelSampling]:
    """Build a request and submit it, both on one thread, because handing work to another thread can take as long as
    building a short prompt.

    Returns:
        The request (of several the first), the searches made for it, and its answers.

    Raises:
        ClientDisconnected: the client closed the connection; answers that had been submitted are aborted.
        MPICError: the request is refused.
    """
    submitted: list[ParallelSampling] = []

    def submit() -> tuple[GenerationRequest, tuple[RetrievalRound, ...]]:
        generations, rounds = dialect.prepare(body, state, user, handles)
        checkpoint()
        # in a context of its own: what an engine begins there must not end with this work
        answers = Context().run(ParallelSampling.submit, state.engine.submit, generations, body.n or 1)
        submitted.append(answers)
        try:
            checkpoint()
        except Cancelled:  # nobody may be left to look at ``submitted``
            answers.abort()
            raise
        return generations[0], rounds

    threads = state.pools.long_prompts if _parts(body) > MANY_PARTS else state.pools.prompts
    try:
        return *await threads.run(request, submit), submitted[0]
    except BaseException:
        for answers in submitted:
            answers.abort()
        raise


def _parts(body: ChatRequest) -> int:
    return sum(len(m.content) if isinstance(m.content, list) else 1 for m in body.messages)


def prepare(
    body: ChatRequest, state: State, user: str, handles: Handles
) -> tuple[GenerationRequest, tuple[RetrievalRound, ...]]:
    """Return the request for the engine, and the searches made for it; note the ``handles`` that stay text.

    It may tokenize long texts and decode images, so it runs on a thread.
    """
    if (body.n or 1) > 1 and body.temperature == 0:
        raise UnsupportedParameter(SAME_ANSWERS, param="n")
    if options := template_options(body, state.template):
        state = replace(state, template=state.template.given(options))
    policy = named_policy(body.mpic.policy or state.config.engine.policy)
    press = asked_press(body, policy)
    resolver = _resolver(state, user)
    messages = [_seen(message) for message in body.messages]
    check_conversation(messages, state.engine.info.context_length, state.template.longest_token)
    options = body.mpic.retrieval
    retrieval.check_options(options)
    tools = offered_tools(body, state.template)
    form = form_of(body)
    if (body.n or 1) > 1 and options.mode == "auto":
        raise UnsupportedParameter("n is 1 while the model searches as it answers", param="n")
    rounds: tuple[RetrievalRound, ...] = ()
    search = None
    if options.mode == "off":
        values = state.config.server.max_body_values
        prompt = build_prompt(messages, state.template, resolver, tools, values, handles)
    else:
        searcher = retrieval.Searcher(state.retriever, options, press or state.config.engine.press)
        query = retrieval.query_of(messages, _resolver(state, user), Handles(handles.on))
        if options.mode == "always":
            found = retrieval.prompt_with_references(messages, searcher, query, state, resolver, handles)
            prompt, round = found
            rounds = (round,)
        else:
            prompt, search = retrieval.prompt_with_search(
                messages, searcher, query, state, resolver, policy or state.auto.default, handles
            )
    prompt = prompt.pressed(press, state.config.engine.press)
    linking = policy or state.auto.default
    if policy is None and search is None:
        linking = state.auto.for_kinds({"text", *(chunk.kind for chunk in prompt.chunks)})
    least = state.config.engine.link_texts
    if least > 0 and linking.uses_chunks and unfit(linking) is None:
        most = state.config.server.max_chunks
        linked = link_long_texts(prompt, messages, tools, state.template, user, least, most)
        if linked is not prompt:
            prompt, policy = linked, linking
    if policy is None:  # a search may add references of any kind
        policy = state.auto.for_chunks(prompt.chunks) if search is None else state.auto.default
        asked_press(body, policy)
    own = sorted({chunk.file_id for chunk in prompt.chunks if chunk.owner == user and chunk.file_id})
    exists = partial(state.library.files.check_exist, user, own) if own else None
    id = f"chatcmpl-{uuid.uuid4().hex}"
    sampling, trace = sampling_of(body, state.template), body.mpic.trace
    if search is not None and search.trigger == "confidence" and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    return GenerationRequest(id, prompt, policy, sampling, user, trace, search, exists, form), rounds


def template_options(body: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables that a request gives to the chat template. No effort is what a model makes that does not
    think, and what ``enable_thinking`` says where the template has that alone."""
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    if body.reasoning_effort == "none" and not template.reads("reasoning_effort"):
        effort = {"enable_thinking": False} if template.reads("enable_thinking") else {}
    return {**effort, **(body.chat_template_kwargs or {})}


def _seen(message: MessageParam) -> dict[str, Any]:
    """Return what the model sees of a message."""
    seen = message.model_dump(exclude_none=True, exclude=IGNORED)
    if message.reasoning and message.role == "assistant":
        seen.setdefault("reasoning_content", message.reasoning)
    return {"content": message.refusal, **seen} if message.refusal else seen


def asked_press(body: ChatRequest, policy: Policy | None) -> str | None:
    """Return the press that a request asks for, if any. Raise UnknownPress, or UnsupportedParameter if it would have
    no effect."""
    press = parse_press(body.mpic.press or "")
    if press is not None and policy is not None and not policy.uses_chunks:
        raise UnsupportedParameter(
            f"press {press} has no effect under policy {policy}, which reads no compiled chunk",
            param="mpic.press",
        )
    return body.mpic.press


def _resolver(state: State, user: str) -> LibraryResolver:
    return LibraryResolver(
        state.library, user, state.config.server.max_chunks, state.engine.info.context_length
    )


def sampling_of(body: ChatRequest, template: ChatTemplate) -> Sampling:
    """Return the sampling parameters of a request. Raise BadRequest for a bias of a token that there is not."""
    size = len(template.tokenizer)
    for id in body.logit_bias or ():
        if int(id) >= size:
            raise BadRequest(f"the tokenizer has the tokens 0 to {size - 1}", param=f"logit_bias.{id}")
    several = 1.0 if (body.n or 1) > 1 else 0.0  # OpenAI's default, for answers that differ
    one_call = offers_tools(body) and body.parallel_tool_calls is False
    return Sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=(several if body.temperature is None else body.temperature),
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.mpic.top_k or max(body.top_k or 0, 0),
        seed=body.seed,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple((int(id), bias) for id, bias in (body.logit_bias or {}).items() if bias),
        stop=(*body.stops, CLOSE) if one_call else body.stops,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ignore_eos=body.mpic.ignore_eos,
    )


def offers_tools(body: ChatRequest) -> bool:
    """Return whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def offered_tools(body: ChatRequest, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the tools that a request offers. Raise UnsupportedParameter if the model does not support tools."""
    if not offers_tools(body):
        return []
    if body.mpic.retrieval.mode != "off":
        raise UnsupportedParameter("tools are not offered together with mpic.retrieval", param="tools")
    if not template.abilities.tools:
        raise UnsupportedParameter("the model's chat template does not print tools", param="tools")
    if template.calls is None:
        raise UnsupportedParameter(
            "this server does not read the form in which the model calls tools (only <tool_call> JSON)",
            param="tools",
        )
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()]


async def _whole(
    request: Request,
    answers: ParallelSampling,
    writer: CompletionWriter,
    dialect: Dialect,
    count: Count,
    state: State,
    user: str,
) -> Response:
    try:
        deltas = await while_connected(request, answers.collect())
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED)
    finally:
        answers.abort()
    usage = count({i: answer[-1].usage or GenerationUsage() for i, answer in enumerate(deltas)})

    def completion() -> dict[str, Any]:
        return dialect.whole(writer.completion(deltas, usage), deltas[0][-1].stop)

    if not writer.logprobs:
        return JSONResponse(completion())
    # up to 21 objects for each token of each answer, which would hold up the event loop for seconds
    content = await state.pools.prompts.call(user, lambda: write(completion()).encode())
    return Response(content, media_type=JSONResponse.media_type)


async def _streamed(
    request: Request,
    answers: ParallelSampling,
    writer: CompletionWriter,
    dialect: Dialect,
    with_usage: bool,
    count: Count,
) -> Response:
    """Wait for the first delta, so that an error before it is still an ordinary error response, but not so long that
    something on the way takes the connection for dead."""
    deltas = aiter(answers)
    first = asyncio.ensure_future(anext(deltas))
    # an error is looked at even if nobody waits for it any more
    first.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await while_connected(request, asyncio.wait({first}, timeout=PATIENCE))
        if first.done():
            first.result()
    except BaseException as exc:
        first.cancel()
        answers.abort()
        if isinstance(exc, ClientDisconnected):
            return Response(status_code=CLIENT_CLOSED)
        raise
    request.state.failure = dialect.failure  # where the stream is ended from outside (``auth``)
    return EventStream(_events(first, deltas, writer, dialect, with_usage, count), close=answers.abort)


async def _events(
    first: asyncio.Future[tuple[int, Delta]],
    rest: AsyncIterator[tuple[int, Delta]],
    writer: CompletionWriter,
    dialect: Dialect,
    with_usage: bool,
    count: Count,
) -> AsyncIterator[bytes]:
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    usages: dict[int, GenerationUsage] = {}
    usage = GenerationUsage()
    opened: set[int] = set()
    try:
        while not first.done():
            yield WAITING
            await asyncio.wait({first}, timeout=PATIENCE)
        found: tuple[int, Delta] | None = await first
        while found is not None:
            i, delta = found
            if i not in opened:
                opened.add(i)
                for piece in dialect.events({**writer.first_chunk(i), **extra}, None):
                    yield piece
            if delta.usage is not None:
                usages[i] = delta.usage
            if delta.text or delta.finish_reason or delta.retrieval or (writer.logprobs and delta.logprobs):
                for piece in dialect.events({**writer.chunk(delta, i), **extra}, delta.stop):
                    yield piece
            found = await anext(rest, None)
    except Exception as exc:
        # The status line has been sent, so the error travels as an event, and no [DONE] follows.
        yield dialect.failure(errors.as_mpic_error(exc))
        return
    finally:
        first.cancel()
        usage = count(usages)
    if with_usage:
        for piece in dialect.events(writer.usage_chunk(usage), None):
            yield piece
    for piece in dialect.end():
        yield piece
