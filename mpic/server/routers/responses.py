"""OpenAI's ``/v1/responses``, translated to a chat completion and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mpic.api.requests import ChatRequest, MessageParam
from mpic.api.responses import (
    AnyItem,
    CallItem,
    CallOutputItem,
    Content,
    InputFile,
    InputImage,
    InputRefusal,
    InputText,
    InputTokens,
    ItemReference,
    MessageItem,
    NamedFunction,
    ResponseDeleted,
    ResponseObject,
    ResponsesRequest,
)
from mpic.errors import BadRequest, MPICError
from mpic.http.sse import event
from mpic.server.auth import CurrentUser
from mpic.server.kept_responses import KeptResponse, KeptResponses
from mpic.server.routers import chat
from mpic.server.routers.translation import Parts, TranslatedRoute, Translation, calls_of, count
from mpic.server.state import StateDep

PREVIOUS = "previous_response_id"
LOGPROBS = "message.output_text.logprobs"
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
GIVEN_BACK = (
    "instructions", PREVIOUS, "max_output_tokens", "max_tool_calls", "temperature", "top_p", "user",
    "safety_identifier", "prompt_cache_key", "presence_penalty", "frequency_penalty", "top_logprobs",
)  # fmt: skip


class ResponsesDialect(Translation):
    """Writes the answer to one request as a response.

    Args:
        asked: the request.
        size: its bytes.
    """

    def __init__(self, asked: ResponsesRequest, size: int) -> None:
        super().__init__()
        self.places |= RENAMED
        self.asked, self.size = asked, size
        self.references: list[
            tuple[int, str, str]
        ] = []  # numbers of messages that are kept items, ids, and places
        self.keep: Callable[[KeptResponse], None] = lambda kept: None
        self._own: list[MessageParam] = []  # the messages of this request, without instructions
        self._output: list[dict[str, Any]] = []
        self._body: dict[str, Any] = {}
        self._events = 0
        self._status = "completed"

    # ---- the request

    @classmethod
    def translate(cls, asked: ResponsesRequest, size: int) -> tuple[ChatRequest, ResponsesDialect]:
        dialect = cls(asked, size)
        if asked.instructions:
            dialect.begin("system", "instructions")
            dialect.add([({"type": "text", "text": asked.instructions}, "instructions")])
        if isinstance(asked.input, str):
            dialect.begin("user", "input")
            dialect.add([({"type": "text", "text": asked.input}, "input")])
        else:
            for i, item in enumerate(asked.input or ()):
                dialect._item(item, f"input[{i}]")
        same = (
            "model", "temperature", "top_p", "stream", "parallel_tool_calls", "mpic", "presence_penalty",
            "frequency_penalty", "top_logprobs",
        )  # fmt: skip
        fields: dict[str, Any] = {name: getattr(asked, name) for name in same}
        fields |= {"messages": dialect.messages, "max_tokens": asked.max_output_tokens}
        fields["stream_options"] = {"include_usage": True} if asked.stream else None
        fields["verbosity"] = asked.text.verbosity if asked.text else None
        fields["logprobs"] = bool(asked.top_logprobs) or LOGPROBS in (asked.include or ())
        fields["reasoning_effort"] = asked.reasoning.effort if asked.reasoning else None
        dialect._tools(fields)
        dialect._format(fields)
        return dialect.chat(fields), dialect

    def _item(self, item: AnyItem, at: str) -> None:
        if isinstance(item, MessageItem):
            self.begin(item.role, at, f"{at}.content")
            self.add(_parts(item.content, f"{at}.content"))
        elif isinstance(item, CallItem):
            self.go_on("assistant", at)
            self.call(item.call_id, item.name, item.arguments, at)
            self.places[
                f"{self._last}.tool_calls[{len(self.messages[-1]['tool_calls']) - 1}].function.arguments"
            ] = f"{at}.arguments"
        elif isinstance(item, CallOutputItem):
            self.begin("tool", at, f"{at}.output", tool_call_id=item.call_id)
            self.add(_parts(item.output, f"{at}.output"))
        elif isinstance(item, ItemReference):
            self.begin("assistant", at)
            self.references.append((len(self.messages) - 1, item.id, f"{at}.id"))

    def _tools(self, fields: dict[str, Any]) -> None:
        tools = []
        for i, tool in enumerate(self.asked.tools or ()):
            names = ("name", "description", "parameters", "strict")
            tools.append({"type": "function", "function": {name: getattr(tool, name) for name in names}})
            self.places |= {f"tools[{i}].function.{name}": f"tools[{i}].{name}" for name in names}
        choice = self.asked.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields |= {"tools": tools or None, "tool_choice": choice}

    def _format(self, fields: dict[str, Any]) -> None:
        asked = self.asked.text.format if self.asked.text else None
        if asked is not None:
            schema = asked.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
            if (asked.type == "json_schema") != bool(schema):
                raise BadRequest(
                    "a schema belongs to the type json_schema, and to no other", param="text.format"
                )
            fields["response_format"] = {"type": asked.type, **({"json_schema": schema} if schema else {})}

    def link(self, body: ChatRequest, kept: KeptResponses, user: str) -> ChatRequest:
        """Return the chat with what is kept: the conversation that it goes on from, and items that it names. Raise
        ResponseNotFound."""
        messages = list(body.messages)
        for number, id, place in self.references:
            messages[number] = kept.item(user, id, place)
        first = 1 if self.asked.instructions else 0
        self._own = messages[first:]
        linked = body.model_copy(update={"messages": messages})
        if self.asked.store is not False:
            self.keep = lambda response: kept.keep(user, response)
        if self.asked.previous_response_id is None:
            return linked
        before = kept.get(user, self.asked.previous_response_id, PREVIOUS)
        return self.go_on_from(linked, before, first, PREVIOUS)

    # ---- the answer

    def whole(self, completion: dict[str, Any], stop: str | None) -> dict[str, Any]:
        [choice] = completion["choices"]
        said = choice["message"]
        self._begin(completion)
        if said["content"] or not said.get("tool_calls"):
            part = _text(said["content"] or "", _logprobs(choice))
            self._output.append({**self._message(), "content": [part]})
        for id, name, arguments in calls_of(said):
            self._output.append({**self._call(id, name), "arguments": arguments})
        self._end(choice["finish_reason"])
        return self._finished(completion["usage"])

    def events(self, chunk: dict[str, Any], stop: str | None) -> Iterator[bytes]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "role" in delta:
                self._begin(chunk)
                yield self._event("response.created", response=self._body)
                yield self._event("response.in_progress", response=self._body)
            if delta.get("content") or choice["logprobs"]:
                yield from self._more_text(delta.get("content") or "", _logprobs(choice))
            for id, name, arguments in calls_of(delta):
                yield from self._more_call(id, name, arguments)
            if choice["finish_reason"]:
                if not self._output:
                    yield from self._more_text("")
                self._end(choice["finish_reason"])
                yield from self._done()
        if chunk.get("usage"):
            body = self._finished(chunk["usage"])
            yield self._event(f"response.{self._status}", response=body)

    def end(self) -> Iterable[bytes]:
        return ()

    def failure(self, error: MPICError) -> bytes:
        shown = {name: error.body()["error"][name] for name in ("code", "message", "param", "type")}
        if not self._body:
            return self._event("error", **{name: shown[name] for name in ("code", "message", "param")})
        return self._event("response.failed", response={**self._body, "status": "failed", "error": shown})

    def _begin(self, body: dict[str, Any]) -> None:
        asked = self.asked
        shown = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        self._body = {
            "id": body["id"].replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": body["created"],
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": body["model"],
            "output": [],
            "usage": None,
            "store": asked.store is not False,
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "tool_choice": asked.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}, **shown},
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            **{name: getattr(asked, name) for name in GIVEN_BACK},
        }

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._body['id'].removeprefix('resp_')}_{len(self._output)}"

    def _message(self) -> dict[str, Any]:
        fields = {"type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return {"id": self._item_id("msg"), **fields}

    def _call(self, id: str, name: str) -> dict[str, Any]:
        fields = {
            "type": "function_call",
            "status": "in_progress",
            "call_id": id,
            "name": name,
            "arguments": "",
        }
        return {"id": self._item_id("fc"), **fields}

    def _more_text(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[bytes]:
        if not self._output or self._output[-1]["type"] != "message":
            yield from self._added(self._message())
            part = _text("")
            self._output[-1]["content"].append(part)
            yield self._part_event("response.content_part.added", part=part)
        part = self._output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _more_call(self, id: str, name: str, arguments: str) -> Iterator[bytes]:
        if id:
            yield from self._added(self._call(id, name))
        self._output[-1]["arguments"] += arguments
        yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _added(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._done()
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _done(self) -> Iterator[bytes]:
        """Yield the events at the end of the last item."""
        if not self._output:
            return
        item = self._output[-1]
        if item["type"] == "message":
            part = item["content"][0]
            yield self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            yield self._part_event("response.content_part.done", part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        if item["status"] == "in_progress":
            item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _end(self, finish: str) -> None:
        self._status = "incomplete" if finish == "length" else "completed"
        for item in self._output[:-1]:
            item["status"] = "completed"
        self._output[-1]["status"] = self._status

    def _finished(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the finished response, and keep it."""
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        self._body |= {
            "completed_at": int(time.time()),
            "status": self._status,
            "incomplete_details": incomplete,
            "output": self._output,
            "usage": _usage(usage),
        }
        items = {item["id"]: _as_message(item) for item in self._output}
        earlier, size = (self.before.messages, self.before.size) if self.before else ((), 0)
        messages = (*earlier, *self._own, *_joined(items.values()))
        written = sum(len(str(item)) for item in self._output)
        self.keep(KeptResponse(self._body, messages, size + self.size + written, items))
        return self._body

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        where = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(name, **where, **fields)

    def _part_event(self, name: str, /, **fields: Any) -> bytes:
        return self._item_event(name, content_index=0, **fields)


def _text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _logprobs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return choice["logprobs"]["content"] if choice["logprobs"] else []


def _as_message(item: dict[str, Any]) -> MessageParam:
    """Return an output item as a message of a chat."""
    if item["type"] == "message":
        return MessageParam(role="assistant", content=item["content"][0]["text"])
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return MessageParam.model_validate({"role": "assistant", "tool_calls": [call]})


def _joined(messages: Iterable[MessageParam]) -> list[MessageParam]:
    """Return the messages of one answer with its calls in the message of its words."""
    joined: list[MessageParam] = []
    for message in messages:
        if joined and message.tool_calls:
            calls = [*(joined[-1].tool_calls or ()), *message.tool_calls]
            joined[-1] = joined[-1].model_copy(update={"tool_calls": calls})
        else:
            joined.append(message)
    return joined


def _parts(content: str | Content, where: str) -> Parts:
    """Yield the content parts of a message or of the output of a call."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if isinstance(part, InputText):
            yield {"type": "text", "text": part.text}, f"{at}.text"
        elif isinstance(part, InputRefusal):
            yield {"type": "text", "text": part.refusal}, f"{at}.refusal"
        elif isinstance(part, InputImage):
            field = _one_of(part, ("image_url", "file_id"), at)
            yield {"type": "image_url", "image_url": {"url": getattr(part, field)}}, f"{at}.{field}"
        elif isinstance(part, InputFile):
            field = _one_of(part, ("file_id", "file_data"), at)
            named = {"filename": part.filename} if field == "file_data" and part.filename else {}
            yield {"type": "file", "file": {field: getattr(part, field), **named}}, f"{at}.{field}"


def _one_of(part: InputImage | InputFile, names: tuple[str, str], at: str) -> str:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"{at} needs one of {names[0]} and {names[1]}", param=at)
    return given[0]


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    written = sum(chunk["reused"] for chunk in usage["mpic"]["chunks"] if chunk["tier"] == "compiled")
    read = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "mpic": usage["mpic"],
    }


# ---- routes


class _ResponsesRoute(TranslatedRoute):
    dialect = ResponsesDialect
    text = "input"


router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=_ResponsesRoute)


@router.post(
    "",
    response_class=JSONResponse,
    responses={
        200: {
            "model": ResponseObject,
            "description": "the response; with `stream`, server-sent events of OpenAI's responses",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def create(body: ResponsesRequest, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Answer a conversation in the form of responses. They are kept in memory for an hour after their last use."""
    asked, dialect = body._asked
    linked = dialect.link(asked, state.responses, user.id)
    return await chat.answer(request, linked, state, user, dialect)


@router.post("/input_tokens")
async def input_tokens(
    body: ResponsesRequest, request: Request, state: StateDep, user: CurrentUser
) -> InputTokens:
    """Count the tokens of a conversation. Its images and documents are compiled, which an answer then reuses."""
    asked, dialect = body._asked
    linked = dialect.link(asked, state.responses, user.id)
    return InputTokens(input_tokens=await count(linked, dialect, request, state, user.id))


@router.get("/{response_id}", response_model=ResponseObject)
async def get_response(response_id: str, state: StateDep, user: CurrentUser) -> Response:
    """Show a response that is still kept."""
    return JSONResponse(state.responses.get(user.id, _own(response_id), "response_id").body)


@router.delete("/{response_id}")
async def delete_response(response_id: str, state: StateDep, user: CurrentUser) -> ResponseDeleted:
    """Forget a response. Others that went on from it keep their conversations."""
    state.responses.remove(user.id, _own(response_id), "response_id")
    return ResponseDeleted(id=response_id)


def _own(id: str) -> str:
    """Return the id of a response of this dialect, whatever is asked for."""
    return f"resp_{id.removeprefix('resp_')}"
