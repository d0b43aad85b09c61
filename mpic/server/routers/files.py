"""``/v1/files``: the images and documents a person uploads."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, File, Form, Query, Request, Response, UploadFile

from mpic.errors import BadRequest, UnsupportedParameter
from mpic.library import File as LibraryFile
from mpic.library import Library
from mpic.server.auth import CurrentUser
from mpic.server.body import JSONRoute
from mpic.server.replies import FileDeleted, FileList, FileObject
from mpic.server.schemas import FileChange
from mpic.server.state import StateDep

router = APIRouter(prefix="/v1/files", tags=["files"], route_class=JSONRoute)

PURPOSES = ("user_data", "vision", "assistants")
FIELDS = frozenset({"file", "purpose", "handle", "expires_after[anchor]", "expires_after[seconds]"})


def known_fields(*fields: str) -> Any:
    """A dependency: unknown form fields are errors, not ignored; so is what is no text (a part may name its own
    encoding, and some can spell half of a surrogate pair)."""

    async def check(request: Request) -> None:
        form = await request.form()
        for name, value in form.multi_items():
            try:
                (name + (value if isinstance(value, str) else "")).encode()
            except UnicodeEncodeError as error:
                raise BadRequest("a form field contains half of a surrogate pair") from error
        unknown = sorted(set(form.keys()) - set(fields))
        if unknown:
            raise UnsupportedParameter(f"{unknown[0]} is not supported by this server", param=unknown[0])

    return Depends(check)


@router.post("", dependencies=[known_fields(*FIELDS)])
async def upload(
    request: Request,
    state: StateDep,
    user: CurrentUser,
    file: Annotated[UploadFile, File(description="PNG, JPEG, WebP, BMP, or text in UTF-8")],
    purpose: Annotated[str, Form(description="one of " + ", ".join(PURPOSES))] = "user_data",
    handle: Annotated[
        str | None, Form(description="NAME for `IMAGE#NAME` and `FILE#NAME` in prompts")
    ] = None,
    anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
    seconds: Annotated[int | None, Form(alias="expires_after[seconds]", ge=1)] = None,
) -> FileObject:
    """Upload an image or a document. Answered when the original is durable; it is compiled in the background.

    What it is, is found by decoding it. `state` goes from `compiling` to `ready` or `failed`; prompts may use it at
    once.
    """
    if purpose not in PURPOSES:
        raise UnsupportedParameter(
            f"purpose {purpose!r} is not supported; known: {', '.join(PURPOSES)}", param="purpose"
        )
    if (anchor is None) != (seconds is None):
        raise BadRequest("expires_after needs both anchor and seconds", param="expires_after")
    async with state.quotas.admit(user, file.size or 0):
        stored = await state.library.files.upload(user.id, file, file.filename or "", handle or None, seconds)
    request.app.state.uploads.compile(stored)
    return _show(stored, ())


@router.get("")
def list_files(
    state: StateDep,
    user: CurrentUser,
    after: Annotated[str | None, Query(description="id of the last file of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(description="vision: images, user_data: documents")] = None,
) -> FileList:
    """Your files by age."""
    kind = {None: None, "vision": "image", "user_data": "text"}.get(purpose, "none")
    page = state.library.files.page(user.id, after=after, limit=limit, order=order, kind=kind)
    tiers = tiers_of(state.library, state.engine.info.digest, user.id)
    data = [_show(file, tiers.get(file.id, ())) for file in page.files]
    return FileList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=page.has_more,
    )


@router.get("/{file_id}")
def get_file(file_id: str, state: StateDep, user: CurrentUser) -> FileObject:
    """One file."""
    file = state.library.files.get(user.id, file_id)
    return _show(file, tiers_of(state.library, state.engine.info.digest, user.id, file_id).get(file_id, ()))


@router.get("/{file_id}/content", response_class=Response)
def get_content(file_id: str, state: StateDep, user: CurrentUser) -> Response:
    """The original, byte by byte; always a download, whatever it is."""
    file = state.library.files.get(user.id, file_id)
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    content = state.library.files.content(user.id, file_id)
    return Response(content, media_type="application/octet-stream", headers=headers)


@router.patch("/{file_id}")
def change_file(file_id: str, body: FileChange, state: StateDep, user: CurrentUser) -> FileObject:
    """Let a file live for `ttl` seconds from now."""
    state.library.files.extend(user.id, file_id, body.ttl)
    return get_file(file_id, state, user)


@router.delete("/{file_id}")
def delete_file(file_id: str, state: StateDep, user: CurrentUser) -> FileDeleted:
    """Delete a file and everything compiled from it. New prompts no longer find it; answers that run end well."""
    removed = state.library.files.delete(user.id, file_id)
    if removed.chunk is not None:
        state.engine.forget(removed.chunk)
    return FileDeleted(id=file_id)


def _show(file: LibraryFile, tiers: tuple[str, ...]) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=None if file.expires_at is None else int(file.expires_at),
        filename=file.filename,
        purpose="vision" if file.kind == "image" else "user_data",
        status=file.status,
        status_details=file.error,
        handle=file.handle,
        kind=file.kind,
        tokens=file.tokens,
        state=file.state,
        tiers=list(tiers),
    )


def tiers_of(
    library: Library, model: str, user: str, file_id: str | None = None
) -> dict[str, tuple[str, ...]]:
    """Where KV of the user's files, compiled for the served model, lies below the device."""
    rows = library.catalog.read(
        "SELECT DISTINCT f.id, c.tier FROM files f JOIN chunks c USING (owner, kind, digest) "
        "WHERE f.owner = ? AND c.model = ? AND c.state = 'ready' AND f.id = COALESCE(?, f.id)",
        user,
        model,
        file_id,
    )
    found: dict[str, tuple[str, ...]] = {}
    for row in rows:
        found[row["id"]] = (*found.get(row["id"], ()), row["tier"])
    return found
