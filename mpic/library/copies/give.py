"""Gives the files of one user to another, such as those that were uploaded before there were API keys (user
``local``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from mpic.errors import BadRequest, MPICError
from mpic.library.caches import CachedText
from mpic.library.intake.decode import NO_CLIPS
from mpic.library.library import Library


class Given(NamedTuple):
    """The outcome for a file or a cache: its name, and the reason if it was left where it is."""

    name: str
    why: str = ""


def give(
    library: Library, source: str, target: str, progress: Callable[[int], None] = lambda done: None
) -> list[Given]:
    """Gives every upload and every explicit cache of a user to another one.

    Each is stored durably for its new owner before the old owner loses it, so an interruption loses nothing, and the
    same call resumes. Handles, names and lifetimes stay; ids and times of creation are new, and chunks are compiled
    again, because compiled chunks are never shared by users.

    Args:
        progress: called after each file with 1.

    Returns:
        One entry per file or cache, oldest first. Those that stay with the old owner have a reason, such as a handle
        that the new owner uses for another file.
    """
    if source == target:
        raise BadRequest("a user cannot be given its own files", param="user")
    given = []
    for file in library.files.page(source, order="asc", limit=1 << 30).files:
        name = file.handle or file.filename
        try:
            content = library.files.content(source, file.id)
            # no engine is here to tell whether it takes clips: what was one stays one
            library.files.no_clips = None if file.kind == "video" else NO_CLIPS
            library.files.add(
                target,
                content,
                file.filename,
                handle=file.handle,
                expires_after=_left(library, file.expires_at),
                metadata=file.metadata,
                split=file.split,
                press=file.press or None,
            )
            library.files.delete(source, file.id)
            given.append(Given(name))
        except MPICError as error:
            given.append(Given(name, error.message))
        progress(1)
    given += [_cache(library, source, target, id) for id in _caches(library, source)]
    return given


def _caches(library: Library, user: str) -> list[str]:
    ids: list[str] = []
    while True:
        page = library.caches.page(user, after=ids[-1] if ids else None, order="asc")
        ids += [cache.id for cache in page.caches]
        if not page.has_more:
            return ids


def _cache(library: Library, source: str, target: str, id: str) -> Given:
    cache = library.caches.get(source, id)
    try:
        texts = [library.files.content(source, chunk.file.id).decode() for chunk in cache.chunks]
        parts = [CachedText(text, chunk.start, chunk.end) for text, chunk in zip(texts, cache.chunks)]
        library.caches.create(
            target, parts, name=cache.name, split=cache.split, ttl=_left(library, cache.expires_at)
        )
        library.caches.delete(source, id)
        return Given(cache.name)
    except MPICError as error:
        return Given(cache.name, error.message)


def _left(library: Library, expires_at: float | None) -> int | None:
    """Returns the seconds until something expires."""
    return None if expires_at is None else max(1, math.ceil(expires_at - library.clock()))
