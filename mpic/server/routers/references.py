"""``/v1/references``: the reference library. Administrators write, every user reads and searches."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile
from PIL import Image
from starlette.concurrency import run_in_threadpool

from mpic.api.requests import ReferenceChange, ReferenceSearch
from mpic.api.resources import (
    IndexState,
    ReferenceDeleted,
    ReferenceFound,
    ReferenceList,
    ReferenceObject,
    ReferencesFound,
    SyncState,
)
from mpic.errors import BadRequest, InvalidUpload, NotFound, TooLarge
from mpic.library import SHARED, Reference, decode_image, thumbnail
from mpic.library.intake.receive import Arriving
from mpic.retriever import Query as SearchQuery
from mpic.server.auth import AdminUser, CurrentUser
from mpic.server.json_routes import JSONRoute, parse
from mpic.server.routers.common import PARTS, After, Order, T, download, form_fields, listed, shown
from mpic.server.state import State, StateDep

if TYPE_CHECKING:
    from mpic.server.sync import SyncJob

router = APIRouter(prefix="/v1/references", tags=["references"], route_class=JSONRoute)

THUMBNAIL = 128
"""Longest side in pixels."""
FIELDS = ("file", "title", "description", "metadata", "ttl")
Content = Annotated[UploadFile, File(description="an image, a document or text")]
Title = Annotated[
    str | None, Form(description="its name for people and in prompts; default: the file's name")
]
Description = Annotated[str | None, Form()]
Metadata = Annotated[str | None, Form(description="JSON object of scalars, to filter searches by")]
TTL = Annotated[int | None, Form(ge=1, description="seconds until it expires; left out: never")]


@router.post("", dependencies=[form_fields(*FIELDS, "id")])
async def create(
    request: Request,
    state: StateDep,
    user: AdminUser,
    file: Content,
    title: Title = None,
    description: Description = None,
    metadata: Metadata = None,
    ttl: TTL = None,
    id: Annotated[str | None, Form(description="`ref_...`; default: a random id")] = None,
) -> ReferenceObject:
    """Add an image or text. The answer comes when it is durable and can be found; it is compiled in the background."""
    name = file.filename or "reference"
    reference = await state.library.references.add(
        cast(Arriving, file.file),
        name,
        title=name if title is None else title,
        description=description or "",
        metadata=_metadata(metadata) or {},
        id=id,
        expires_after=ttl,
    )
    return await _added(request, state, reference)


@router.put("/{reference_id}", dependencies=[form_fields(*FIELDS)])
async def replace(
    reference_id: str,
    request: Request,
    state: StateDep,
    user: AdminUser,
    file: Content,
    title: Title = None,
    description: Description = None,
    metadata: Metadata = None,
    ttl: TTL = None,
) -> ReferenceObject:
    """Replace a reference by a new version; values that are left out stay as they were."""
    reference = await state.library.references.replace(
        reference_id,
        cast(Arriving, file.file),
        file.filename,
        title=title,
        description=description,
        metadata=_metadata(metadata),
        expires_after=ttl,
    )
    return await _added(request, state, reference)


@router.get("", response_model=ReferenceList)
async def list_references(
    request: Request,
    state: StateDep,
    user: CurrentUser,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    order: Order = "desc",
    kind: Literal["image", "text"] | None = None,
) -> Response:
    """List references by age."""

    def page() -> ReferenceList:
        found = state.library.references.listing(after, limit, order, kind)
        return ReferenceList.of(map(_show, found.references), found.has_more)

    return await listed(request, state, page)


@router.post("/search")
async def search(
    body: ReferenceSearch, request: Request, state: StateDep, user: CurrentUser
) -> ReferencesFound:
    """Find the references most like a text or an image, best first."""
    return await state.pools.prompts.run(request, _search, body, state)


def _search(body: ReferenceSearch, state: State) -> ReferencesFound:
    images = (_picture(body.image, state),) if body.image is not None else ()
    query = SearchQuery(body.query or "", images)
    try:
        hits = state.retriever.search(query, body.top_k, body.min_score, body.filter)
    except (InvalidUpload, TooLarge) as error:  # the image was not accepted
        error.param = "image"
        raise
    found = (
        _show(hit.reference, ReferenceFound, score=hit.score, words=hit.words, found_by=hit.found_by)
        for hit in hits
    )
    return ReferencesFound(data=tuple(found))


@router.get("/index")
def index_state(state: StateDep, user: AdminUser) -> IndexState:
    """Show how many references are indexed, by which embedder, and how many are missing."""
    state.retriever.flush(5.0)
    status = state.retriever.status()
    return IndexState(**{name: status[name] for name in IndexState.model_fields if name in status})


@router.post("/reindex", status_code=202)
def reindex(state: StateDep, user: AdminUser) -> IndexState:
    """Embed everything that has no vector of the configured embedder, in the background. `GET /v1/references/index`
    tells how far it is; a run that was interrupted continues where it stopped."""
    state.retriever.reindex()
    return index_state(state, user)


@router.get("/sync")
async def sync_state(request: Request, user: AdminUser) -> SyncState:
    """Show the outcome of the last sync with the folder or listing of the server's configuration."""
    return _sync(request).state()


@router.post("/sync", status_code=202)
async def sync(request: Request, user: AdminUser) -> SyncState:
    """Begin a sync now, in the background."""
    job = _sync(request)
    job.begin()
    return job.state()


def _sync(request: Request) -> SyncJob:
    job = request.app.state.background.sync
    if job is None:
        raise NotFound("this server syncs no references: set [retrieval] sync_references")
    return job


@router.get("/{reference_id}")
def get_reference(reference_id: str, state: StateDep, user: CurrentUser) -> ReferenceObject:
    """Show one reference."""
    return _show(state.library.references.get(reference_id))


@router.head("/{reference_id}/content", include_in_schema=False)
@router.get("/{reference_id}/content", response_class=Response, responses=PARTS)
def get_content(reference_id: str, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Download the original, byte by byte, or the one `Range` of it that is asked for. The `ETag` is the SHA-256 of the
    whole."""
    reference = state.library.references.get(reference_id)
    return download(request, reference, lambda: state.library.references.open(reference))


@router.get("/{reference_id}/thumbnail", response_class=Response)
async def get_thumbnail(reference_id: str, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Show a small PNG of an image."""
    return await state.pools.prompts.run(request, _thumbnail, reference_id, state)


def _thumbnail(reference_id: str, state: State) -> Response:
    reference = state.library.references.get(reference_id)
    if reference.kind != "image":
        raise NotFound(f"{reference_id} is a text, it has no thumbnail", id=reference_id)
    with state.library.references.open(reference) as original:
        picture = thumbnail(original.content(), state.library.limits, side=THUMBNAIL)
    headers = {"X-Content-Type-Options": "nosniff", "ETag": f'"{reference.sha256}"'}
    return Response(picture, media_type="image/png", headers=headers)


@router.patch("/{reference_id}")
def change_reference(
    reference_id: str, body: ReferenceChange, state: StateDep, user: AdminUser
) -> ReferenceObject:
    """Let a reference live for `ttl` seconds from now, or pin its compiled KV."""
    references = state.library.references
    found = references.get(reference_id)
    if "ttl" in body.model_fields_set:
        found = references.extend(reference_id, body.ttl)
    if "pinned" in body.model_fields_set:
        found = references.pin(reference_id, body.pinned)
    return _show(found)


@router.post("/{reference_id}/prefetch", status_code=202)
async def prefetch(reference_id: str, request: Request, state: StateDep, user: AdminUser) -> ReferenceObject:
    """Bring the compiled KV of a reference near to the device, in the background; what has expired or was evicted is
    compiled again."""
    reference = await run_in_threadpool(state.library.references.get, reference_id)
    request.app.state.background.compile_reference(reference, prefetch=True)
    return _show(reference)


@router.delete("/{reference_id}")
def delete_reference(reference_id: str, state: StateDep, user: AdminUser) -> ReferenceDeleted:
    """Remove a reference. New searches and prompts no longer find it; answers that use it finish."""
    removed = state.library.references.remove(reference_id)
    state.engine.forget(*removed.chunks)
    return ReferenceDeleted(id=reference_id)


async def _added(request: Request, state: State, reference: Reference) -> ReferenceObject:
    request.app.state.background.compile_reference(reference)
    await state.pools.prompts.call(SHARED, state.retriever.flush, 10.0)
    return _show(reference)


def _show(reference: Reference, kind: type[T] = ReferenceObject, **more: Any) -> T:  # ty: ignore[invalid-parameter-default] (T is then that)
    thumbnail = f"/v1/references/{reference.id}/thumbnail" if reference.kind == "image" else None
    return shown(kind, reference, thumbnail=thumbnail, synced=bool(reference.synced_from), **more)


def _metadata(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = parse(text.encode())
    except BadRequest as error:
        error.param = "metadata"
        raise
    except ValueError as error:
        raise BadRequest(f"metadata is not JSON: {error}", param="metadata") from error
    if not isinstance(value, dict):
        raise BadRequest("metadata must be a JSON object", param="metadata")
    return value


def _picture(url: str, state: State) -> Callable[[], Image.Image]:
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise BadRequest("image must be a data URL in base64", param="image")
    try:
        return partial(decode_image, base64.b64decode(data, validate=True), state.library.limits)
    except ValueError as error:  # also of letters beyond ASCII
        raise BadRequest(f"image is not base64: {error}", param="image") from error
