"""``/v1/uploads``: files that come in parts, each of which can be sent again."""

from __future__ import annotations

from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, File, Request, UploadFile
from starlette.concurrency import run_in_threadpool

from mpic.api.requests import UploadComplete, UploadCreate
from mpic.api.resources import UploadObject, UploadPartObject
from mpic.errors import TooLarge
from mpic.library.intake.checks import check_life
from mpic.library.intake.receive import Arriving
from mpic.server.auth import CurrentUser
from mpic.server.json_routes import JSONRoute
from mpic.server.routers.common import form_fields
from mpic.server.routers.files import arguments_of, store
from mpic.server.state import StateDep
from mpic.server.uploads import PartedUpload, ReceivedPart

router = APIRouter(prefix="/v1/uploads", tags=["uploads"], route_class=JSONRoute)


@router.post("")
async def create(body: UploadCreate, state: StateDep, user: CurrentUser) -> UploadObject:
    """Begin a file that comes in parts. It waits an hour for its next part.

    Everything that can be checked before the first byte is checked here. Parts are kept until the upload is complete,
    cancelled or expired, or the server ends.
    """
    if body.expires_after is not None:  # named here as it is in JSON
        check_life("expires_after.seconds", body.expires_after.seconds)
    check_life("kv_ttl", body.kv_ttl)
    arguments = arguments_of(
        state,
        user,
        body.filename,
        purpose=body.purpose,
        handle=body.handle,
        ttl=body.ttl,
        kv_ttl=body.kv_ttl,
        for_ever="ttl" in body.model_fields_set,
        anchor=None if body.expires_after is None else body.expires_after.anchor,
        lifetime=None if body.expires_after is None else body.expires_after.seconds,
        replace=body.replace,
        split=body.split
        if body.split is None or isinstance(body.split, str)
        else body.split.model_dump_json(),
        press=body.press,
    )
    try:
        await run_in_threadpool(state.library.files.admit, user.id, body.bytes, body.filename, **arguments)
    except TooLarge as error:
        error.param = "bytes"
        raise
    return _show(state.parted.create(user.id, body, arguments))


@router.get("/{upload_id}")
async def retrieve(upload_id: str, state: StateDep, user: CurrentUser) -> UploadObject:
    """Show an upload and the parts that are here, so that a client that was interrupted can send the others."""
    return _show(state.parted.get(user.id, upload_id))


@router.post("/{upload_id}/parts", dependencies=[form_fields("data")])
async def add_part(
    upload_id: str, state: StateDep, user: CurrentUser, data: Annotated[UploadFile, File()]
) -> UploadPartObject:
    """Add a part. Parts may come in any order and at the same time; one that is sent twice is two parts, of which the
    completing names one."""
    upload = state.parted.get(user.id, upload_id)
    return _part(upload, await state.parted.add_part(upload, cast(Arriving, data.file)))


@router.post("/{upload_id}/complete")
async def complete(
    upload_id: str, body: UploadComplete, request: Request, state: StateDep, user: CurrentUser
) -> UploadObject:
    """Make the file of some parts, in the order of their ids. Others are dropped. `file` is then as `POST /v1/files`
    answers it. If that fails, the upload is still under way; once it has succeeded, it says the same again."""
    upload = state.parted.get(user.id, upload_id)
    stored = partial(store, request, state, user, filename=upload.filename, arguments=upload.arguments)
    await state.parted.complete(upload, body.part_ids, body.md5, stored)
    return _show(upload)


@router.post("/{upload_id}/cancel")
async def cancel(upload_id: str, state: StateDep, user: CurrentUser) -> UploadObject:
    """End an upload and remove its parts."""
    upload = state.parted.get(user.id, upload_id)
    await state.parted.cancel(upload)
    return _show(upload)


def _show(upload: PartedUpload) -> UploadObject:
    return UploadObject(
        id=upload.id,
        bytes=upload.bytes,
        created_at=int(upload.created_at),
        expires_at=int(upload.expires_at),
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.status,
        parts=tuple(_part(upload, part) for part in upload.parts.values()),
        file=upload.file,
    )


def _part(upload: PartedUpload, part: ReceivedPart) -> UploadPartObject:
    return UploadPartObject(
        id=part.id,
        created_at=int(part.created_at),
        upload_id=upload.id,
        bytes=part.content.bytes,
        sha256=part.content.sha256,
    )
