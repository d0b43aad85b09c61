"""What the library hands out and takes in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple, Protocol

from mpic.kv.chunk import Chunk, ChunkKey, Kind

Tokenize = Callable[[str], tuple[int, ...]]
State = Literal["compiling", "ready", "failed"]
CACHED_TOKENS = 1 << 20

SHARED = "@shared"
"""Owner of the dynamic library's chunks. No user may be called so."""

Scalar = str | int | float | bool


class AsyncReader(Protocol):
    """Anything with an async ``read(size)`` that gives ``b""`` at the end, such as Starlette's UploadFile."""

    async def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class File:
    """One uploaded file, as its owner sees it.

    Args:
        id: ``file-`` and 24 random characters.
        owner: the user it belongs to.
        handle: the name for IMAGE#NAME and FILE#NAME, as given, or None.
        filename: what the client called it; shown, never used.
        bytes: size of the original.
        key: identity of its decoded content.
        created_at, expires_at: seconds since the epoch.
        tokens: of the compiled chunk; None until it is known.
        state: ``compiling | ready | failed``.
        error: why it failed.
        sha256: of the original's bytes.
        path: of the original.
        metadata: what the user wants to remember of it.
        pinned: its compiled chunk is not evicted for newer uploads of the same user.
    """

    id: str
    owner: str
    handle: str | None
    kind: Kind
    filename: str
    bytes: int
    key: ChunkKey
    created_at: float
    expires_at: float | None
    tokens: int | None
    state: State
    error: str | None
    sha256: str = field(repr=False)
    path: Path = field(repr=False)
    metadata: dict[str, Scalar] = field(default_factory=dict, hash=False)
    pinned: bool = False

    @property
    def status(self) -> str:
        """``state`` in OpenAI's words: ``uploaded | processed | error``."""
        return {"compiling": "uploaded", "ready": "processed", "failed": "error"}[self.state]

    @property
    def label(self) -> str:
        """What people call it."""
        return self.handle or self.filename


class Page(NamedTuple):
    """A piece of a listing; ``has_more`` says whether more files follow its last."""

    files: list[File]
    has_more: bool


@dataclass(frozen=True)
class Reference:
    """One version of a reference of the dynamic library, readable by every user.

    Args:
        id: ``ref_`` and 24 random characters, or as its administrator chose.
        version: 1 for the first; every replacement adds 1.
        title: what people, and prompts, call it.
        metadata: scalars to filter by.
        bytes: size of the original.
        path: of the original.
        key: identity of its decoded content.
        created_at: of version 1. updated_at: of this version. Seconds since the epoch.
        tokens: of the compiled chunk; None until it is known.
        state: ``compiling | ready | failed``.
        error: why it failed.
        sha256: of the original's bytes.
        pinned: its compiled chunk is not evicted for newer references.
    """

    id: str
    version: int
    kind: Kind
    title: str
    description: str
    metadata: dict[str, Scalar] = field(hash=False)
    filename: str
    bytes: int
    path: Path = field(repr=False)
    key: ChunkKey
    created_at: float
    updated_at: float
    tokens: int | None
    state: State
    error: str | None
    sha256: str = field(repr=False)
    pinned: bool = False


class ReferencePage(NamedTuple):
    """A piece of a listing; ``has_more`` says whether more references follow its last."""

    references: list[Reference]
    has_more: bool


class Change(NamedTuple):
    """What happened to a reference; for ``replaced`` it is the new version, for ``removed`` the last one."""

    what: Literal["added", "replaced", "removed"]
    reference: Reference


class Usage(NamedTuple):
    """What a user holds in one tier (``original``: uploads as they came, ``disk``: compiled chunks); a quota of 0 is
    none."""

    owner: str
    tier: str
    count: int
    bytes: int
    files_quota: int
    bytes_quota: int


class Removed(NamedTuple):
    """A deleted or expired file, or a reference version that is gone. ``chunk`` is its content for ``Engine.forget``,
    or None when another file of the same user (another reference) still holds the same content."""

    file: File | Reference
    chunk: Chunk | None


class TokenCache:
    """Token ids of recently linked texts, by file and tokenizer; bounded in tokens, least recently used out."""

    def __init__(self, capacity: int = CACHED_TOKENS) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[Tokenize, tuple[int, ...]]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, file_id: str, tokenize: Tokenize) -> tuple[int, ...] | None:
        with self._lock:
            maker, ids = self._entries.get(file_id, (None, None))
            if maker != tokenize:
                return None
            self._entries.move_to_end(file_id)
            return ids

    def put(self, file_id: str, tokenize: Tokenize, ids: tuple[int, ...]) -> None:
        with self._lock:
            self._forget(file_id)
            self._entries[file_id] = (tokenize, ids)
            self._size += len(ids)
            while self._size > self._capacity:
                self._forget(next(iter(self._entries)))

    def drop(self, file_id: str) -> None:
        with self._lock:
            self._forget(file_id)

    def _forget(self, file_id: str) -> None:
        self._size -= len(self._entries.pop(file_id, (None, ()))[1])
