"""A small synchronous client: what the command line and the demo need of a running server."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
Progress = Callable[[int], None]


class APIError(Exception):
    """The server refused, or could not be reached.

    Args:
        code: the server's stable error code; ``unreachable`` when there was no answer.
        status: HTTP status, 0 when there was no answer.
    """

    def __init__(self, message: str, code: str, status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


class Client:
    """Talks to one server. Every failure is an APIError.

    Args:
        transport: for tests, an httpx transport in place of the network.
    """

    def __init__(self, url: str = DEFAULT_URL, transport: httpx.BaseTransport | None = None) -> None:
        timeout = httpx.Timeout(10, read=600, write=600)
        local = httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")  # proxies do not reach this machine
        self._http = httpx.Client(base_url=url, timeout=timeout, transport=transport, trust_env=not local)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with _reaching(self._http):
            response = self._http.request(method, path, **options)
        _raise_for(response)
        return response.json()

    def health(self) -> dict[str, Any]:
        return self.request("GET", "/health")

    # ---- files

    def upload(
        self,
        path: Path,
        handle: str | None = None,
        expires_seconds: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Upload one file. ``progress`` is told the bytes sent since it was last called."""
        form = {"purpose": "user_data"}
        if handle:
            form["handle"] = handle
        if expires_seconds:
            form |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_seconds)}
        with path.open("rb") as file:
            source: Any = _Counted(file, progress) if progress else file
            mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            return self.request("POST", "/v1/files", data=form, files={"file": (path.name, source, mime)})

    def file(self, id: str) -> dict[str, Any]:
        return self.request("GET", f"/v1/files/{id}")

    def files(self) -> Iterator[dict[str, Any]]:
        """All files, oldest first."""
        query: dict[str, Any] = {"order": "asc", "limit": 1000}
        while True:
            page = self.request("GET", "/v1/files", params=query)
            yield from page["data"]
            if not page["has_more"]:
                return
            query["after"] = page["last_id"]

    def delete(self, id: str) -> dict[str, Any]:
        return self.request("DELETE", f"/v1/files/{id}")

    def wait(self, id: str, timeout: float = 600.0) -> dict[str, Any]:
        """The file once it is compiled. Raises APIError when that failed or takes longer than ``timeout``."""
        deadline, pause = time.monotonic() + timeout, 0.05
        while True:
            file = self.file(id)
            if file["state"] == "ready":
                return file
            if file["state"] == "failed":
                raise APIError(
                    f"{file['filename']}: {file.get('status_details') or 'not compiled'}", "compile_failed"
                )
            if time.monotonic() > deadline:
                raise APIError(f"{file['filename']} is not compiled after {timeout:g} s", "timeout")
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)

    # ---- chat

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        return self.request("POST", "/v1/chat/completions", json={"messages": messages, **options})

    def stream(self, messages: list[dict[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer; the last one carries the usage."""
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
        with _reaching(self._http), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
            _raise_for(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise APIError(chunk["error"]["message"], chunk["error"]["code"], response.status_code)
                yield chunk


def data_url(path: Path) -> str:
    """The file as a data URL."""
    mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


@contextmanager
def _reaching(http: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as exc:
        what = str(exc) or type(exc).__name__
        raise APIError(
            f"no answer from {http.base_url}: {what}. Is `mpic serve` running?", "unreachable"
        ) from None


def _raise_for(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        error = response.json()["error"]
        message, code = error["message"], error["code"]
    except (ValueError, KeyError, TypeError):
        message, code = f"HTTP {response.status_code} without an error body", "bad_response"
    raise APIError(message, code, response.status_code)


class _Counted:
    """A file that tells how much of it has been read."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._progress(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
