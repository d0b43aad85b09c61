"""Every request of the REST API as a value that says what to send and how to read the response.

This module does no I/O, so the synchronous and the asynchronous client cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from mpic.api.resources import ReferencesFound
from mpic.client import types
from mpic.client.arguments import check_id, check_messages, check_options, check_seconds
from mpic.client.errors import BadResponse
from mpic.client.sources import Upload
from mpic.errors import BadRequest

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class ApiRequest(Generic[T]):
    """A request of the API.

    Args:
        read: converts the response to a result.
        repeatable: True if sending it twice does no harm, so that it is sent again when the connection breaks.
        accept: returns whether a response with an error status, whose body has been read, still counts as a result.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    form: Mapping[str, str] | None = None
    upload: Upload | None = None
    repeatable: bool = False
    accept: Callable[[httpx.Response], bool] = lambda response: False

    @property
    def can_resend(self) -> bool:
        """Return whether the request can be sent a second time; an upload from a pipe cannot."""
        return self.upload is None or self.upload.replayable

    def result(self, response: httpx.Response) -> T:
        """Return the result in the response. Raise BadResponse if the response does not come from this API."""
        try:
            return self.read(response)
        except (ValueError, KeyError, TypeError) as exc:
            raise BadResponse(f"{self.method} {self.path}: not an answer of this API: {exc}") from exc


class ChatOptions(TypedDict, total=False):
    """Fields of a chat completion besides ``messages`` and ``stream``. The server has defaults for the others.

    ``policy``, ``press``, ``retrieval`` (``"always"``, ``"auto"`` or a dictionary) and ``trace`` are ours; further
    options of ours go in ``mpic``, further fields of the request in ``extra_body``.
    """

    model: str | None
    policy: str | None
    press: str | None
    retrieval: str | Mapping[str, Any] | None
    trace: bool
    mpic: Mapping[str, Any] | None
    max_tokens: int | None
    max_completion_tokens: int | None
    temperature: float | None
    top_p: float | None
    n: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    stream_options: Mapping[str, Any] | None
    extra_body: Mapping[str, Any] | None


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {k: v for k, v in values.items() if v is not None}


def one_of_two(name: str, value: T | None, older: str, old_value: T | None) -> T | None:
    """Return the value of a parameter that also has an older name. Raise TypeError if both are given."""
    if value is not None and old_value is not None:
        raise TypeError(f"{older} is the older name of {name}: give one of them")
    return old_value if value is None else value


def with_outcome(done: M, made: M) -> M:
    """Return the newer state of an upload with the ``outcome`` carried over, which only the response to the upload
    has."""
    outcome = getattr(made, "outcome", None)
    return done if outcome is None else done.model_copy(update={"outcome": outcome})


def path(*parts: str) -> str:
    """Return a path under /v1 with quoted ids. An empty id is refused, because it would name the whole collection."""
    for part in parts:
        check_id(part)
    return "/v1/" + "/".join(_quoted(part) for part in parts)


def _quoted(id: str, safe: str = "") -> str:
    """Return an id as a part of a path. Raise BadRequest if it is not Unicode."""
    try:
        return quote(id, safe)
    except UnicodeEncodeError as error:
        raise BadRequest(f"the id {id!r} is not Unicode", param="id") from error


def as_model(model: type[M]) -> Callable[[httpx.Response], M]:
    """Return a reader of responses that are one object."""
    return lambda response: model.model_validate(response.json())


def get(model: type[M], *parts: str, **params: Any) -> ApiRequest[M]:
    """Return the request of one object, or of a page of a collection."""
    return ApiRequest("GET", path(*parts), as_model(model), params=given(**params), repeatable=True)


# ---- chat


def conversation(messages: Sequence[Mapping[str, Any]] | str) -> Sequence[Mapping[str, Any]]:
    """Return messages as they are, and a plain string as one message of the user. Raise TypeError if it is
    neither."""
    check_messages(messages)
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def chat(
    messages: Sequence[Mapping[str, Any]], stream: bool, options: ChatOptions
) -> ApiRequest[types.ChatCompletion]:
    """Return the request of a chat completion. It is repeatable, because computing an answer twice does no harm."""
    fields: dict[str, Any] = dict(options)
    check_options(fields, ChatOptions.__annotations__)
    trace, extra = fields.pop("trace", None), dict(fields.pop("extra_body", None) or {})
    named = {name: fields.pop(name, None) for name in ("policy", "press", "retrieval")}
    ours = given(**named, trace=trace)
    ours |= fields.pop("mpic", None) or {}
    ours |= extra.pop("mpic", None) or {}
    body = {"messages": list(messages), **given(**fields), **({"mpic": ours} if ours else {}), **extra}
    if stream:
        body["stream"] = True
        body.setdefault("stream_options", {"include_usage": True})
    return ApiRequest(
        "POST", path("chat", "completions"), as_model(types.ChatCompletion), json=body, repeatable=True
    )


# ---- files, caches and references


def content(collection: str, id: str) -> ApiRequest[bytes]:
    return ApiRequest("GET", path(collection, id, "content"), lambda r: r.content, repeatable=True)


def update(collection: str, model: type[M], id: str, **fields: Any) -> ApiRequest[M]:
    """Return the request for a change; fields set to ``...`` stay as they are."""
    body = {name: value for name, value in fields.items() if value is not ...}
    for name in ("ttl", "kv_ttl"):
        check_seconds(name, body.get(name))
    return ApiRequest("PATCH", path(collection, id), as_model(model), json=body, repeatable=True)


def prefetch(collection: str, model: type[M], id: str) -> ApiRequest[M]:
    return ApiRequest("POST", path(collection, id, "prefetch"), as_model(model), repeatable=True)


def delete(collection: str, id: str) -> ApiRequest[types.Deleted]:
    """Return a request that is not repeatable, because a second delete would find nothing."""
    return ApiRequest("DELETE", path(collection, id), as_model(types.Deleted))


# ---- files


def file_create(
    file: Upload,
    handle: str | None,
    ttl: int | None,
    replace: bool,
    split: Mapping[str, Any] | str | None,
    press: str | None,
    purpose: str,
    kv_ttl: int | None = None,
) -> ApiRequest[types.File]:
    """Return the request of an upload. It is repeatable if it has a handle, because a repeated upload then makes no
    second file."""
    check_seconds("ttl", ttl)
    check_seconds("kv_ttl", kv_ttl)
    lives = {name: str(value) for name, value in given(ttl=ttl, kv_ttl=kv_ttl).items()}
    form: dict[str, Any] = {"purpose": purpose, **given(handle=handle, press=press), **lives}
    if replace:
        form["replace"] = "true"
    if split is not None:
        form["split"] = _split_text(split)
    read, named = as_model(types.File), handle is not None
    return ApiRequest("POST", path("files"), read, form=form, upload=file, repeatable=named)


def file_put(
    handle: str,
    file: Upload,
    ttl: int | None,
    replace: bool,
    split: Mapping[str, Any] | str | None,
    press: str | None,
    purpose: str,
    kv_ttl: int | None = None,
) -> ApiRequest[types.File]:
    check_seconds("ttl", ttl)
    check_seconds("kv_ttl", kv_ttl)
    params = {"purpose": purpose, "filename": file.name, "replace": "true" if replace else "false"}
    params |= given(ttl=ttl, kv_ttl=kv_ttl, press=press, split=_split_text(split))
    where = path("files", handle)
    return ApiRequest("PUT", where, as_model(types.File), params=params, upload=file, repeatable=True)


def _split_text(split: Mapping[str, Any] | str | None) -> str | None:
    return split if split is None or isinstance(split, str) else json.dumps(dict(split))


# ---- uploads in parts


def upload_create(
    filename: str,
    size: int,
    handle: str | None,
    ttl: int | None,
    replace: bool,
    split: Mapping[str, Any] | str | None,
    press: str | None,
    purpose: str,
    kv_ttl: int | None = None,
) -> ApiRequest[types.Upload]:
    check_seconds("ttl", ttl)
    check_seconds("kv_ttl", kv_ttl)
    body = {"filename": filename, "bytes": size, "purpose": purpose, "replace": replace}
    body |= given(handle=handle, ttl=ttl, kv_ttl=kv_ttl, press=press, split=_split_text(split))
    return ApiRequest("POST", path("uploads"), as_model(types.Upload), json=body)


def upload_add_part(id: str, data: Upload) -> ApiRequest[types.UploadPart]:
    """Return a repeatable request: only the parts named on completion count."""
    where, read = path("uploads", id, "parts"), as_model(types.UploadPart)
    return ApiRequest("POST", where, read, upload=data, repeatable=True)


def upload_complete(id: str, part_ids: Sequence[str], md5: str | None) -> ApiRequest[types.Upload]:
    where, body = path("uploads", id, "complete"), {"part_ids": list(part_ids), **given(md5=md5)}
    return ApiRequest("POST", where, as_model(types.Upload), json=body, repeatable=True)


def upload_cancel(id: str) -> ApiRequest[types.Upload]:
    return ApiRequest("POST", path("uploads", id, "cancel"), as_model(types.Upload), repeatable=True)


# ---- caches


def cache_create(
    text: str | None,
    chunks: Sequence[str] | None,
    split: Mapping[str, Any] | str | None,
    name: str | None,
    ttl: int | None,
) -> ApiRequest[types.Cache]:
    check_seconds("ttl", ttl)
    cut = {"mode": split} if isinstance(split, str) else split
    body = given(text=text, chunks=None if chunks is None else list(chunks), split=cut, name=name, ttl=ttl)
    return ApiRequest("POST", path("caches"), as_model(types.Cache), json=body)


def cache_retrieve(id: str) -> ApiRequest[types.Cache | types.CacheChunk]:
    """Return the request of a cache or of one chunk, depending on the id."""

    def read(response: httpx.Response) -> types.Cache | types.CacheChunk:
        body = response.json()
        return (types.Cache if "chunks" in body else types.CacheChunk).model_validate(body)

    return ApiRequest("GET", path("caches", id), read, repeatable=True)


# ---- references


def reference_write(
    id: str | None,
    file: Upload,
    title: str | None,
    description: str | None,
    metadata: Mapping[str, Any] | None,
    replace: bool,
    ttl: int | None = None,
) -> ApiRequest[types.Reference]:
    check_seconds("ttl", ttl)
    form = given(title=title, description=description, ttl=None if ttl is None else str(ttl))
    if metadata is not None:
        form["metadata"] = json.dumps(dict(metadata))
    if not replace and id is not None:
        form["id"] = id
    where = path("references", id) if replace and id is not None else path("references")
    method = "PUT" if replace else "POST"
    return ApiRequest(method, where, as_model(types.Reference), form=form, upload=file)


def reference_search(
    query: str | None,
    image: str | None,
    top_k: int | None,
    min_score: float | None,
    filter: Mapping[str, Any] | None,
) -> ApiRequest[ReferencesFound]:
    """Return the request of a search; ``image`` is a data URL."""
    body = given(query=query, image=image, top_k=top_k, min_score=min_score, filter=filter)
    return ApiRequest(
        "POST", path("references", "search"), as_model(ReferencesFound), json=body, repeatable=True
    )


def reference_index(start: bool = False) -> ApiRequest[types.ReferenceIndex]:
    """Return the request of the index's state; with ``start`` the server embeds references without a vector."""
    if start:
        return ApiRequest("POST", path("references", "reindex"), as_model(types.ReferenceIndex))
    return get(types.ReferenceIndex, "references", "index")


def reference_sync(start: bool = False) -> ApiRequest[types.ReferenceSync]:
    """Return the request of the sync's state; with ``start`` a run begins now."""
    method = "POST" if start else "GET"
    return ApiRequest(method, path("references", "sync"), as_model(types.ReferenceSync), repeatable=True)


# ---- the rest


def model(id: str) -> ApiRequest[types.Model]:
    return ApiRequest("GET", f"/v1/models/{_quoted(id, safe='/')}", as_model(types.Model), repeatable=True)


def health() -> ApiRequest[types.Health]:
    """Return the request for the state of the server. A server that is not ready sends its state with status 503, but a
    503 may also be a refusal by the server or a proxy."""
    read = as_model(types.Health)

    def not_ready(response: httpx.Response) -> bool:
        try:
            return response.status_code == 503 and not read(response).ready
        except ValueError:
            return False

    return ApiRequest("GET", "/health", read, repeatable=True, accept=not_ready)


def metrics() -> ApiRequest[str]:
    return ApiRequest("GET", "/metrics", lambda r: r.text, repeatable=True)
