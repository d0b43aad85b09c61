"""JSON bodies: large ones are parsed on a thread, so that the streams of others go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from mpic.errors import BadRequest

LARGE = 1 << 16


class _Request(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await run_in_threadpool(parse, body) if len(body) > LARGE else parse(body)
        return self._json


class JSONRoute(APIRoute):
    """A route whose JSON body is read by ``parse``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handler


def parse(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        BadRequest: it holds half of a surrogate pair, which JSON can escape but which is no text: no tokenizer takes it
            and no response can say it; or it is nested too deeply.
        json.JSONDecodeError: it is not JSON.
    """
    try:
        value = json.loads(body)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start}") from None
    if b"\\u" in body:  # only an escape can make one
        _refuse_half_pairs(value)
    return value


def _refuse_half_pairs(body: Any) -> None:
    waiting = [body]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise BadRequest("a string contains half of a surrogate pair") from error
