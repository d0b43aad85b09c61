"""Routes with JSON bodies, which are bounded before they are parsed. Large ones are parsed and validated on a thread.
Forms of these routes are bounded, too (``forms``)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData

from mpic.bounded_json import Bounds, TooMuch
from mpic.errors import BadRequest, ContextLengthExceeded, MPICError, TooLarge
from mpic.http import errors
from mpic.http.body import parse
from mpic.server.forms import read_form

if TYPE_CHECKING:
    from mpic.server.state import State

SMALL, MEDIUM = 1 << 14, 1 << 16
"""Bytes of the largest body that is parsed on the event loop whatever it holds, and of the largest that is parsed there
because it is mostly text; others are parsed on a thread, which takes longer to begin than these take."""
FEW = 1 << 11
"""Most values and members of a body of mostly text."""
ESCAPED_BYTES = 6
"""Bytes that JSON may spend on one byte of text (``\\u0041``)."""
MAX_VALUES = 1 << 14
"""Most values of a body that is not a chat."""
EXTRA_TEXT_BYTES = 1 << 20
"""Bytes of text in a chat that the model does not read: names, ids, annotations of earlier answers."""


def is_quick(body: bytes | bytearray) -> bool:
    """Return whether a body is parsed and validated so soon that the event loop may wait for it. Commas, colons and
    brackets in texts count, too."""
    if len(body) <= SMALL:
        return True
    return len(body) <= MEDIUM and sum(map(body.count, (b",", b":", b"[", b"{"))) <= FEW


class _JsonRequest(Request):
    route: JSONRoute

    async def body(self) -> bytearray:  # ty: ignore[incompatible-method-override] (Starlette reads it as bytes)
        """Read the body into one growing buffer; joining the pieces at the end would hold up the event loop."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for piece in self.stream():
                body += piece
            self._body = body
        return cast(bytearray, self._body)

    async def json(self) -> Any:
        """Return the route's model, validated, or None for ``null``."""
        if not hasattr(self, "_json"):
            body, state = await self.body(), self.app.state.mpic
            if is_quick(body):
                self._json = self.route.read(body, state)
            else:
                self._json = await state.pools.parsing.run(self, self.route.read, body, state)
                body.clear()  # or the text would be held twice until the answer has ended
        return self._json

    async def form(self) -> FormData:  # ty: ignore[incompatible-method-override] (FastAPI only awaits it)
        """Return the form of an upload, see ``read_form``."""
        if self._form is None:
            self._form = await read_form(self, self.app.state.mpic.library.files.arriving)
        return self._form


class JSONRoute(APIRoute):
    """A route whose JSON body is read by ``read``. FastAPI then receives a model that is valid already.

    Attributes:
        openai: its fields are OpenAI's, with the reasons of ``OPENAI_FIELDS``.
        text: the field that holds most of the text.
    """

    openai = False
    text = "messages"

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            reading = _JsonRequest(request.scope, request.receive)
            reading.route = self
            return await handle(reading)

        return handler

    def bounds(self, state: State) -> Bounds:
        """Return how much a body may hold."""
        return Bounds(values=min(state.config.server.max_body_values, MAX_VALUES))

    def refusal(self, error: TooMuch, state: State) -> MPICError:
        """Return the error for a body that holds more."""
        if error.what == "depth":
            return BadRequest(f"the body has {error}")
        return TooLarge(f"the body has {error}")

    def read(self, body: bytes | bytearray, state: State) -> BaseModel | None:
        """Return the body as the route's model.

        Raises:
            BadRequest: it is not a JSON text, or it does not fit the model.
            TooLarge, ContextLengthExceeded: it holds too much.
        """
        try:
            value = parse(body, self.bounds(state))
        except TooMuch as error:
            raise self.refusal(error, state) from None
        assert self.body_field is not None
        model = cast(type[BaseModel], self.body_field.field_info.annotation)
        if value is None:
            return None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise errors.invalid(error, value, self.openai) from None


class PromptRoute(JSONRoute):
    """A route whose bodies are prompts, which are bounded by the model's context."""

    def bounds(self, state: State) -> Bounds:
        context, longest = state.engine.info.context_length, state.template.longest_token
        return Bounds(
            values=min(state.config.server.max_body_values, 4096 + 16 * context),
            text=None if longest is None else EXTRA_TEXT_BYTES + ESCAPED_BYTES * context * longest,
        )

    def refusal(self, error: TooMuch, state: State) -> MPICError:
        if error.what not in ("values", "text"):
            return super().refusal(error, state)
        context = state.engine.info.context_length
        return ContextLengthExceeded(
            f"the body has {error}; the model's context is {context} tokens",
            param=self.text,
            context_length=context,
        )


class ChatRoute(PromptRoute):
    """A route for chat completions."""

    openai = True
