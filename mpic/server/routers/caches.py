"""``/v1/caches``: explicit context caching. Texts are cut, compiled in the background, linked by id in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from mpic.api.requests import CacheChange, CacheRequest
from mpic.api.resources import CacheChunkObject, CacheDeleted, CacheList, CacheObject
from mpic.errors import BadRequest
from mpic.library import Cache, CacheChunk
from mpic.library.caches import CHUNK, MOST_CHUNKS, CachedText
from mpic.library.intake.checks import check_life
from mpic.prompt.split import Split, TooManyPieces
from mpic.prompt.split_process import split_in_process
from mpic.server.auth import CurrentUser
from mpic.server.json_routes import SMALL, JSONRoute
from mpic.server.routers.common import After, Order, Tiers, listed, shown, tiers_of
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/caches", tags=["caches"], route_class=JSONRoute)


@router.post("")
async def create(body: CacheRequest, request: Request, state: StateDep, user: CurrentUser) -> CacheObject:
    """Cache a text, cut as `split` says, or chunks of your own. The answer comes when they are durable; they are
    compiled in the background. Prompts may link them at once."""
    split = Split(**body.split.model_dump())
    large = sum(map(len, (body.text or "", *(body.chunks or ())))) > SMALL
    threads = state.pools.splitting if large else state.pools.prompts
    parts = await threads.run(request, _parts, body, split, state)
    create = partial(
        state.library.caches.create,
        name=body.name or "",
        split=asdict(split) if body.text is not None else None,
        ttl=body.ttl if "ttl" in body.model_fields_set else state.config.library.default_ttl or None,
        key=user.limits,
    )
    cache = await threads.call(user.id, create, user.id, parts)
    for chunk in cache.chunks:
        request.app.state.background.compile(chunk.file)
    return _show(cache, {})


@router.get("", response_model=CacheList)
async def list_caches(
    request: Request,
    state: StateDep,
    user: CurrentUser,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Order = "desc",
) -> Response:
    """List your caches by age."""

    def page() -> CacheList:
        found = state.library.caches.page(user.id, after=after, limit=limit, order=order)
        tiers = _tiers(state, user.id, found.caches)
        return CacheList.of((_show(cache, tiers) for cache in found.caches), found.has_more)

    return await listed(request, state, page)


@router.get("/{cache_id}", response_model=CacheObject | CacheChunkObject)
async def get_cache(cache_id: str, request: Request, state: StateDep, user: CurrentUser) -> Response:
    """Show a cache (`group-...`), or one of its chunks (`cache-...`)."""

    def show() -> CacheObject | CacheChunkObject:
        if cache_id.startswith(CHUNK):
            chunk = state.library.caches.chunk(user.id, cache_id)
            return _show_chunk(chunk, tiers_of(state, user.id, [cache_id]))
        cache = state.library.caches.get(user.id, cache_id)
        return _show(cache, _tiers(state, user.id, [cache]))

    return await listed(request, state, show)


@router.patch("/{cache_id}")
def change_cache(cache_id: str, body: CacheChange, state: StateDep, user: CurrentUser) -> CacheObject:
    """Let a cache (`group-...`) and all its chunks live for `ttl` seconds from now, keep their compiled KV for `kv_ttl`
    seconds without a use, or pin it."""
    check_life("ttl", body.ttl)  # checked first, so that all change or none does
    check_life("kv_ttl", body.kv_ttl)
    caches = state.library.caches
    cache = caches.get(user.id, cache_id)
    if "ttl" in body.model_fields_set:
        cache = caches.extend(user.id, cache_id, body.ttl)
    if "kv_ttl" in body.model_fields_set:
        cache = caches.keep_kv(user.id, cache_id, body.kv_ttl)
    if "pinned" in body.model_fields_set:
        cache = caches.pin(user.id, cache_id, body.pinned)
    return _show(cache, _tiers(state, user.id, [cache]))


@router.post("/{cache_id}/prefetch", status_code=202)
async def prefetch(cache_id: str, request: Request, state: StateDep, user: CurrentUser) -> CacheObject:
    """Bring the compiled KV of a cache near to the device, in the background, for questions that will come soon. What
    has expired or was evicted is compiled again."""
    cache = await run_in_threadpool(state.library.caches.get, user.id, cache_id)
    for chunk in cache.chunks:
        request.app.state.background.compile(chunk.file, prefetch=True)
    return await run_in_threadpool(lambda: _show(cache, _tiers(state, user.id, [cache])))


@router.delete("/{cache_id}")
def delete_cache(cache_id: str, state: StateDep, user: CurrentUser) -> CacheDeleted:
    """Delete a cache or one chunk, and everything compiled from it. Running answers finish."""
    removed = state.library.caches.delete(user.id, cache_id)
    state.engine.forget(*(chunk for one in removed for chunk in one.chunks))
    return CacheDeleted(id=cache_id)


def _parts(body: CacheRequest, split: Split, state: State) -> list[CachedText]:
    """Return the texts to cache. It may tokenize a whole book, so it runs on a thread."""
    if body.text is not None:
        text = body.text.removeprefix("\ufeff")
        state.library.caches.accepted(text)
        try:
            pieces = split_in_process(text, split, state.template.documents, MOST_CHUNKS)
        except TooManyPieces:  # overlapping ones may be far larger together than the text
            raise BadRequest(
                f"a cache has 1 to {MOST_CHUNKS} chunks, not {MOST_CHUNKS + 1} or more; larger pieces (split.tokens) "
                "make fewer",
                param="text",
                chunks=MOST_CHUNKS + 1,
                limit=MOST_CHUNKS,
            ) from None
        return [CachedText(text[p.start : p.end], p.start, p.end) for p in pieces]
    parts, at = [], 0
    for text in body.chunks or ():
        parts.append(CachedText(text, at, at + len(text)))
        at += len(text)
    return parts


def _tiers(state: State, user: str, caches: Iterable[Cache]) -> Tiers:
    return tiers_of(state, user, [chunk.file.id for cache in caches for chunk in cache.chunks])


def _show(cache: Cache, tiers: Tiers) -> CacheObject:
    return shown(CacheObject, cache, chunks=tuple(_show_chunk(chunk, tiers) for chunk in cache.chunks))


def _show_chunk(chunk: CacheChunk, tiers: Tiers) -> CacheChunkObject:
    file = chunk.file
    more = {"name": file.filename, "start": chunk.start, "end": chunk.end, "tiers": tiers.get(file.id, ())}
    return shown(CacheChunkObject, file, **more)
