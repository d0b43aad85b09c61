"""The REST API as the pages use it: in this process, with the key of who is looking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

BASE_URL = "http://127.0.0.1"  # a name the host guard always admits


class APIError(Exception):
    """What the API refused, in its own words."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


class API:
    """The calls the pages make."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            transport=InProcess(app), base_url=BASE_URL, headers=headers, timeout=None
        )

    async def files(self) -> list[dict[str, Any]]:
        """Newest first."""
        return (await self._json("GET", "/v1/files"))["data"]

    async def file(self, id: str) -> dict[str, Any]:
        return await self._json("GET", f"/v1/files/{id}")

    async def upload(self, name: str, data: bytes, handle: str) -> dict[str, Any]:
        form = {"purpose": "user_data", "handle": handle}
        return await self._json("POST", "/v1/files", data=form, files={"file": (name, data)})

    async def content(self, id: str) -> bytes:
        response = await self._http.get(f"/v1/files/{id}/content")
        _raise_for(response)
        return response.content

    async def delete(self, id: str) -> None:
        await self._json("DELETE", f"/v1/files/{id}")

    async def extend(self, id: str, seconds: int) -> None:
        """Let a file live for so many seconds from now."""
        await self._json("PATCH", f"/v1/files/{id}", json={"ttl": seconds})

    async def references(self) -> list[dict[str, Any]] | None:
        """Newest first; None where the server has no reference library."""
        try:
            return (await self._json("GET", "/v1/references"))["data"]
        except APIError as exc:
            if exc.code == "not_found":
                return None
            raise

    async def search(self, query: str | None, image: str | None) -> list[dict[str, Any]]:
        """References like a text or an image (a data URL), best first."""
        wanted = {k: v for k, v in (("query", query), ("image", image)) if v}
        return (await self._json("POST", "/v1/references/search", json={**wanted, "top_k": 12}))["data"]

    async def remove(self, id: str) -> None:
        await self._json("DELETE", f"/v1/references/{id}")

    async def thumbnail(self, id: str) -> bytes:
        """Of a reference: a small PNG."""
        response = await self._http.get(f"/v1/references/{id}/thumbnail")
        _raise_for(response)
        return response.content

    async def health(self) -> dict[str, Any]:
        response = await self._http.get("/health")
        if response.status_code != 503:  # "not ready" is an answer too
            _raise_for(response)
        return response.json()

    async def metrics(self) -> str | None:
        """The text of ``/metrics``; None where this server has none or this user may not read it."""
        response = await self._http.get("/metrics")
        if response.status_code in (401, 403, 404):
            return None
        _raise_for(response)
        return response.text

    async def ask(
        self, messages: list[dict[str, Any]], policy: str, max_tokens: int
    ) -> AsyncIterator[tuple[str, dict[str, Any] | None]]:
        """Pieces of the answer as ``(text, None)``, at the end ``("", usage)``."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "mpic": {"trace": True, **({"policy": policy} if policy else {})},
        }
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                _raise_for(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    raise APIError(frame["error"]["message"], frame["error"]["code"], 500)
                if frame.get("usage"):
                    yield "", frame["usage"]
                for choice in frame["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text, None

    async def _json(self, method: str, url: str, **options: Any) -> Any:
        response = await self._http.request(method, url, **options)
        _raise_for(response)
        return response.json()


def _raise_for(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        error = response.json()["error"]
        message, code = error["message"], error["code"]
    except (ValueError, KeyError, TypeError):
        message, code = f"HTTP {response.status_code} without an error body", "bad_response"
    raise APIError(message, code, response.status_code)


class InProcess(httpx.AsyncBaseTransport):
    """An ASGI application as a transport that streams (httpx's own waits for the whole answer)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(k.lower(), v) for k, v in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
            "root_path": "",
            "state": {},
        }
        exchange = _Exchange(body)
        exchange.task = asyncio.create_task(exchange.run(self._app, scope))
        status, headers = await exchange.started()
        return httpx.Response(status, headers=headers, stream=exchange)


class _Exchange(httpx.AsyncByteStream):
    """One request and its response, message by message."""

    task: asyncio.Task[None]

    def __init__(self, body: bytes) -> None:
        self._body: list[bytes] = [body]
        self._messages: asyncio.Queue[Message | BaseException | None] = asyncio.Queue(16)
        self._gone = asyncio.Event()

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._messages.put)
        except Exception as exc:
            await self._messages.put(exc)
        await self._messages.put(None)

    async def started(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        message = await self._messages.get()
        if isinstance(message, BaseException):
            raise message
        assert message is not None
        return message["status"], message["headers"]

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            if message["type"] == "http.response.body":
                yield message.get("body", b"")

    async def aclose(self) -> None:
        self._gone.set()
        while not self.task.done():  # a full queue must not hold the application back from ending
            while not self._messages.empty():
                self._messages.get_nowait()
            await asyncio.wait([self.task], timeout=0.01)
