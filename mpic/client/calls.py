"""Every call of the REST API as a value: what to send and how to read the answer. No input or output here, so that
the synchronous and the asynchronous client cannot differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

import httpx

from mpic.client import types
from mpic.client.errors import BadResponse
from mpic.client.sources import Upload

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request.

    Args:
        parse: reads the answer's JSON; None for ``read``.
        read: reads the whole answer in place of ``parse``.
        repeatable: doing it twice is as good as once, so it is sent again when the connection breaks.
        accept: error statuses that are answers all the same.
    """

    method: str
    path: str
    parse: Callable[[Any], T] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    form: Mapping[str, str] | None = None
    upload: Upload | None = None
    read: Callable[[httpx.Response], T] | None = None
    repeatable: bool = False
    accept: tuple[int, ...] = ()

    def result(self, response: httpx.Response) -> T:
        """Raises BadResponse: the answer is not of this API."""
        if self.read is not None:
            return self.read(response)
        assert self.parse is not None
        try:
            return self.parse(response.json())
        except (ValueError, KeyError, TypeError) as exc:
            raise BadResponse(f"{self.method} {self.path}: not an answer of this API: {exc}") from exc


@dataclass(frozen=True)
class Page(Generic[T]):
    """A piece of a listing."""

    data: tuple[T, ...]
    has_more: bool
    last_id: str | None


class ChatOptions(TypedDict, total=False):
    """Fields of a chat completion besides ``messages`` and ``stream``; what is left out is the server's to choose.

    ``policy``, ``retrieval`` (``"always"``, ``"auto"`` or a dictionary) and ``trace`` are ours; further options of ours
    go in ``mpic``, further fields of the request in ``extra_body``.
    """

    model: str | None
    policy: str | None
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
    tool_choice: str | None
    stream_options: Mapping[str, Any] | None
    extra_body: Mapping[str, Any] | None


def given(**values: Any) -> dict[str, Any]:
    """What is not None."""
    return {k: v for k, v in values.items() if v is not None}


def at(*parts: str) -> str:
    """A path under /v1; ids are quoted, and an empty one is refused: it would name the whole collection."""
    if not all(parts):
        raise ValueError("an id is needed, and it is empty")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def one(model: type[T]) -> Callable[[Any], T]:
    return model.model_validate  # type: ignore[attr-defined, no-any-return]


def page(model: type[T]) -> Callable[[Any], Page[T]]:
    def parse(body: Any) -> Page[T]:
        data = tuple(map(one(model), body["data"]))
        return Page(data, body.get("has_more", False), body.get("last_id"))

    return parse


def _bytes(response: httpx.Response) -> bytes:
    return response.content


def _text(response: httpx.Response) -> str:
    return response.text


# ---- chat


def conversation(messages: Sequence[Mapping[str, Any]] | str) -> Sequence[Mapping[str, Any]]:
    """A plain text is one question of the user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def chat(
    messages: Sequence[Mapping[str, Any]], stream: bool, options: ChatOptions
) -> Call[types.ChatCompletion]:
    """An answer may be computed twice without harm, so it is repeatable."""
    fields: dict[str, Any] = dict(options)
    trace, extra = fields.pop("trace", None), dict(fields.pop("extra_body", None) or {})
    ours = given(policy=fields.pop("policy", None), retrieval=fields.pop("retrieval", None), trace=trace)
    ours |= fields.pop("mpic", None) or {}
    ours |= extra.pop("mpic", None) or {}
    unknown = sorted(set(fields) - set(ChatOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; fields the SDK does not know go in extra_body")
    body = {"messages": list(messages), **given(**fields), **({"mpic": ours} if ours else {}), **extra}
    if stream:
        body["stream"] = True
        body.setdefault("stream_options", {"include_usage": True})
    return Call("POST", at("chat", "completions"), one(types.ChatCompletion), json=body, repeatable=True)


# ---- files


def file_create(
    file: Upload,
    handle: str | None,
    expires_in: int | None,
    purpose: str,
) -> Call[types.File]:
    form = {"purpose": purpose, **given(handle=handle)}
    if expires_in is not None:
        form |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_in)}
    return Call("POST", at("files"), one(types.File), form=form, upload=file)


def listing(noun: str, model: type[T], **params: Any) -> Call[Page[T]]:
    return Call("GET", at(noun), page(model), params=given(**params), repeatable=True)


def retrieve(noun: str, model: type[T], id: str) -> Call[T]:
    return Call("GET", at(noun, id), one(model), repeatable=True)


def content(noun: str, id: str) -> Call[bytes]:
    return Call("GET", at(noun, id, "content"), read=_bytes, repeatable=True)


def update(noun: str, model: type[T], id: str, ttl: int | None) -> Call[T]:
    return Call("PATCH", at(noun, id), one(model), json={"ttl": ttl}, repeatable=True)


def delete(noun: str, id: str) -> Call[types.Deleted]:
    """Not repeatable: the second time it would say that there is no such thing."""
    return Call("DELETE", at(noun, id), one(types.Deleted))


# ---- caches


def cache_create(
    text: str | None,
    chunks: Sequence[str] | None,
    split: Mapping[str, Any] | str | None,
    name: str | None,
    ttl: int | None,
) -> Call[types.Cache]:
    cut = {"mode": split} if isinstance(split, str) else split
    body = given(text=text, chunks=None if chunks is None else list(chunks), split=cut, name=name, ttl=ttl)
    return Call("POST", at("caches"), one(types.Cache), json=body)


def cache_or_chunk(body: Any) -> types.Cache | types.CacheChunk:
    return (types.Cache if "chunks" in body else types.CacheChunk).model_validate(body)


def cache_retrieve(id: str) -> Call[types.Cache | types.CacheChunk]:
    return Call("GET", at("caches", id), cache_or_chunk, repeatable=True)


# ---- references


def reference_write(
    id: str | None,
    file: Upload,
    title: str | None,
    description: str | None,
    metadata: Mapping[str, Any] | None,
    replace: bool,
) -> Call[types.Reference]:
    form = given(title=title, description=description)
    if metadata is not None:
        form["metadata"] = json.dumps(dict(metadata))
    if not replace and id is not None:
        form["id"] = id
    path = at("references", id) if replace and id is not None else at("references")
    method = "PUT" if replace else "POST"
    return Call(method, path, one(types.Reference), form=form, upload=file)


def reference_search(
    query: str | None,
    image: str | None,
    top_k: int | None,
    min_score: float | None,
    filter: Mapping[str, Any] | None,
) -> Call[tuple[types.ReferenceHit, ...]]:
    """``image`` is a data URL."""
    body = given(query=query, image=image, top_k=top_k, min_score=min_score, filter=filter)

    def parse(found: Any) -> tuple[types.ReferenceHit, ...]:
        return page(types.ReferenceHit)(found).data

    return Call("POST", at("references", "search"), parse, json=body, repeatable=True)


def reference_index(start: bool = False) -> Call[types.ReferenceIndex]:
    """The state of the vectors; ``start``: embed what has none."""
    if start:
        return Call("POST", at("references", "reindex"), one(types.ReferenceIndex))
    return Call("GET", at("references", "index"), one(types.ReferenceIndex), repeatable=True)


# ---- the rest


def models() -> Call[Page[types.Model]]:
    return Call("GET", at("models"), page(types.Model), repeatable=True)


def model(id: str) -> Call[types.Model]:
    return Call("GET", f"/v1/models/{quote(id)}", one(types.Model), repeatable=True)


def health() -> Call[types.Health]:
    return Call("GET", "/health", one(types.Health), repeatable=True, accept=(503,))


def metrics() -> Call[str]:
    return Call("GET", "/metrics", read=_text, repeatable=True)
