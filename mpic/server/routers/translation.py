"""The translation of other dialects' requests to chat completions: what ``messages`` and ``responses`` share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import Any, ClassVar, cast

from fastapi import Request
from pydantic import BaseModel, ValidationError

from mpic.api.requests import ChatRequest
from mpic.errors import MPICError
from mpic.http import errors
from mpic.http.sse import while_connected
from mpic.prompt import TextSegment
from mpic.prompt.messages import Handles
from mpic.server.json_routes import PromptRoute
from mpic.server.kept_responses import KeptResponse
from mpic.server.routers import chat
from mpic.server.routers.chat import Dialect
from mpic.server.routers.models import check_model
from mpic.server.state import State

MESSAGE = re.compile(r"messages\[(\d+)\]")
Parts = Iterable[tuple[dict[str, Any], str]]
"""Content parts of a chat, each with the field of the client's request that it is made of."""


class Translation(Dialect):
    """Collects the messages of a chat, and remembers where each of them comes from.

    Attributes:
        messages: the messages so far.
        before: the response that the chat goes on from, if any (``go_on_from``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.before: KeptResponse | None = None
        self._at, self._before_place = 0, ""

    @classmethod
    def translate(cls, asked: Any, size: int) -> tuple[ChatRequest, Translation]:
        """Return a request as a chat completion, with the dialect that writes its answers.

        Args:
            size: bytes of the request.

        Raises:
            MPICError: the error to report if it cannot be translated.
        """
        raise NotImplementedError

    @property
    def _last(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def begin(self, role: str, place: str, content: str | None = None, **fields: Any) -> None:
        """Begin a new message.

        Args:
            content: the field that holds its content; None: it is ``place`` itself.
        """
        self.messages.append({"role": role, "content": [], **fields})
        self.places[self._last] = place
        self.places[f"{self._last}.content"] = content or place

    def go_on(self, role: str, place: str, content: str | None = None) -> None:
        """Begin a new message (``begin``) unless the last one has this role."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.begin(role, place, content)

    def add(self, parts: Parts) -> None:
        """Add parts to the last message."""
        content = self.messages[-1]["content"]
        for part, place in parts:
            self.places[f"{self._last}.content[{len(content)}]"] = place
            content.append(part)

    def call(self, id: str, name: str, arguments: str, place: str) -> None:
        """Add a tool call to the last message."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.places[f"{self._last}.tool_calls[{len(calls)}]"] = place
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def go_on_from(self, body: ChatRequest, kept: KeptResponse, at: int, place: str) -> ChatRequest:
        """Return a chat with the conversation that it goes on from.

        Args:
            at: number of the message in front of which it stands.
            place: the field that names it.
        """
        self.before, self._at, self._before_place = kept, at, place
        messages = [*body.messages[:at], *kept.messages, *body.messages[at:]]
        return body.model_copy(update={"messages": messages})

    def place(self, param: str | None) -> str | None:
        found = MESSAGE.match(param or "")
        if param is None or found is None or self.before is None or int(found[1]) < self._at:
            return super().place(param)
        own = int(found[1]) - len(self.before.messages)
        return (
            super().place(f"messages[{own}]{param[found.end() :]}") if own >= self._at else self._before_place
        )

    def chat(self, fields: dict[str, Any]) -> ChatRequest:
        """Return the chat completion of these fields. Raise the error to report, with the client's own names of
        fields, if there is none."""
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as invalid:
            error = errors.invalid(invalid, fields, True)
            self.rename(error)
            raise error from None


class TranslatedRoute(PromptRoute):
    """A route whose bodies are translated where they are parsed. The result is ``_asked`` of the body."""

    dialect: ClassVar[type[Translation]]

    def read(self, body: bytes | bytearray, state: State) -> BaseModel | None:
        size = len(body)
        asked = cast(Any, super().read(body, state))
        if asked is not None:
            asked._asked = self.dialect.translate(asked, size)
        return asked


async def count(asked: ChatRequest, dialect: Dialect, request: Request, state: State, user: str) -> int:
    """Return the tokens of a conversation. Its images and documents are compiled, which an answer then reuses.

    Raises:
        ClientDisconnected: the client closed the connection.
        MPICError: the conversation is refused; the error names the fields of the client's own request.
    """

    def begin() -> tuple[int, list[Future[int]]]:
        generation, _ = chat.prepare(asked, state, user, Handles())
        compile = partial(state.engine.compile, wrapping=generation.policy.wrapping, exists=generation.exists)
        texts = sum(len(part) for part in generation.prompt.segments if isinstance(part, TextSegment))
        # in a context of its own: what an engine begins there must not end with this work
        return texts, [Context().run(compile, chunk) for chunk in generation.prompt.chunks]

    try:
        check_model(state, asked.model)
        counted, compiling = await state.pools.prompts.run(request, begin)
        for chunk in compiling:
            counted += await while_connected(request, asyncio.shield(asyncio.wrap_future(chunk)))
    except MPICError as error:
        dialect.rename(error)
        raise
    return counted


def calls_of(message: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the id, the name and the arguments, JSON, of the calls in a message or in a delta of one."""
    for call in message.get("tool_calls") or ():
        yield call.get("id", ""), call["function"].get("name", ""), call["function"].get("arguments", "")
