"""JSON bodies: bounded before they are parsed; large ones are parsed and validated beside the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from mpic import bounded_json
from mpic.bounded_json import Bounds, TooMuch
from mpic.errors import BadRequest, ContextLengthExceeded, MPICError, TooLarge
from mpic.server import errors

if TYPE_CHECKING:
    from mpic.server.state import State

LARGE = 1 << 14
"""Bodies of more bytes are not worked on in the event loop."""
ESCAPED = 6
"""Bytes that JSON may spend on one byte of text (``\\u0041``)."""
VALUES = 1 << 14
"""Most values of a body that is no chat."""
BESIDE = 1 << 20
"""Bytes of text that a chat may hold beside what the model reads: names, ids, annotations of earlier answers."""


class _Request(Request):
    route: JSONRoute

    async def body(self) -> bytearray:  # type: ignore[override]
        """In one growing buffer: to join the pieces of a large body at the end would hold up the event loop."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for piece in self.stream():
                body += piece
            self._body = body
        return self._body

    async def json(self) -> Any:
        """The route's model, validated, or None for ``null``."""
        if not hasattr(self, "_json"):
            body, state = await self.body(), self.app.state.mpic
            if len(body) <= LARGE:
                self._json = self.route.read(body, state)
            else:
                self._json = await state.rooms.bodies.run(self, self.route.read, body, state)
        return self._json


class JSONRoute(APIRoute):
    """A route whose JSON body is read by ``read``. FastAPI then finds a model that is valid already."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            reading = _Request(request.scope, request.receive)
            reading.route = self
            return await handle(reading)

        return handler

    def bounds(self, state: State) -> Bounds:
        """How much a body may hold."""
        return Bounds(values=min(state.config.server.max_body_values, VALUES))

    def refusal(self, error: TooMuch, state: State) -> MPICError:
        """The error for a body that holds more."""
        if error.what == "depth":
            return BadRequest(f"the body has {error}")
        return TooLarge(f"the body has {error}")

    def read(self, body: bytes | bytearray, state: State) -> BaseModel | None:
        """The value of a body as the route's model.

        Raises:
            BadRequest: it is no JSON text, or not what the model wants.
            TooLarge, ContextLengthExceeded: it holds too much.
            json.JSONDecodeError: it is not JSON.
        """
        try:
            value = parse(body, self.bounds(state))
        except TooMuch as error:
            raise self.refusal(error, state) from None
        assert self.body_field is not None
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]
        if value is None:
            return None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            found = [{**e, "loc": ("body", *e["loc"])} for e in error.errors(include_url=False)]
            raise errors.from_validation(found, value, self.path == errors.CHAT) from None


class ChatRoute(JSONRoute):
    """The route of chat completions, whose bodies are bounded by what the model can read."""

    def bounds(self, state: State) -> Bounds:
        context, longest = state.engine.info.context_length, state.template.longest_token
        return Bounds(
            values=min(state.config.server.max_body_values, 4096 + 16 * context),
            text=None if longest is None else BESIDE + ESCAPED * context * longest,
        )

    def refusal(self, error: TooMuch, state: State) -> MPICError:
        if error.what not in ("values", "text"):
            return super().refusal(error, state)
        context = state.engine.info.context_length
        return ContextLengthExceeded(
            f"the body has {error}; the model's context is {context} tokens",
            param="messages",
            context_length=context,
        )


def parse(body: bytes | bytearray, bounds: Bounds | None = None) -> Any:
    """The value of a JSON text.

    Raises:
        BadRequest: it is not UTF-8, is nested too deeply, or holds half of a surrogate pair or a number with too many
            digits.
        TooMuch: it is beyond the bounds.
        json.JSONDecodeError: it is not JSON.
    """
    try:
        return bounded_json.read(body, bounds or Bounds())
    except (TooMuch, json.JSONDecodeError):
        raise
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
