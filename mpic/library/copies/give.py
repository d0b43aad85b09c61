"""Gives the files of one user to another, such as those that were uploaded before there were API keys (user
``local``)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpic.errors import BadRequest, CorruptFile, MPICError
from mpic.library.caches import Cache, CachedText
from mpic.library.intake.decode import NO_CLIPS
from mpic.library.library import Library
from mpic.library.records import File


class Given(NamedTuple):
    """The outcome for a file or a cache: its name, and the reason if it was left where it is."""

    name: str
    why: str = ""


def give(
    library: Library, source: str, target: str, progress: Callable[[int], None] = lambda done: None
) -> list[Given]:
    """Give every upload and every explicit cache of a user to another one.

    Each is stored durably for its new owner before the old owner loses it, so an interruption loses nothing, and the
    same call resumes. Handles, names, pins and lifetimes stay; ids and times of creation are new, and chunks are
    compiled again, because compiled chunks are never shared by users. A file that the new owner has already, under the
    same handle, stays as it is and expires with the later of both; so does a cache of the same name and chunks.

    Args:
        progress: called after each file with 1.

    Returns:
        One entry per file or cache, oldest first. Those that stay with the old owner have a reason, such as a handle
        that the new owner uses for another file.
    """
    if source == target:
        raise BadRequest("a user cannot be given its own files", param="user")
    given = []
    # an interrupted call may have stored some of these and of the caches, which no handle tells from others
    unnamed = {_traits(file): file for file in _files(library, target) if file.handle is None}
    for file in _files(library, source):
        given.append(_file(library, file, target, unnamed))
        progress(1)
    held = {_cache_traits(cache): cache for cache in _caches(library, target)}
    given += [_cache(library, cache, target, held) for cache in _caches(library, source)]
    return given


def _files(library: Library, user: str) -> list[File]:
    return library.files.page(user, order="asc", limit=1 << 30).files


def _file(library: Library, file: File, target: str, unnamed: dict[str, File]) -> Given:
    """Give a file; see ``_held`` for ``unnamed``."""
    name = file.handle or file.filename
    try:
        content = library.files.content(file.owner, file.id)
        held = _held(library, file, target, unnamed)
        ends = [one.expires_at for one in (file, held) if one is not None]
        left = _left(library, _latest(ends))
        if held is not None and held.handle is None:
            kept = library.files.extend(target, held.id, left)
        else:
            # no engine is here to tell whether it takes clips: what was one stays one
            library.files.no_clips = None if file.kind == "video" else NO_CLIPS
            kept = library.files.add(
                target,
                content,
                file.filename,
                handle=file.handle,
                expires_after=left,
                metadata=file.metadata,
                split=file.split,
                press=file.press or None,
                kv_ttl=file.kv_ttl,
            )
        if file.pinned:
            library.files.pin(target, kept.id)
        library.files.delete(file.owner, file.id)
        return Given(name)
    except MPICError as error:
        return Given(name, error.message)


def _held(library: Library, file: File, target: str, unnamed: dict[str, File]) -> File | None:
    """Return the new owner's file of the same content and handle, if there is one.

    Args:
        unnamed: the new owner's files without a handle by ``_traits``; the one that is returned is taken out.
    """
    if file.handle is not None:
        held = library.files.held(target, file.handle)
        return held if held is not None and held.sha256 == file.sha256 else None
    held = unnamed.pop(_traits(file), None)
    if held is not None:
        with suppress(CorruptFile):
            library.files.content(target, held.id)  # which will be the only copy
            return held
    return None


def _traits(file: File) -> str:
    """Return everything that a gift keeps of a file without a handle, except pin and lifetime."""
    traits = (file.sha256, file.filename, file.metadata, file.split, file.press)
    return json.dumps(traits, sort_keys=True)


def _caches(library: Library, user: str) -> list[Cache]:
    caches: list[Cache] = []
    while True:
        page = library.caches.page(user, after=caches[-1].id if caches else None, order="asc")
        caches += page.caches
        if not page.has_more:
            return caches


def _cache(library: Library, listed: Cache, target: str, held: dict[str, Cache]) -> Given:
    """Give a cache.

    Args:
        listed: the cache as it was listed; it may be gone.
        held: the new owner's caches by ``_cache_traits``; one that takes the place of the gift is taken out.
    """
    name, source = listed.name, listed.owner
    try:
        cache = library.caches.get(source, listed.id)
        same = _readable(library, held.pop(_cache_traits(cache), None))
        if same is not None:
            ends = (cache.expires_at, same.expires_at)
            library.caches.extend(target, same.id, _left(library, _latest(ends)))
        else:
            texts = [library.files.content(source, chunk.file.id).decode() for chunk in cache.chunks]
            parts = [CachedText(text, chunk.start, chunk.end) for text, chunk in zip(texts, cache.chunks)]
            left = _left(library, cache.expires_at)
            library.caches.create(target, parts, name=name, split=cache.split, ttl=left)
        library.caches.delete(source, cache.id)
        return Given(name)
    except MPICError as error:
        return Given(name, error.message)


def _cache_traits(cache: Cache) -> str:
    """Return everything that a gift keeps of a cache, except its lifetime."""
    chunks = [(chunk.file.sha256, chunk.start, chunk.end) for chunk in cache.chunks]
    return json.dumps((cache.name, cache.split, chunks), sort_keys=True)


def _readable(library: Library, cache: Cache | None) -> Cache | None:
    """Return a cache whose chunks are as they were stored; they will be the only copies."""
    if cache is None:
        return None
    try:
        for chunk in cache.chunks:
            library.files.content(cache.owner, chunk.file.id)
    except CorruptFile:
        return None
    return cache


def _latest(ends: Sequence[float | None]) -> float | None:
    """Return the last of some times; None, which is never, is after all others."""
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None


def _left(library: Library, expires_at: float | None) -> int | None:
    """Return the seconds until something expires."""
    return None if expires_at is None else max(1, math.ceil(expires_at - library.clock()))
