"""Records that the library returns and takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from mpic.kv.chunk import Chunk, ChunkKey, Kind

Tokenize = Callable[[str], tuple[int, ...]]
State = Literal["compiling", "ready", "failed"]

SHARED = "@shared"
"""Owner of the chunks of references. No user may have this name."""

Scalar = str | int | float | bool


class AsyncReader(Protocol):
    """Anything with an async ``read(size)`` that returns ``b""`` at the end, such as Starlette's UploadFile."""

    async def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class File:
    """An uploaded file, as its owner sees it.

    Args:
        id: ``file-`` and 24 random characters.
        owner: the user it belongs to.
        handle: the name for IMAGE#NAME and FILE#NAME as the owner wrote it, or None.
        filename: the client's name for it, which is only shown.
        bytes: size of the original.
        key: identity of its decoded content.
        created_at, expires_at: seconds since the epoch.
        tokens: number of tokens of the compiled chunk; None until it is known.
        state: ``compiling | ready | failed``.
        error: reason why compiling failed.
        sha256: hash of the original's bytes.
        path: path of the original.
        metadata: scalars that the user attached to it.
        pinned: True if its compiled chunk is not evicted for newer uploads of the same user.
        split: the settings by which a document is cut into chunks (``mode``, ``tokens``, ``overlap``); None: it is one
            chunk.
        press: name of the press that its upload asked for, ``none``, or empty if the upload did not say.
        format: how the original holds its text: an encoding (``cp1252``) or a kind of document (``pdf``); empty for
            UTF-8, images and clips.
        pages: number of its pages, slides or sheets; None: it has none.
        kv_ttl: seconds for which its compiled chunks are kept unused; None: as the limits say.
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
    sha256: str = field(repr=False)
    path: Path = field(repr=False)
    tokens: int | None = None
    state: State = "compiling"
    error: str | None = None
    metadata: dict[str, Scalar] = field(default_factory=dict, hash=False)
    pinned: bool = False
    split: dict[str, Any] | None = field(default=None, hash=False)
    press: str = ""
    format: str = ""
    pages: int | None = None
    kv_ttl: int | None = None

    @property
    def status(self) -> str:
        """Return ``state`` in OpenAI's words: ``uploaded | processed | error``."""
        return {"compiling": "uploaded", "ready": "processed", "failed": "error"}[self.state]

    @property
    def label(self) -> str:
        """Return the name that people use for it: its handle or file name."""
        return self.handle or self.filename


class FilePage(NamedTuple):
    """A page of a listing; ``has_more`` tells whether more files follow."""

    files: list[File]
    has_more: bool


@dataclass(frozen=True)
class Reference:
    """A version of a reference, readable by every user.

    Args:
        id: ``ref_`` and 24 random characters, or as its administrator chose.
        version: 1 for the first; every replacement adds 1.
        title: its name for people and in prompts.
        metadata: scalars to filter by.
        bytes: size of the original.
        path: path of the original.
        key: identity of its decoded content.
        created_at, updated_at: times of version 1 and of this version, in seconds since the epoch.
        tokens: number of tokens of the compiled chunk; None until it is known.
        state: ``compiling | ready | failed``.
        error: reason why compiling failed.
        sha256: hash of the original's bytes.
        pinned: True if its compiled chunk is not evicted for newer references.
        format: as in ``File``.
        expires_at: seconds since the epoch; None: never.
        synced_from: the folder or listing from which a sync has added it; empty: none has.
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
    format: str = ""
    expires_at: float | None = None
    synced_from: str = ""


class ReferencePage(NamedTuple):
    """A page of a listing; ``has_more`` tells whether more references follow."""

    references: list[Reference]
    has_more: bool


class Change(NamedTuple):
    """A committed change of a reference; ``reference`` is the new version, or the last one if it was removed."""

    what: Literal["added", "replaced", "removed"]
    reference: Reference


class StorageUsage(NamedTuple):
    """Number and bytes of a user's files in one tier (``original``: unchanged uploads, ``disk``: compiled chunks). A
    quota of 0 means none."""

    owner: str
    tier: str
    count: int
    bytes: int
    files_quota: int
    bytes_quota: int


class Removed(NamedTuple):
    """A deleted or expired file, or a version of a reference that is gone. ``chunks`` is its content for
    ``Engine.forget``, without the content that another file of the same user (another reference) still has."""

    file: File | Reference
    chunks: tuple[Chunk, ...]
