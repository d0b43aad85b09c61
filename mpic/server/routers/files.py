"""``/v1/files``: the images and documents a person uploads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, File, Form, Path, Query, Request, Response, UploadFile
from starlette.concurrency import run_in_threadpool

from mpic.api.requests import FileChange
from mpic.api.resources import FileChunk, FileDeleted, FileList, FileObject
from mpic.engine.base import Engine
from mpic.errors import BadRequest, DocumentTooLong, FileNotFound, UnknownPress, UnsupportedParameter, cut
from mpic.library import File as LibraryFile
from mpic.library.caches import CHUNK
from mpic.library.intake.checks import check_life
from mpic.library.intake.receive import Arriving
from mpic.library.records import AsyncReader, Removed
from mpic.press import NONE, parse_press
from mpic.server.auth import CurrentUser, User
from mpic.server.cutting import check_whole, split_of
from mpic.server.json_routes import JSONRoute
from mpic.server.routers.common import (
    OCTETS,
    PARTS,
    After,
    Order,
    Tiers,
    download,
    form_fields,
    known_query,
    listed,
    shown,
    tiers_of,
)
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/files", tags=["files"], route_class=JSONRoute)

PURPOSES = ("user_data", "vision", "assistants")
RAW = {"required": True, "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}
CONDITIONS = ("Content-Range", "If-Match", "If-None-Match", "If-Unmodified-Since")
"""Header fields that say to write less than a whole file, or not always. To ignore one could destroy a file."""
FIELDS = ("file", "purpose", "handle", "replace", "split", "press", "ttl", "kv_ttl",
          "expires_after[anchor]", "expires_after[seconds]")  # fmt: skip


TTL = "seconds until it expires; left out: as the server is configured, which is never by default"
KV_TTL = (
    "seconds for which its compiled KV is kept unused; the original stays, and the next use compiles it again; left "
    "out: as the server is configured"
)


@router.post("", dependencies=[form_fields(*FIELDS)])
async def upload(
    request: Request,
    state: StateDep,
    user: CurrentUser,
    file: Annotated[UploadFile, File(description="an image, a clip, a document or text")],
    purpose: Annotated[str, Form(description="one of " + ", ".join(PURPOSES))] = "user_data",
    handle: Annotated[
        str | None, Form(description="NAME for `IMAGE#NAME` and `FILE#NAME` in prompts")
    ] = None,
    replace: Annotated[bool, Form(description="take the handle from another file, which is deleted")] = False,
    split: Annotated[
        str | None,
        Form(
            description="the way a document is cut into chunks: `auto` (if it is too long for one), `none`, `fixed`, "
            "`sentence`, `paragraph`, `section`, or an object with `mode`, `tokens` and `overlap`"
        ),
    ] = None,
    press: Annotated[
        str | None,
        Form(
            description="the press that compresses it, e.g. `snapkv-50`; `none`: no compression; default: the server's"
        ),
    ] = None,
    ttl: Annotated[int | None, Form(ge=1, description=TTL)] = None,
    kv_ttl: Annotated[int | None, Form(ge=1, description=KV_TTL)] = None,
    anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
    lifetime: Annotated[int | None, Form(alias="expires_after[seconds]", ge=1)] = None,
) -> FileObject:
    """Upload an image, a clip or a document. The answer comes when the original is durable; it is compiled in the
    background.

    The server decodes it to find out what it is. `state` goes from `compiling` to `ready` or `failed`; prompts may use
    it at once. Uploading the same bytes under the same handle again makes no second file (`outcome` is `unchanged`);
    only the lifetime starts again. `expires_after` is OpenAI's name for `ttl`.
    """
    name = file.filename or ""
    lives: dict[str, Any] = {"ttl": ttl, "anchor": anchor, "lifetime": lifetime}
    wishes: dict[str, Any] = {
        "purpose": purpose,
        "handle": handle,
        "replace": replace,
        "split": split,
        "press": press,
        "kv_ttl": kv_ttl,
    }
    return await store(
        request,
        state,
        user,
        cast(Arriving, file.file),
        filename=name,
        arguments=arguments_of(state, user, name, **wishes, **lives),
    )


@router.put("/{file_id}", dependencies=[Depends(known_query)], openapi_extra={"requestBody": RAW})
async def put(
    handle: Annotated[str, Path(alias="file_id", description="NAME for `IMAGE#NAME` and `FILE#NAME`")],
    request: Request,
    state: StateDep,
    user: CurrentUser,
    filename: Annotated[
        str | None, Query(max_length=1024, description="the file's name; left out: that in the path")
    ] = None,
    purpose: Annotated[str, Query(description="one of " + ", ".join(PURPOSES))] = "user_data",
    replace: Annotated[
        bool, Query(description="false: another file under this name is not replaced, but refused")
    ] = True,
    split: Annotated[str | None, Query(description="as in `POST /v1/files`")] = None,
    press: Annotated[str | None, Query(description="as in `POST /v1/files`")] = None,
    ttl: Annotated[int | None, Query(ge=1, description=TTL)] = None,
    kv_ttl: Annotated[int | None, Query(ge=1, description=KV_TTL)] = None,
) -> FileObject:
    """Upload an image, a clip or a document as the body itself, not in a form: `curl -T photo.png
    http://127.0.0.1:8000/v1/files/PHOTO`.

    The last part of the path is here its handle, not its id. A file that has it is replaced by other bytes; the same
    bytes change nothing but its lifetime. All else is as in `POST /v1/files`.
    """
    kind, _, _ = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower().startswith("multipart/"):
        raise BadRequest(
            "the body is the file itself; send a form to POST /v1/files instead", param="Content-Type"
        )
    for field in CONDITIONS:
        if field in request.headers:
            raise BadRequest(
                f"{field} is not supported: the body is the whole file; ?replace=false keeps a file that is there",
                param=field,
            )
    name = filename or handle
    wishes: dict[str, Any] = {
        "purpose": purpose,
        "handle": handle,
        "replace": replace,
        "split": split,
        "press": press,
        "kv_ttl": kv_ttl,
    }
    arguments = arguments_of(state, user, name, **wishes, ttl=ttl)
    arriving = state.library.files.arriving(None)
    try:
        await run_in_threadpool(state.library.files.admit, user.id, 1, name, **arguments)
        async for piece in request.stream():
            await arriving.write(piece)
        return await store(request, state, user, arriving, filename=name, arguments=arguments)
    finally:
        arriving.close()


def arguments_of(
    state: State,
    user: User,
    filename: str,
    *,
    purpose: str,
    handle: str | None,
    replace: bool,
    split: str | None,
    press: str | None,
    ttl: int | None,
    kv_ttl: int | None,
    anchor: str | None = None,
    lifetime: int | None = None,
    for_ever: bool = False,
) -> dict[str, Any]:
    """Return the arguments of ``UploadLibrary.upload`` for an upload, besides its content.

    Args:
        for_ever: without a lifetime it never expires, whatever the configuration says.

    Raises:
        UnsupportedParameter, UnknownPress, BadRequest: a field is not valid.
    """
    if purpose not in PURPOSES:
        raise UnsupportedParameter(
            f"purpose {cut(purpose)!r} is not supported; known: {', '.join(PURPOSES)}", param="purpose"
        )
    life = _lifetime(ttl, anchor, lifetime)
    if life is None and not for_ever:
        life = state.config.library.default_ttl or None
    return {
        "handle": handle or None,
        "expires_after": life,
        "kv_ttl": kv_ttl,
        "replace": replace,
        "split": split_of(split, filename, state.config.library.split_tokens),
        "split_asked": split not in (None, "auto"),
        "press": checked_press(press, state.engine),
        "key": user.limits,
    }


async def store(
    request: Request,
    state: State,
    user: User,
    content: AsyncReader | Arriving,
    *,
    filename: str,
    arguments: dict[str, Any],
) -> FileObject:
    """Store an upload of whatever route, have it compiled, and return it with its outcome."""
    stored = await state.library.files.upload(user.id, content, filename, **arguments)
    try:
        # on a thread, as the engine may take a step for each chunk; first, as the new file may have some of them
        await run_in_threadpool(_forget, stored.removed, state.engine)
    finally:
        if stored.compile:
            request.app.state.background.compile(stored.file)
    answer = _show(stored.file, state, {}, {})
    if stored.outcome == "unchanged":
        with suppress(FileNotFound):  # another request has replaced it since, after it was stored
            answer = await run_in_threadpool(get_file, stored.file.id, state, user)
    return answer.model_copy(update={"outcome": stored.outcome})


def _lifetime(ttl: int | None, anchor: str | None, seconds: int | None) -> int | None:
    """Return the lifetime of an upload in seconds, from our field or OpenAI's. Raise BadRequest if they are in
    conflict."""
    if (anchor is None) != (seconds is None):
        missing = "expires_after[anchor]" if anchor is None else "expires_after[seconds]"
        raise BadRequest("expires_after needs both anchor and seconds", param=missing)
    if ttl is not None and seconds is not None and ttl != seconds:
        raise BadRequest("ttl and expires_after differ; the latter is OpenAI's name for it", param="ttl")
    name, life = ("expires_after[seconds]", seconds) if ttl is None else ("ttl", ttl)
    check_life(name, life)
    return life


def checked_press(press: str | None, engine: Engine) -> str | None:
    """Return a press's canonical name.

    Raises:
        UnknownPress: there is no press of that name.
        UnsupportedParameter: the engine cannot compress chunks of its model by this press.
    """
    try:
        found = parse_press(press or "")
    except UnknownPress as error:
        error.param = "press"
        raise
    if found is None:
        return press and NONE
    if found.syntax not in engine.presses():
        raise UnsupportedParameter(f"press {found} does not run on model {engine.info.name}", param="press")
    return found.name


@router.get("", response_model=FileList)
async def list_files(
    request: Request,
    state: StateDep,
    user: CurrentUser,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Order = "desc",
    purpose: Annotated[
        str | None, Query(description="vision: images and clips, user_data: documents")
    ] = None,
) -> Response:
    """List your files by age."""
    kinds = {None: None, "vision": ("image", "video"), "user_data": ("text",)}.get(purpose, ())

    def page() -> FileList:
        files = state.library.files
        found = files.page(user.id, after=after, limit=limit, order=order, kinds=kinds)
        ids = [file.id for file in found.files]
        tiers, counts = tiers_of(state, user.id, ids), files.counts(user.id, ids)
        return FileList.of((_show(file, state, tiers, counts) for file in found.files), found.has_more)

    return await listed(request, state, page)


@router.get("/{file_id}")
def get_file(file_id: str, state: StateDep, user: CurrentUser) -> FileObject:
    """Show one file."""
    file = state.library.files.get(user.id, file_id)
    borders = state.library.files.borders(user.id, file_id)
    chunks = tuple(FileChunk(start=one.start, end=one.end, page=one.page) for one in borders) or None
    found = _show(
        file, state, tiers_of(state, user.id, [file_id]), {file_id: len(borders)} if borders else {}
    )
    return found.model_copy(update={"chunks": chunks})


@router.head("/{file_id}/content", include_in_schema=False)
@router.get("/{file_id}/content", response_class=Response, responses=PARTS)
def get_content(file_id: str, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Download the original, byte by byte, or the one `Range` of it that is asked for. The `ETag` is the SHA-256 of the
    whole."""
    file = state.library.files.get(user.id, file_id)
    return download(request, file, lambda: state.library.files.open(user.id, file_id))


@router.patch("/{file_id}")
def change_file(file_id: str, body: FileChange, state: StateDep, user: CurrentUser) -> FileObject:
    """Let a file live for `ttl` seconds from now, keep its compiled KV for `kv_ttl` seconds without a use, pin it, or
    give it another handle. Prompts find it by the new handle only."""
    check_life("ttl", body.ttl)  # checked first, so that all change or none does
    check_life("kv_ttl", body.kv_ttl)
    if file_id.startswith(CHUNK):
        state.library.caches.chunk(user.id, file_id)
        raise BadRequest(
            "a chunk lives as long as its cache and has no handle: change the cache itself, /v1/caches/group-...",
            param="file_id",
        )
    if "handle" in body.model_fields_set:
        state.library.files.rename(user.id, file_id, body.handle)
    if "ttl" in body.model_fields_set:
        state.library.files.extend(user.id, file_id, body.ttl)
    if "kv_ttl" in body.model_fields_set:
        state.library.files.keep_kv(user.id, file_id, body.kv_ttl)
    if "pinned" in body.model_fields_set:
        state.library.files.pin(user.id, file_id, body.pinned)
    return get_file(file_id, state, user)


@router.post("/{file_id}/prefetch", status_code=202)
async def prefetch(file_id: str, request: Request, state: StateDep, user: CurrentUser) -> FileObject:
    """Bring the compiled KV of a file near to the device, in the background, for questions that will come soon. What
    has expired or was evicted is compiled again."""
    file = await run_in_threadpool(state.library.files.get, user.id, file_id)
    request.app.state.background.compile(file, prefetch=True)
    return await run_in_threadpool(get_file, file_id, state, user)


@router.delete("/{file_id}")
def delete_file(file_id: str, state: StateDep, user: CurrentUser) -> FileDeleted:
    """Delete a file and everything compiled from it. New prompts no longer find it; running answers finish."""
    _forget([state.library.files.delete(user.id, file_id)], state.engine)
    return FileDeleted(id=file_id)


def _forget(removed: Iterable[Removed], engine: Engine) -> None:
    engine.forget(*(chunk for _, chunks in removed for chunk in chunks))


def _show(file: LibraryFile, state: State, tiers: Tiers, counts: Mapping[str, int]) -> FileObject:
    purpose, details = "user_data" if file.kind == "text" else "vision", file.error
    try:
        check_whole(file, state.engine.info.context_length)
    except DocumentTooLong as error:
        details = error.message
    more = {"purpose": purpose, "status_details": details, "chunk_count": counts.get(file.id, 1)}
    more |= {"press": file.press or None, "format": file.format or None}
    return shown(FileObject, file, tiers=tiers.get(file.id, ()), **more)
