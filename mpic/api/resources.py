"""Files, caches, references, models, health and errors as the server answers them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, with_config
from typing_extensions import TypedDict

from mpic.api.base import OPEN, ApiObject, Created, Deleted, Expiring, ItemList, ItemPage, ReadAsDict, one_of

Kind = Annotated[str, one_of("image", "text")]
CompileState = Annotated[str, one_of("compiling", "ready", "failed")]
Tiers = Annotated[tuple[str, ...], Field(description="tiers below the device that hold its compiled KV now")]

# ---- files


class FileChunk(ApiObject):
    """The start and end of a chunk of a document, in characters of its text, and the page that it is on."""

    start: int
    end: int
    page: int | None = None


class FileObject(Expiring):
    """An uploaded image, clip or document. `status` is OpenAI's, `state` is ours."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Annotated[str, one_of("uploaded", "processed", "error")]
    status_details: str | None = None
    handle: str | None = Field(None, description="NAME in `IMAGE#NAME` or `FILE#NAME`")
    kind: Annotated[str, one_of("image", "video", "text")]
    tokens: int | None = Field(None, description="length of its compiled chunks, once they are compiled")
    chunk_count: int = Field(
        1, description="a long document is cut into several, when it is compiled or first used"
    )
    chunks: tuple[FileChunk, ...] | None = Field(
        None, description="the chunks of a document that was cut; only in the response about this one file"
    )
    press: str | None = Field(None, description="the press that its upload asked for; none: no compression")
    format: str | None = Field(
        None,
        description="how the file holds its text, if not in UTF-8: an encoding such as `cp1252`, or `pdf`, `docx`, ...",
    )
    pages: int | None = Field(
        None, description="number of its pages, slides or sheets; `FILE#NAME[3-5]` are some of them"
    )
    state: CompileState
    tiers: Tiers = Field(default_factory=tuple)
    kv_ttl: int | None = Field(
        None,
        description="seconds for which its compiled KV is kept unused; null: as the server is configured",
    )
    pinned: bool = Field(
        False, description="its compiled KV is not evicted for newer files, and does not expire"
    )
    outcome: Annotated[str, one_of("created", "unchanged", "replaced")] | None = Field(
        None, description="the outcome of the upload; only in the response to it"
    )

    @property
    def mention(self) -> str | None:
        """The name of the file in prompts: ``IMAGE#NAME`` or ``FILE#NAME``; None without a handle."""
        return f"{'IMAGE' if self.kind == 'image' else 'FILE'}#{self.handle}" if self.handle else None


class FileList(ItemPage[FileObject]):
    pass


class FileDeleted(Deleted):
    object: Literal["file"] = "file"


# ---- uploads in parts


class UploadPartObject(Created):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str
    bytes: int
    sha256: str = Field("", description="of its bytes, in hexadecimal")


class UploadObject(Expiring):
    """A file that comes in parts. `file` is the result, once it is complete."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int | None = Field(
        None, description="an hour after its last part; what has come is then removed"
    )
    filename: str
    purpose: str
    status: Annotated[str, one_of("pending", "completed", "cancelled", "expired")]
    parts: tuple[UploadPartObject, ...] = Field((), description="the parts that are here, as they came")
    file: FileObject | None = None


# ---- caches


class CacheChunkObject(Expiring):
    """A cached text. Link it by `id`: `{"type": "cache", "cache_id": id}`."""

    id: str
    object: Literal["cache.chunk"] = "cache.chunk"
    name: str
    start: int = Field(description="its first character in the text it was cut from")
    end: int = Field(description="the character after its last")
    bytes: int
    created_at: int
    expires_at: int | None = None
    tokens: int | None = Field(None, description="length of the compiled chunk, once it is compiled")
    state: CompileState
    error: str | None = Field(None, description="the reason if it failed")
    tiers: Tiers = Field(default_factory=tuple)


class CacheObject(Expiring):
    """Texts that were cached together. Link all of them by `id`, or the chunks one by one in any order."""

    id: str
    object: Literal["cache"] = "cache"
    name: str
    split: dict[str, Any] | None = Field(None, description="the settings by which the text was cut")
    bytes: int
    created_at: int
    expires_at: int | None = None
    tokens: int | None = None
    state: CompileState
    kv_ttl: int | None = Field(
        None,
        description="seconds for which its compiled KV is kept unused; null: as the server is configured",
    )
    pinned: bool = Field(
        False, description="its compiled KV is not evicted for newer ones, and does not expire"
    )
    chunks: tuple[CacheChunkObject, ...]


class CacheList(ItemPage[CacheObject]):
    pass


class CacheDeleted(Deleted):
    object: Literal["cache"] = "cache"


# ---- references


class ReferenceObject(Expiring):
    """An image or text of the reference library, its newest version."""

    id: str
    object: Literal["reference"] = "reference"
    version: int
    kind: Kind
    title: str
    description: str
    metadata: dict[str, str | int | float | bool]
    filename: str
    bytes: int
    sha256: str = Field(description="hash of the original's bytes")
    created_at: int
    updated_at: int
    tokens: int | None = Field(None, description="length of the compiled chunk, once it is compiled")
    state: CompileState
    error: str | None = None
    thumbnail: str | None = Field(None, description="path of a small picture, for images")
    expires_at: int | None = None
    pinned: bool = Field(
        False, description="its compiled KV is not evicted for newer ones, and does not expire"
    )
    synced: bool = Field(False, description="the server's sync has added it, and removes it")

    @property
    def updated_time(self) -> datetime:
        """``updated_at`` as a datetime in UTC."""
        return datetime.fromtimestamp(self.updated_at, UTC)


class ReferenceFound(ReferenceObject):
    score: float = Field(description="similarity to the query, -1 to 1")
    words: float | None = Field(None, description="BM25 of the query's words in it; null: not found by them")
    found_by: tuple[str, ...] = Field(
        default=("vector",), description="lists that it was in, fused by rank: `vector`, `words`"
    )


class ReferenceList(ItemPage[ReferenceObject]):
    pass


class SyncNote(ApiObject):
    """An entry of the folder or listing that is not in the library as it is there, and why."""

    where: str
    message: str
    code: str


class SyncState(ApiObject):
    """The sync of references with a folder or listing; the counts are those of its last run."""

    object: Literal["reference_sync"] = "reference_sync"
    source: str
    seconds: int = Field(description="time from the end of a run to the next one")
    running: bool
    at: int | None = Field(None, description="when the last run ended")
    added: int = 0
    replaced: int = 0
    removed: int = 0
    unchanged: int = 0
    problem: str | None = Field(None, description="the reason why the last run could not be finished")
    notes: tuple[SyncNote, ...] = Field((), description="entries that were left out, at most 100")


class ReferencesFound(ItemList[ReferenceFound]):
    pass


class ReferenceDeleted(Deleted):
    object: Literal["reference"] = "reference"


@with_config(OPEN)
class IndexFailure(TypedDict):
    """A reference that no search finds, because it cannot be read or embedded."""

    id: str
    code: str
    message: str


class IndexState(ApiObject):
    """The vectors of the reference library."""

    object: Literal["reference_index"] = "reference_index"
    embedder: dict[str, str | int]
    references: int
    vectors: int
    missing: int = Field(description="references without a vector of this embedder")
    reindexing: bool
    mismatch: tuple[str, ...] = Field(description="other embedders that made vectors: reindex")
    index: str = Field(description="`file`, or the reason why it was rebuilt")
    kind: str = Field("", description="the index of vectors that serves: flat (exact) or IVF (approximate)")
    words: int | None = Field(
        None, description="references whose words are indexed; null: the server's SQLite has no FTS5"
    )
    problem: str | None = Field(description="the reason why the last batch was not embedded at all")
    failed: tuple[IndexFailure, ...] = Field(description="references that cannot be embedded, the newest 100")


# ---- models and health


class ModelObject(ApiObject):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mpic"
    context_length: int
    modalities: tuple[str, ...]
    policies: tuple[str, ...] = Field(
        default_factory=tuple, description="syntax of the policies that requests may name"
    )
    presses: tuple[str, ...] = Field(
        default_factory=tuple, description="syntax of the presses that requests may name"
    )


class ModelList(ItemList[ModelObject]):
    pass


class ServedModel(ReadAsDict):
    """The model that a server has loaded, as it runs."""

    name: str = ""
    digest: str = Field("", description="digest of the weights and the configuration")
    family: str = ""
    context_length: int = Field(0, description="maximum number of tokens of a prompt and its answer together")
    dtype: str = ""
    device: str = ""
    modalities: tuple[str, ...] = ()
    attention: str = Field("", description="the implementation that is used")
    details: dict[str, Any] = Field(default_factory=dict)


class EngineState(ReadAsDict):
    """The engine's counters for administrators; every engine adds its own."""

    error: str | None = Field(None, description="the error code if the engine is not ready")
    running: int | None = Field(None, description="number of running requests")
    waiting: int | None = Field(None, description="number of requests that wait for their turn")


class AutoChoice(ApiObject):
    """The policy ``auto``: whether requests that name no policy get it, the policy that it is for each kind of chunk
    that the model takes (``image``, ``text``), and a sentence that says why."""

    default: bool
    policies: dict[str, str]
    why: str


class Health(ApiObject):
    """The state of the server, what runs, and the policies on offer. ``ready`` False is an answer too.

    ``engine`` holds the engine's counters where the key is an admin's or none is needed, and is empty for others. It
    holds ``error`` when the engine is not ready. ``tiers`` holds the counters of the tiers of compiled chunks, nearest
    first, for the same keys as those of the engine. ``policy`` is the policy of requests that name none; where the
    server chooses it (``auto.default``), it is that of a prompt with chunks of every kind.
    """

    status: str
    live: bool
    ready: bool
    version: str
    model: ServedModel
    engine: EngineState
    policy: str
    policies: tuple[str, ...]
    auto: AutoChoice | None = None
    press: str = ""
    presses: tuple[str, ...] = ()
    tiers: dict[str, dict[str, int]] = Field(default_factory=dict)


# ---- errors


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str
    details: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail
