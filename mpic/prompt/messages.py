"""OpenAI chat messages (plain dicts) -> ``Message`` s whose content is text and references to chunks, in order.

Content is a string or a list of parts:

=============  ========================================================================================
``text``       ``{"text": str}``; in user and system messages ``IMAGE#NAME`` and ``FILE#NAME`` are handles
``image_url``  ``{"image_url": {"url": data URL or file id}}`` (or the url itself)
``video_url``  ``{"video_url": {"url": data URL or file id}}`` (or the url itself): a clip
``image``      ``{"image": data URL or file id}``, or ``file_id`` / ``handle``
``file``       ``{"file": {"file_id" or "handle"}}``, or the two keys in the part itself
``document``   ``{"text": str}``: a text chunk given in the request
``cache``      ``{"cache_id": str}``: one cached chunk, or all of a cache in order
=============  ========================================================================================

Every part but ``text`` may have a ``name``: its label in this conversation; a handle is a name by itself.

Handles are matched at word level, anywhere in a text: ``compare the tower in IMAGE#EIFFEL2025 with IMAGE#LOUVRE.``.
A name is ``[A-Za-z0-9_.-]{1,64}``; the longest name that exists wins, after taking trailing ``.`` and ``-`` off one
by one, so a full stop ends the sentence unless someone named a file with one. The case of names is ignored. The first
mention in a conversation links the chunk in place; later ones become its label (``image EIFFEL2025``, ``document
REPORT``), as plain text: the content is in context already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from mpic.bounded_json import Bounds
from mpic.cancel import checkpoint
from mpic.errors import BadRequest, EmptyPrompt, MPICError, UnknownHandle, cut
from mpic.kv.chunk import Chunk
from mpic.prompt.data_url import decode_clip_url, decode_data_url
from mpic.prompt.tool_calls import ToolCallReader

HandleKind = Literal["image", "file"]

HANDLE = re.compile(r"(?<![A-Za-z0-9_])(IMAGE|FILE)#([A-Za-z0-9_.\-]+)")
HANDLE_CHARS = 64
HANDLE_KINDS = ("IMAGE", "FILE")
MAX_UNKNOWN = 1 << 12
"""Most names that are looked up for one conversation and do not exist: every ``.`` and ``-`` behind a handle can make
another one."""
WORD = re.compile(r"\S")
T = TypeVar("T")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
PART_TYPES = ("text", "image_url", "video_url", "image", "file", "document", "cache")
URL_PARTS = ("image_url", "video_url", "image")
"""Parts that a string stands for the URL of."""


Found = Chunk | Sequence[Chunk]
"""One chunk, or the chunks of a document that is cut, in order."""


class Resolver(Protocol):
    """Finds the chunks that a request refers to, in the library of the user. Its methods raise errors of
    ``mpic.errors`` (UnknownHandle, FileNotFound, InvalidImage, ...); the parser fills in ``param``."""

    def by_handle(self, kind: HandleKind, name: str) -> Found:
        """Finds ``IMAGE#name`` (kind ``image``: must be an image) or ``FILE#name`` (kind ``file``: any kind)."""
        ...

    def by_file_id(self, file_id: str) -> Found: ...

    def by_cache_id(self, cache_id: str) -> Sequence[Chunk]:
        """Finds one chunk, or all chunks of a cache in order."""
        ...

    def inline_image(self, data: bytes) -> Chunk:
        """Returns the chunk of an image sent in the request: the bytes of an image file, not decoded yet."""
        ...

    def inline_clip(self, data: bytes) -> Chunk:
        """Returns the chunk of a clip sent in the request: the bytes of its file, not decoded yet."""
        ...

    def inline_text(self, text: str, label: str | None) -> Chunk:
        """Returns the chunk of a document sent in the request."""
        ...


@dataclass(frozen=True)
class Text:
    """Text of a client. ``part`` is the number of the content part it came from: texts of different parts may be
    separated. A text with None belongs to its neighbours."""

    text: str
    part: int | None = 0


@dataclass(frozen=True, eq=False)
class Ref:
    """A place for a chunk. ``name`` is its label in the request, if any; ``mention`` tells that it is a handle within a
    text, which continues after it."""

    chunk: Chunk
    name: str | None
    param: str
    mention: bool = False


@dataclass(frozen=True, eq=False)
class Message:
    """A message.

    Args:
        content: texts and references in order; empty only for assistant and tool messages.
        is_string: the client sent a string, not a list of parts.
        fields: other fields that the template may read (``name``, ``tool_calls``, ``tool_call_id``,
            ``reasoning_content``), as sent, except that the arguments of tool calls are parsed from JSON.
    """

    role: str
    content: tuple[Text | Ref, ...]
    is_string: bool
    param: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def parse_messages(messages: Any, resolver: Resolver, values: int = Bounds.values) -> list[Message]:
    """Validates a conversation and resolves the chunks that it refers to.

    Args:
        values: most values that the arguments of its tool calls may hold together (``tool_calls``).

    Raises:
        EmptyPrompt: no messages, or a user or system message without content.
        BadRequest: a field is invalid; ``param`` is its path, for example ``messages[0].content[2].type``.
        MPICError: see the resolver (UnknownHandle, FileNotFound, InvalidImage, ...).
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise BadRequest("messages must be a list of objects", param="messages")
    if not messages:
        raise EmptyPrompt("messages is empty: send at least one", param="messages")
    parser = _Parser(resolver, values)
    return [parser.message(m, f"messages[{i}]") for i, m in enumerate(messages)]


class _Parser:
    """Parses one conversation; remembers, case-folded, the handles it has linked and names that do not exist."""

    def __init__(self, resolver: Resolver, values: int) -> None:
        self.resolver = resolver
        self.calls = ToolCallReader(values)
        self.linked: dict[tuple[HandleKind, str], str] = {}
        self.unknown: set[tuple[HandleKind, str]] = set()

    def message(self, message: Any, param: str) -> Message:
        checkpoint()
        if not isinstance(message, Mapping):
            raise BadRequest("a message must be an object with role and content", param=param)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(
                f"unknown role {cut(str(role))!r}; known: {', '.join(ROLES)}", param=f"{param}.role"
            )
        role = ROLES[role]
        fields = _fields(message, role, param, self.calls)
        content, where = message.get("content"), f"{param}.content"
        if content is None:
            items = []
        elif isinstance(content, str):
            items = self._text(content, role, 0, where)
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            items = [item for i, p in enumerate(content) for item in self._part(p, role, i, f"{where}[{i}]")]
        else:
            raise BadRequest("content must be a string or a list of parts", param=where)
        blank = all(isinstance(item, Text) and not WORD.search(item.text) for item in items)
        if blank and role in ("user", "system"):
            raise EmptyPrompt(f"the {role} message has no content", param=where)
        return Message(role, tuple(items), not isinstance(content, list | tuple), param, fields)

    def _part(self, part: Any, role: str, index: int, param: str) -> list[Text | Ref]:
        if not isinstance(part, Mapping):
            raise BadRequest("a content part must be an object with a type", param=param)
        kind = part.get("type")
        if kind not in PART_TYPES:
            raise BadRequest(
                f"unknown content part type {cut(str(kind))!r}; known: {', '.join(PART_TYPES)}",
                param=f"{param}.type",
            )
        if kind == "text":
            return self._text(_string(part, "text", param, allow_empty=True), role, index, f"{param}.text")
        if role not in ("user", "system"):
            raise BadRequest(f"a {role} message takes text parts only, not {kind!r}", param=f"{param}.type")
        name = part.get("name")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise BadRequest("name must be a non-empty string", param=f"{param}.name")
        if kind == "cache":
            return self._cache(part, name, param)
        found, handle = self._chunk(kind, part, name, param)
        return [Ref(chunk, label, param) for chunk, label in _labelled(found, name or handle)]

    def _cache(self, part: Mapping, name: str | None, param: str) -> list[Text | Ref]:
        inner = part.get("cache")
        if isinstance(inner, Mapping):
            part, param = inner, f"{param}.cache"
        cache_id = _string({"cache_id": inner} if isinstance(inner, str) else part, "cache_id", param)
        chunks = _blame(f"{param}.cache_id", self.resolver.by_cache_id, cache_id)
        return [Ref(chunk, label, param) for chunk, label in _labelled(chunks, name)]

    def _chunk(self, kind: str, part: Mapping, name: str | None, param: str) -> tuple[Found, str | None]:
        """Returns the chunks that a part other than text stands for, and the handle that named it."""
        if kind == "document":
            text = _string(part, "text", param)
            return _blame(f"{param}.text", self.resolver.inline_text, text, name), None
        inner = part.get(kind)
        if isinstance(inner, Mapping):
            part, param = inner, f"{param}.{kind}"
        elif isinstance(inner, str):
            part, param = ({"url": inner} if kind in URL_PARTS else {f"{kind}_id": inner}), f"{param}.{kind}"
        if kind in URL_PARTS and "url" in part:
            return self._url(
                kind, _string(part, "url", param), param if inner is part["url"] else f"{param}.url"
            ), None
        if "handle" in part:
            handle_kind: HandleKind = "file" if kind == "file" else "image"
            handle = _string(part, "handle", param)
            found = _blame(f"{param}.handle", self.resolver.by_handle, handle_kind, handle)
            self.linked.setdefault((handle_kind, handle.casefold()), _label(found, name or handle))
            return found, handle
        if "file_data" in part:
            raise BadRequest(
                "inline file data is not accepted: upload it to /v1/files, or send a document part with its text",
                param=f"{param}.file_data",
            )
        if "file_id" not in part and kind in ("image", "file"):
            raise BadRequest(f"a part of type {kind} needs {kind}, file_id or handle", param=param)
        file_id = _string(part, "file_id", param)
        return _blame(f"{param}.file_id", self.resolver.by_file_id, file_id), None

    def _url(self, kind: str, url: str, param: str) -> Found:
        """Returns what a data URL holds, or the file of this id."""
        what = "video" if kind == "video_url" else "image"
        if url.startswith("data:"):
            if what == "video":
                return _blame(param, self.resolver.inline_clip, decode_clip_url(url, param))
            return _blame(param, self.resolver.inline_image, decode_data_url(url, param))
        if ":" in url or "/" in url:
            raise BadRequest(
                f"{what} URLs are not fetched: upload the {what} and use its file id, or send a data URL",
                param=param,
            )
        found = _blame(param, self.resolver.by_file_id, url)
        if what == "video" and any(chunk.kind != "video" for chunk in _chunks(found)):
            raise BadRequest(f"the file {cut(url)!r} is no video", param=param)
        return found

    def _text(self, text: str, role: str, part: int, param: str) -> list[Text | Ref]:
        """Cuts a text at the handles in it."""
        items: list[Text | Ref] = []
        plain = ""  # text since the last reference
        at = 0
        for match in find_handles(text) if role in ("user", "system") else ():
            kind: HandleKind = "image" if match[1] == "IMAGE" else "file"
            name, found = self._mention(kind, match[2], param)
            if name is None:
                continue
            plain += text[at : match.start()]
            at = match.start(2) + len(name)
            if found is None:
                plain += self.linked[kind, name.casefold()]
                continue
            if plain:
                items.append(Text(plain, part))
            items += [Ref(chunk, label, param, mention=True) for chunk, label in _labelled(found, name)]
            plain = ""
        plain += text[at:]
        if plain:
            items.append(Text(plain, part))
        return items

    def _mention(self, kind: HandleKind, written: str, param: str) -> tuple[str | None, Found | None]:
        """Returns the name of a mention and what it stands for: chunks, None if they are linked already, or the name
        itself if it is not a handle."""
        shortest = written.rstrip(".-")
        if not shortest:
            return None, None
        longest = min(len(written), HANDLE_CHARS)
        names = [written[:n] for n in range(longest, len(shortest) - 1, -1)]
        for name in names:
            key = kind, name.casefold()
            if key in self.linked:
                return name, None
            # never so for all names of a mention: one of nothing that exists ends the parsing
            if key in self.unknown:
                continue
            try:
                found = _blame(param, self.resolver.by_handle, kind, name)
            except UnknownHandle as error:
                if len(self.unknown) == MAX_UNKNOWN:
                    raise BadRequest(
                        f"the messages hold more than {MAX_UNKNOWN:,} names that do not exist: put a space between "
                        "a handle and the . and - behind it",
                        param=param,
                    ) from error
                unknown = error
                self.unknown.add(key)
                continue
            self.linked[key] = _label(found, name)
            return name, found
        if not names:
            unknown = UnknownHandle(
                f"{kind.upper()}#{shortest[:HANDLE_CHARS]}...: a handle has at most {HANDLE_CHARS} characters",
                param=param,
            )
        raise unknown


def find_handles(text: str) -> Iterator[re.Match[str]]:
    """Yields the handles in a text, left to right. Text without handles is skipped quickly."""
    at = 0
    while (mark := text.find("#", at)) >= 0:
        checkpoint()
        start = next(
            (mark - n for n in (5, 4) if n <= mark - at and text[mark - n : mark] in HANDLE_KINDS), None
        )
        match = None if start is None else HANDLE.match(text, start)
        if match:
            yield match
        at = match.end() if match else mark + 1


def _chunks(found: Found) -> list[Chunk]:
    return [found] if isinstance(found, Chunk) else list(found)


def _labelled(found: Found, name: str | None) -> list[tuple[Chunk, str | None]]:
    """Returns chunks with their labels in the request: those of a document that is cut are numbered."""
    chunks = _chunks(found)
    if name is None or len(chunks) == 1:
        return [(chunk, name) for chunk in chunks]
    return [(chunk, f"{name} {i}") for i, chunk in enumerate(chunks, 1)]


def _label(found: Found, name: str) -> str:
    """Returns the text that replaces later mentions of what is linked."""
    kind = _chunks(found)[0].kind
    return f"{'document' if kind == 'text' else kind} {name}"


def _blame(param: str, find: Callable[..., T], *args: Any) -> T:
    """Calls the resolver; an error without a field gets this one."""
    try:
        return find(*args)
    except MPICError as error:
        error.param = error.param or param
        raise


def _string(part: Mapping, key: str, param: str, allow_empty: bool = False) -> str:
    value = part.get(key)
    if not isinstance(value, str) or not (value or allow_empty):
        raise BadRequest(
            f"{key} must be a string{'' if allow_empty else ', not empty'}", param=f"{param}.{key}"
        )
    return value


def _fields(message: Mapping, role: str, param: str, calls: ToolCallReader) -> dict[str, Any]:
    """Returns the fields beside role and content. Empty ones are dropped, because clients send answers back with all
    their nulls."""
    known = {
        "assistant": {"name", "tool_calls", "reasoning_content"},
        "tool": {"name", "tool_call_id"},
    }.get(role, {"name"})
    fields = {
        k: v for k, v in message.items() if k not in ("role", "content") and v not in (None, [], {}, "")
    }
    for key in fields:
        if key not in known:
            raise BadRequest(f"a {role} message has no field {cut(key)!r}", param=f"{param}.{cut(key)}")
        if key != "tool_calls" and not isinstance(fields[key], str):
            raise BadRequest(f"{key} must be a string", param=f"{param}.{key}")
    if "tool_calls" in fields:
        fields["tool_calls"] = calls.read(fields["tool_calls"], f"{param}.tool_calls")
    return fields
