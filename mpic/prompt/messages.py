"""OpenAI chat messages (plain dicts) -> ``Message`` s whose content is text and references to chunks, in order.

Content is a string or a list of parts:

=============  ========================================================================================
``text``       ``{"text": str}``; in user messages ``IMAGE#NAME`` and ``FILE#NAME`` are handles
``refusal``    ``{"refusal": str}``: text of an earlier answer
``image_url``  ``{"image_url": {"url": data URL or file id}}`` (or the url itself)
``video_url``  ``{"video_url": {"url": data URL or file id}}`` (or the url itself): a clip
``image``      ``{"image": data URL or file id}``, or ``file_id`` / ``handle``
``file``       ``{"file": {"file_id", "handle" or "file_data": data URL}}``, or one of them in the part itself
``document``   ``{"text": str}``: a text chunk given in the request
``cache``      ``{"cache_id": str}``: one cached chunk, or all of a cache in order
=============  ========================================================================================

Every part but ``text`` may have a ``name``: its label in this conversation; a handle is a name by itself.

Handles are matched at word level, anywhere in a user's text: ``compare the tower in IMAGE#EIFFEL2025 with
IMAGE#LOUVRE.``. A name is made of the letters, digits and marks of any script, ``_``, ``.`` and ``-``
(``mpic.handles``). It is never cut within a word: the whole word has to exist, except that trailing ``.`` and ``-`` are
taken off one by one, so that a full stop ends the sentence unless someone named a file with one, and that an ASCII name
ends where another script begins, because Chinese and Japanese put no space there. The case of names is ignored. The
first mention in a conversation links the chunk in place; later ones become its label (``image EIFFEL2025``, ``document
REPORT``), as plain text: the content is in context already.

``FILE#REPORT[3]`` and ``FILE#REPORT[3-5]`` are pages of a document that has pages; behind other handles a bracket is
text. A page that is linked already is not linked again.

What names nothing stays text, and so does what is escaped: ``IMAGE\\#EIFFEL2025`` is ``IMAGE#EIFFEL2025`` in the
prompt, and of several backslashes one is taken. ``Handles`` collects what stayed text unescaped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from mpic.bounded_json import Bounds
from mpic.cancel import checkpoint
from mpic.errors import BadRequest, EmptyPrompt, MPICError, PageNotFound, UnknownHandle, cut
from mpic.handles import KINDS, LONGEST, PAGES, canonical, end_of_name, folded, without_pages
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.prompt.data_url import decode_clip_url, decode_data_url, decode_file_url
from mpic.prompt.tool_calls import ToolCallReader

HandleKind = Literal["image", "file"]

BEGINS = re.compile(r"(?<![A-Za-z0-9_])(?:IMAGE|FILE)\\*+#")
ASCII_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
WRITTEN_CHARS = 4 * LONGEST
"""Most characters in which a handle may be written: decomposed, one character is four at most."""
NOTED = 32
"""Most handles of a request that are reported because they stayed text."""
MAX_UNKNOWN = 1 << 12
"""Most names that are looked up for one conversation and do not exist: every ``.`` and ``-`` behind a handle can make
another one."""
WORD = re.compile(r"\S")
T = TypeVar("T")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
PART_TYPES = ("text", "image_url", "video_url", "image", "file", "document", "cache", "refusal")
URL_PARTS = ("image_url", "video_url", "image")
"""Parts in which a string may stand for the object with its URL."""


Found = Chunk | Sequence[Chunk]
"""One chunk, or the chunks of a document that is cut, in order."""


class Resolver(Protocol):
    """Find the chunks that a request refers to, in the user's library. Its methods raise errors of ``mpic.errors``
    (UnknownHandle, FileNotFound, InvalidImage, ...); the parser fills in ``param``."""

    def by_handle(self, kind: HandleKind, name: str) -> Found:
        """Find ``IMAGE#name`` (kind ``image``: must be an image) or ``FILE#name`` (kind ``file``: any kind)."""
        ...

    def by_file_id(self, file_id: str) -> Found: ...

    def by_cache_id(self, cache_id: str) -> Sequence[Chunk]:
        """Find one chunk, or all chunks of a cache in order."""
        ...

    def inline_image(self, data: bytes) -> Chunk:
        """Return the chunk of an image sent in the request: the bytes of an image file, not decoded yet."""
        ...

    def inline_clip(self, data: bytes) -> Chunk:
        """Return the chunk of a clip sent in the request: the bytes of its file, not decoded yet."""
        ...

    def inline_file(self, data: bytes, label: str | None) -> Found:
        """Return the chunks of a file of any kind sent in the request."""
        ...

    def inline_text(self, text: str, label: str | None) -> Chunk:
        """Return the chunk of a document sent in the request."""
        ...


@dataclass
class Handles:
    """How to read the handles in the texts of one request.

    Args:
        on: False leaves all of them text, escaped ones as they are.

    Attributes:
        unlinked: handles that stayed text, as they were written, and why; ``NOTED`` at most.
    """

    on: bool = True
    unlinked: dict[str, str] = field(default_factory=dict)

    def note(self, handle: str, why: str) -> None:
        """Note a handle that stays text."""
        if len(self.unlinked) < NOTED:
            self.unlinked.setdefault(handle, why)


class Mention(NamedTuple):
    """A handle in a text: its place ``[start, end)``, its kind, how often it is escaped, its name as written, and what
    may be the pages behind it."""

    start: int
    end: int
    kind: HandleKind
    escapes: int
    written: str
    pages: str = ""

    @property
    def name_start(self) -> int:
        return self.end - len(self.written)


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
        content: texts and references in order; blank only in assistant and tool messages.
        is_string: the client sent a string, not a list of parts.
        fields: other fields that the template may read (``name``, ``tool_calls``, ``tool_call_id``,
            ``reasoning_content``), as sent, except that the arguments of tool calls are parsed from JSON.
    """

    role: str
    content: tuple[Text | Ref, ...]
    is_string: bool
    param: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_blank(self) -> bool:
        """Return whether it has neither words nor chunks."""
        return all(isinstance(item, Text) and not WORD.search(item.text) for item in self.content)


def parse_messages(
    messages: Any, resolver: Resolver, values: int = Bounds.values, handles: Handles | None = None
) -> list[Message]:
    """Validate a conversation and resolve the chunks that it refers to.

    Args:
        handles: how handles in texts are read; None reads them and keeps no notes.
        values: most values that the arguments of its tool calls may hold together (``tool_calls``).

    Raises:
        EmptyPrompt: no messages, or a user message without content. An empty system message is left out.
        BadRequest: a field is invalid; ``param`` is its path, for example ``messages[0].content[2].type``.
        MPICError: see the resolver (UnknownHandle, FileNotFound, InvalidImage, ...).
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise BadRequest("messages must be a list of objects", param="messages")
    if not messages:
        raise EmptyPrompt("messages is empty: send at least one", param="messages")
    parser = _Parser(resolver, values, handles or Handles())
    parsed = [parser.message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    kept = [message for message in parsed if message.role != "system" or not message.is_blank]
    if not kept:
        raise EmptyPrompt("the system message has no content", param=f"{parsed[0].param}.content")
    return kept


class _Parser:
    """Parses one conversation; remembers, case-folded, the handles it has linked and names that do not exist."""

    def __init__(self, resolver: Resolver, values: int, handles: Handles) -> None:
        self.resolver = resolver
        self.handles = handles
        self.calls = ToolCallReader(values)
        self.linked: dict[tuple[HandleKind, str], str] = {}
        self.unknown: dict[tuple[HandleKind, str], UnknownHandle] = {}
        self.pages: set[tuple[str | None, ChunkKey]] = set()

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
            if role in ("system", "tool"):
                raise BadRequest(f"a {role} message needs content", param=where)
            items = []
        elif isinstance(content, str):
            items = self._text(content, role, 0, where)
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            items = [item for i, p in enumerate(content) for item in self._part(p, role, i, f"{where}[{i}]")]
        else:
            raise BadRequest("content must be a string or a list of parts", param=where)
        parsed = Message(role, tuple(items), not isinstance(content, list | tuple), param, fields)
        if role == "user" and parsed.is_blank:
            raise EmptyPrompt("the user message has no content", param=where)
        return parsed

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
        if kind == "refusal" and role == "assistant":
            refusal = _string(part, "refusal", param, allow_empty=True)
            return self._text(refusal, role, index, f"{param}.refusal")
        if kind == "refusal" or role == "assistant":
            raise BadRequest(f"a {role} message takes no part of type {kind!r}", param=f"{param}.type")
        name = part.get("name")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise BadRequest("name must be a non-empty string", param=f"{param}.name")
        if kind == "cache":
            return self._cache(part, name, param)
        found, handle = self._chunk(kind, part, name, param)
        self._new(found)
        return [Ref(chunk, label, param) for chunk, label in _labelled(found, name or handle)]

    def _cache(self, part: Mapping, name: str | None, param: str) -> list[Text | Ref]:
        inner = part.get("cache")
        if isinstance(inner, Mapping):
            part, param = inner, f"{param}.cache"
        cache_id = _string({"cache_id": inner} if isinstance(inner, str) else part, "cache_id", param)
        chunks = _blame(f"{param}.cache_id", self.resolver.by_cache_id, cache_id)
        return [Ref(chunk, label, param) for chunk, label in _labelled(chunks, name)]

    def _chunk(self, kind: str, part: Mapping, name: str | None, param: str) -> tuple[Found, str | None]:
        """Return the chunks that a part other than text stands for, and the handle that named it."""
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
            self.linked.setdefault((handle_kind, folded(handle)), _label(found, name or handle))
            return found, handle
        if kind == "file" and "file_data" in part:
            where, label = f"{param}.file_data", part.get("filename")
            if "file_id" in part:
                raise BadRequest("send either file_id or file_data", param=where)
            if label is not None and not isinstance(label, str):
                raise BadRequest("filename must be a string", param=f"{param}.filename")
            data = decode_file_url(_string(part, "file_data", param), where)
            return _blame(where, self.resolver.inline_file, data, name or label), name or label
        if "file_id" not in part and kind in ("image", "file"):
            raise BadRequest(f"a part of type {kind} needs {kind}, file_id or handle", param=param)
        file_id = _string(part, "file_id", param)
        return _blame(f"{param}.file_id", self.resolver.by_file_id, file_id), None

    def _url(self, kind: str, url: str, param: str) -> Found:
        """Return what a data URL holds, or the file of this id."""
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
            raise BadRequest(f"the file {cut(url)!r} is not a video", param=param)
        return found

    def _text(self, text: str, role: str, part: int, param: str) -> list[Text | Ref]:
        """Cut a text at the handles in it."""
        items: list[Text | Ref] = []
        plain = ""  # text since the last reference
        at = 0
        for mention in find_handles(text) if self.handles.on and role in ("user", "system") else ():
            if role == "system":
                why = "handles are read in messages of users; another message names a file by a part"
                self.handles.note(_shown(mention), why)
                continue
            if mention.escapes:
                plain += text[at : mention.name_start - 2] + "#"
                at = mention.name_start
                continue
            name, found = self._mention(mention, param)
            if name is None:
                continue
            plain += text[at : mention.start]
            at = mention.name_start + len(name)
            if found is None:
                plain += self.linked[mention.kind, folded(name)]
                continue
            if plain:
                items.append(Text(plain, part))
            items += [Ref(chunk, label, param, mention=True) for chunk, label in _labelled(found, name)]
            plain = ""
        plain += text[at:]
        if plain:
            items.append(Text(plain, part))
        return items

    def _mention(self, mention: Mention, param: str) -> tuple[str | None, Found | None]:
        """Return the name of a mention and what it stands for: chunks, or None if they are linked already. One that
        stays text has no name."""
        kind, whole, why = mention.kind, mention.written, f"a handle has at most {LONGEST} characters"
        for name in chain([whole + mention.pages] if mention.pages else [], _names(whole)):
            key = kind, folded(name)
            if key in self.linked:
                return name, None
            error = self.unknown.get(key)
            if error is None:
                try:
                    found = _blame(param, self.resolver.by_handle, kind, name)
                except UnknownHandle as unknown:
                    if len(self.unknown) == MAX_UNKNOWN:
                        raise BadRequest(
                            f"the messages hold more than {MAX_UNKNOWN:,} names that do not exist: if they are "
                            "not handles, set mpic.handles to false",
                            param=param,
                        ) from unknown
                    self.unknown[key] = error = unknown.with_traceback(None)
                else:
                    self.linked[key] = _label(found, name)
                    return name, self._new(found) or None
            why = error.message
            if isinstance(error, PageNotFound):  # all of the document is not what was asked for
                break
        if mention.written.strip(".-"):
            self.handles.note(_shown(mention), why)
        return None, None

    def _new(self, found: Found) -> list[Chunk]:
        """Return chunks without the pages that are linked already, and note their pages as linked."""
        chunks = _chunks(found)
        new = [
            chunk for chunk in chunks if chunk.page is None or (chunk.file_id, chunk.key) not in self.pages
        ]
        self.pages.update((chunk.file_id, chunk.key) for chunk in chunks if chunk.page is not None)
        return new


def find_handles(text: str) -> Iterator[Mention]:
    """Yield the handles in a text, left to right, escaped ones too. Text without ``#`` is skipped quickly."""
    at = 0
    while (mark := text.find("#", at)) >= 0:
        checkpoint()
        word = mark
        while word > at and text[word - 1] == "\\":
            word -= 1
        kind = next((kind for kind in KINDS if text.endswith(kind, at, word)), None)
        at = mark + 1
        if kind is None or not (begins := BEGINS.match(text, word - len(kind))):
            continue
        at = end_of_name(text, mark + 1)
        if at > mark + 1:
            written = text[mark + 1 : at]
            pages = PAGES.match(text, at) if kind == "FILE" else None
            name = "image" if kind == "IMAGE" else "file"
            yield Mention(begins.start(), at, name, mark - word, written, pages[0] if pages else "")


def _names(written: str) -> Iterator[str]:
    """Yield the names that a word behind ``#`` may stand for, the longest first."""
    yield from _without_stops(written)
    ascii = ASCII_NAME.match(written)
    if ascii and ascii.end() < len(written) and _another_script(written[ascii.end()]):
        yield from _without_stops(ascii[0])


def _without_stops(written: str) -> Iterator[str]:
    shortest = len(written.rstrip(".-"))
    if not 0 < shortest <= WRITTEN_CHARS:
        return
    room = LONGEST - len(canonical(written[:shortest]))
    for n in range(min(len(written), shortest + room), shortest - 1, -1):
        yield written[:n]


def _another_script(letter: str) -> bool:
    return letter.isalpha() and not unicodedata.name(letter, "LATIN").startswith("LATIN")


def _shown(mention: Mention) -> str:
    """Return a handle that stays text, for its note."""
    name = mention.written.rstrip(".-") or mention.written
    return f"{mention.kind.upper()}#{name[:LONGEST]}{'...' if len(name) > LONGEST else ''}{mention.pages}"


def _chunks(found: Found) -> list[Chunk]:
    return [found] if isinstance(found, Chunk) else list(found)


def _labelled(found: Found, name: str | None) -> list[tuple[Chunk, str | None]]:
    """Return chunks with their labels in the request: those of a document that is cut are numbered, or named by their
    pages."""
    chunks = _chunks(found)
    if name is None or (len(chunks) == 1 and chunks[0].page is None):
        return [(chunk, name) for chunk in chunks]
    plain = without_pages(name)[0]
    numbered = enumerate(chunks, 1)
    return [(chunk, f"{plain} page {chunk.page}" if chunk.page else f"{name} {i}") for i, chunk in numbered]


def _label(found: Found, name: str) -> str:
    """Return the text that replaces later mentions of what is linked."""
    kind = _chunks(found)[0].kind
    plain, pages = without_pages(name)
    if pages is not None:
        first, last = pages
        name = f"{plain} page {first}" if first == last else f"{plain} pages {first} to {last}"
    return f"{'document' if kind == 'text' else kind} {name}"


def _blame(param: str, find: Callable[..., T], *args: Any) -> T:
    """Call the resolver; an error without a field gets this one."""
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
    """Return the fields beside role and content. Empty ones are dropped, because clients send answers back with all
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
