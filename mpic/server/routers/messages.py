"""Anthropic's ``/v1/messages``, translated to a chat completion and back, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.api.messages import (
    AnswerTurn,
    AnyBlock,
    AttachedBlock,
    Base64Source,
    ContentSource,
    CountRequest,
    ImageBlock,
    MessagesError,
    MessagesRequest,
    PartBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ThreadContinue,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from mpic.api.requests import ChatRequest, MessageParam
from mpic.bounded_json import Bounds
from mpic.errors import BadRequest, MPICError, ResponseNotFound, UnsupportedParameter
from mpic.http import errors
from mpic.http.sse import event
from mpic.server.auth import CurrentUser
from mpic.server.kept_responses import KeptResponse
from mpic.server.routers import chat
from mpic.server.routers.translation import Parts, TranslatedRoute, Translation, calls_of, count
from mpic.server.state import State, StateDep

PATH = "/v1/messages"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, by status; for other statuses that of 400, or ``api_error``."""
PREFILL = "an answer does not go on from a turn of the assistant: end with one of the user"
RENAMED = {
    "stop": "stop_sequences",
    "mpic.top_k": "top_k",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "output_config.effort",
}


class MessagesDialect(Translation):
    """Writes the answers to one request as messages.

    Args:
        stops: the client's stop sequences.
        size: bytes of the request.
    """

    def __init__(self, stops: Iterable[str], size: int) -> None:
        super().__init__()
        self.places |= RENAMED
        self._stops = frozenset(stops)
        self._blocks, self._open = (
            -1,
            "",
        )  # of the stream: the number of the last block, and its type while it is open
        self._reason: dict[str, Any] = {}
        self._size = size
        self._said, self._calls = "", []
        self._keep: Callable[[str, MessageParam], None] = lambda id, said: None

    # ---- the request

    @classmethod
    def translate(cls, asked: CountRequest, size: int) -> tuple[ChatRequest, MessagesDialect]:
        answers = asked if isinstance(asked, MessagesRequest) else None
        dialect = cls(answers.stop_sequences or () if answers else (), size)
        dialect._conversation(asked)
        fields: dict[str, Any] = {"model": asked.model, "messages": dialect.messages, "mpic": asked.mpic}
        dialect._tools(asked, fields)
        if asked.output_config and asked.output_config.format:
            schema = {"name": "answer", "schema": asked.output_config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if asked.output_config:
            fields["reasoning_effort"] = asked.output_config.effort
        if answers:
            if answers.top_k is not None:
                fields["mpic"] = asked.mpic.model_copy(update={"top_k": answers.top_k})
            same = ("max_tokens", "temperature", "top_p", "stream")
            fields |= {name: getattr(answers, name) for name in same}
            fields["stop"] = answers.stop_sequences or None
            fields["stream_options"] = {"include_usage": True} if answers.stream else None
        return dialect.chat(fields), dialect

    def _conversation(self, asked: CountRequest) -> None:
        if asked.system:
            self.begin("system", "system")
            self.add(_texts(asked.system, "system"))
        for i, turn in enumerate(asked.messages):
            where = f"messages[{i}]"
            called = asked.tool_choice and asked.tool_choice.type in ("any", "tool")  # no text goes on there
            if i + 1 == len(asked.messages) and turn.role == "assistant" and not called:
                raise UnsupportedParameter(PREFILL, param=where)
            if isinstance(turn.content, str) or not turn.content:
                self.go_on(turn.role, where, f"{where}.content")
                self.add(_texts(turn.content if isinstance(turn.content, str) else "", f"{where}.content"))
                continue
            for k, block in enumerate(turn.content):
                self._block(turn.role, where, block, f"{where}.content[{k}]")

    def _block(self, role: str, turn: str, block: AnyBlock, at: str) -> None:
        """Add a block. The result of a tool is a message of its own, in its place."""
        owner = "user" if isinstance(block, ToolResultBlock) else "assistant"
        if role != owner and isinstance(block, ToolResultBlock | ToolUseBlock | ThinkingBlock):
            raise BadRequest(f"{block.type} is a block of the {owner}", param=f"{at}.type")
        if isinstance(block, ToolUseBlock):
            self.go_on(role, turn, f"{turn}.content")
            self.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False), at)
        elif isinstance(block, ToolResultBlock):
            self.begin("tool", at, f"{at}.content", tool_call_id=block.tool_use_id)
            self.add([({"type": "text", "text": "Error:"}, at)] if block.is_error else ())
            parts = _texts(block.content or "", f"{at}.content")
            mark = {"cache_control": block.cache_control} if block.cache_control else {}
            self.add(({**part, **mark} if part["type"] == "text" else part, at) for part, at in parts)
        elif not isinstance(block, ThinkingBlock):
            self.go_on(role, turn, f"{turn}.content")
            self.add(_parts(block, at))

    def _tools(self, asked: CountRequest, fields: dict[str, Any]) -> None:
        tools = []
        for i, tool in enumerate(asked.tools or ()):
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            tools.append({"type": "function", "function": {**function, "strict": tool.strict or None}})
            for name in ("name", "description", "strict"):
                self.places[f"tools[{i}].function.{name}"] = f"tools[{i}].{name}"
            self.places[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
        fields["tools"] = tools or None
        if (choice := asked.tool_choice) is None:
            return
        named = {"type": "function", "function": {"name": choice.name}}
        if (choice.type == "tool") != (choice.name is not None):
            raise BadRequest("a name belongs to the type tool, and to no other", param="tool_choice.name")
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False

    def link(self, body: ChatRequest, asked: MessagesRequest, state: State, user: str) -> ChatRequest:
        """Return the chat with what its thread has kept, and have its answer kept, too. Raise ResponseNotFound."""
        thread = asked.thread
        if thread is None:
            return body
        if isinstance(thread, ThreadContinue):
            for name in ("system", "tools"):
                if getattr(asked, name):
                    raise BadRequest(f"a thread keeps its {name}: leave it out", param=name)
            try:
                kept = state.responses.get(user, thread.previous_message_id, "thread.previous_message_id")
            except ResponseNotFound as error:
                error.details["error_code"] = "thread_not_found"  # upon which clients send all of it again
                raise
            body = self.go_on_from(body, kept, 0, "thread.previous_message_id")
            body = body.model_copy(update={"tools": kept.tools})

        def keep(id: str, said: MessageParam) -> None:
            size = self._size + len(str(said)) + (self.before.size if self.before else 0)
            messages = (*body.messages, said)
            state.responses.keep(user, KeptResponse({"id": id}, messages, size, tools=body.tools))

        self._keep = keep
        return body

    # ---- the answer

    def whole(self, completion: dict[str, Any], stop: str | None) -> dict[str, Any]:
        [choice] = completion["choices"]
        said = choice["message"]
        content = [{"type": "text", "text": said["content"]}] if said["content"] else []
        for id, name, arguments in calls_of(said):
            content.append({"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)})
        ended = self._ended(choice["finish_reason"], stop)
        self._finished(completion, said["content"] or "", said.get("tool_calls") or [])
        return {
            **self._envelope(completion),
            "content": content,
            **ended,
            "usage": _usage(completion["usage"]),
        }

    def events(self, chunk: dict[str, Any], stop: str | None) -> Iterator[bytes]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "role" in delta:
                empty = {"content": [], "stop_reason": None, "stop_sequence": None}
                usage = {"input_tokens": 0, "output_tokens": 0}
                yield _event("message_start", message={**self._envelope(chunk), **empty, "usage": usage})
            self._said += delta.get("content") or ""
            self._calls += delta.get("tool_calls") or []
            if delta.get("content"):
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta["content"]})
            for id, name, arguments in calls_of(delta):
                if id:
                    yield from self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            if choice["finish_reason"]:
                yield from self._close()
                self._reason = self._ended(choice["finish_reason"], stop)
        if chunk.get("usage"):
            self._finished(chunk, self._said, self._calls)
            yield _event("message_delta", delta=self._reason, usage=_usage(chunk["usage"]))

    def _finished(self, body: dict[str, Any], said: str, calls: list[dict[str, Any]]) -> None:
        message = {"role": "assistant", "content": said or None, "tool_calls": calls or None}
        self._keep(self._envelope(body)["id"], MessageParam.model_validate(message))

    def end(self) -> Iterable[bytes]:
        return (_event("message_stop"),)

    def failure(self, error: MPICError) -> bytes:
        return event(shaped(error.body(), error.status), "error")

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._blocks, self._open = self._blocks + 1, block["type"]
        yield _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._blocks)

    def _ended(self, finish: str, stop: str | None) -> dict[str, Any]:
        if finish == "stop" and stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": STOP_REASONS.get(finish, finish), "stop_sequence": None}

    @staticmethod
    def _envelope(body: dict[str, Any]) -> dict[str, Any]:
        id = body["id"].replace("chatcmpl-", "msg_")
        return {"id": id, "type": "message", "role": "assistant", "model": body["model"]}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage in Anthropic's words, which count what was read from a cache, what was put into it, and the
    rest of the prompt."""
    read = usage["prompt_tokens_details"]["cached_tokens"]
    created = sum(chunk["reused"] for chunk in usage["mpic"]["chunks"] if chunk["tier"] == "compiled")
    return {
        "input_tokens": usage["prompt_tokens"] - read - created,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "mpic": usage["mpic"],
    }


# ---- blocks


def _texts(content: str | Iterable[PartBlock], where: str) -> Parts:
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
    else:
        for i, block in enumerate(content):
            yield from _parts(block, f"{where}[{i}]")


def _parts(block: PartBlock, at: str) -> Parts:
    """Yield the content parts of a block that is no call and no result."""
    if isinstance(block, TextBlock):
        yield {"type": "text", "text": block.text, "cache_control": block.cache_control}, at
    elif isinstance(block, SearchResultBlock):
        text = "\n".join(part.text for part in block.content)
        yield {"type": "document", "text": text, "name": block.title or block.source or None}, f"{at}.content"
    elif isinstance(block, ImageBlock):
        yield _image(block, f"{at}.source")
    elif isinstance(block, AttachedBlock):
        if block.context:
            yield {"type": "text", "text": block.context}, f"{at}.context"
        yield from _document(block, f"{at}.source")


def _image(block: ImageBlock, at: str) -> tuple[dict[str, Any], str]:
    source = block.source
    if isinstance(source, Base64Source):
        url, field = _data_url(source), "data"
    elif isinstance(source, UrlSource):
        url, field = source.url, "url"
    else:
        url, field = source.file_id, "file_id"
    return {"type": "image_url", "image_url": {"url": url}}, f"{at}.{field}"


def _document(block: AttachedBlock, at: str) -> Parts:
    source, name = block.source, block.title or None
    if isinstance(source, TextSource):
        yield {"type": "document", "text": source.data, "name": name}, f"{at}.data"
    elif isinstance(source, ContentSource):
        content = source.content
        if isinstance(content, str):
            yield {"type": "document", "text": content, "name": name}, f"{at}.content"
            return
        for i, part in enumerate(content):
            inner = f"{at}.content[{i}]"
            if isinstance(part, ImageBlock):
                yield _image(part, f"{inner}.source")
            else:
                yield {"type": "document", "text": part.text, "name": name}, f"{inner}.text"
    elif isinstance(source, Base64Source):
        yield {"type": "file", "file": {"file_data": _data_url(source), "filename": name}}, f"{at}.data"
    elif isinstance(source, UrlSource):
        raise UnsupportedParameter(
            "documents are not fetched: upload it, or send its text", param=f"{at}.url"
        )
    else:
        yield {"type": "file", "file": {"file_id": source.file_id}, "name": name}, f"{at}.file_id"


def _data_url(source: Base64Source) -> str:
    return f"data:{source.media_type};base64,{source.data}"


# ---- routes


class _MessagesRoute(TranslatedRoute):
    dialect = MessagesDialect

    def bounds(self, state: State) -> Bounds:
        """Return the bounds without that of text, because images and documents in base64 are no data URLs here."""
        return Bounds(values=super().bounds(state).values)


router = APIRouter(
    prefix=PATH,
    tags=["messages"],
    route_class=_MessagesRoute,
    responses={"4XX": {"model": MessagesError, "description": "an error the caller can correct"}},
)


@router.post(
    "",
    response_class=JSONResponse,
    responses={
        200: {
            "model": AnswerTurn,
            "description": "the answer; with `stream`, Anthropic's server-sent events",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def create(body: MessagesRequest, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Answer a conversation in Anthropic's form."""
    asked, dialect = body._asked
    linked = dialect.link(asked, body, state, user.id)
    return await chat.answer(request, linked, state, user, dialect)


@router.post("/count_tokens")
async def count_tokens(
    body: CountRequest, request: Request, state: StateDep, user: CurrentUser
) -> TokenCount:
    """Count the tokens of a conversation. Its images and documents are compiled, which an answer then reuses."""
    asked, dialect = body._asked
    return TokenCount(input_tokens=await count(asked, dialect, request, state, user.id))


# ---- errors


def _is_json(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("application/json")


def shaped(body: dict[str, Any], status: int) -> dict[str, Any]:
    """Return the body of an error in Anthropic's shape; our own fields stay."""
    kind = KINDS.get(status, KINDS[400] if status < 500 else "api_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


class MessagesErrors:
    """ASGI middleware that gives all errors of these routes Anthropic's shape, wherever they come from."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            return await self.app(scope, receive, send)
        start: Message | None = None
        body, begun = b"", False

        async def sending(message: Message) -> None:
            nonlocal start, body, begun
            if message["type"] == "http.response.start" and message["status"] >= 400 and _is_json(message):
                start = message
                return
            if start is not None:
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                body = json.dumps(shaped(json.loads(body), start["status"])).encode()
                MutableHeaders(scope=start)["content-length"] = str(len(body))
                await send(start)
                message = {**message, "body": body}
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as exc:  # the framework answers it in front of all middleware, in OpenAI's shape
            if begun:
                raise
            await errors.response(errors.as_mpic_error(exc))(scope, receive, sending)
