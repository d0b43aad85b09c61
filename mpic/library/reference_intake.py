"""How a version of a reference comes in: received, checked, made durable, committed, told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mpic.errors import BadRequest, ReferenceExists, ReferenceNotFound
from mpic.library.intake import ACCEPTING, PIECE, check_metadata, clean_name, identify, is_text, new_id
from mpic.library.limits import Limits
from mpic.library.names import sidecar_of
from mpic.library.originals import Incoming, Originals
from mpic.library.records import SHARED, AsyncReader, Reference, Scalar
from mpic.library.reference_rows import ReferenceRows
from mpic.library.sidecars import Sidecar

REFERENCE_ID = re.compile(r"ref_[A-Za-z0-9_.-]{1,124}")
TITLE_CHARS, DESCRIPTION_CHARS = 255, 4096

SMALL = 1 << 20
"""An original of so many bytes is synced within the transaction, together with its sidecar, which takes less time in
all; a larger one before it."""

Source = bytes | AsyncReader

Commit = Callable[[dict[str, Any], Callable[[Sidecar], None]], Reference]
"""Commits a version from what came in; calls what it is given with the version's sidecar before it does."""


class ReferenceIntake:
    """Async methods never block the event loop; what is committed is told even if the task is cancelled meanwhile.

    Args:
        clock: seconds since the epoch.
        tell: called after each commit, on the thread that made it.
    """

    def __init__(
        self,
        rows: ReferenceRows,
        originals: Originals,
        limits: Limits,
        clock: Callable[[], float],
        tell: Callable[[Literal["added", "replaced"], Reference], None],
    ) -> None:
        self._rows = rows
        self._originals = originals
        self._limits = limits
        self._clock = clock
        self._tell = tell

    async def first(
        self,
        id: str | None,
        source: Source,
        filename: str,
        title: str,
        description: str,
        metadata: Mapping[str, Scalar],
    ) -> Reference:
        """See ``DynamicLibrary.add``."""
        words = self._words(filename, title, description, metadata)
        if id is None:
            id = new_id("ref_")
        elif not REFERENCE_ID.fullmatch(id):
            raise BadRequest(
                f"an id is ref_ and 1 to 124 letters, digits, '_', '.' or '-', not {id[:80]!r}", param="id"
            )
        elif await asyncio.to_thread(self._rows.get, id) is not None:
            raise ReferenceExists(f"there is a reference {id!r}; replace it", param="id")

        def commit(content: dict[str, Any], publish: Callable[[Sidecar], None]) -> Reference:
            new = Reference(id=id, version=1, created_at=content["updated_at"], **words, **content)
            return self._rows.insert(new, publish)

        return await self._take(id, source, commit, "added")

    async def next(
        self,
        id: str,
        source: Source,
        filename: str | None,
        title: str | None,
        description: str | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> Reference:
        """See ``DynamicLibrary.replace``. What is None is taken from the version that is replaced, which another
        replacement may have made while this one was being received."""
        words = self._words(filename, title, description, metadata)

        def commit(content: dict[str, Any], publish: Callable[[Sidecar], None]) -> Reference:
            make = lambda current: replace(current, **words, **content)
            committed = self._rows.replace(id, make, publish)
            if committed is None:
                raise ReferenceNotFound(f"no reference {id!r}", param="id", id=id)
            new, old = committed
            self._originals.remove_files([sidecar_of(old.path)])  # a lost catalogue comes back without it
            return new

        return await self._take(id, source, commit, "replaced")

    def _words(
        self,
        filename: str | None,
        title: str | None,
        description: str | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> dict[str, Any]:
        """Those that are given, checked."""
        if title is not None and not (
            0 < len(title) <= TITLE_CHARS and title.isprintable() and title.strip()
        ):
            raise BadRequest(f"a title is 1 to {TITLE_CHARS} printable characters", param="title")
        if description is not None and len(description) > DESCRIPTION_CHARS:
            raise BadRequest(f"a description has at most {DESCRIPTION_CHARS} characters", param="description")
        if description is not None and not is_text(description):
            raise BadRequest("the description contains half of a surrogate pair", param="description")
        words = {
            "title": title,
            "description": description,
            "metadata": None if metadata is None else check_metadata(metadata),
            "filename": None if filename is None else clean_name(filename, self._limits),
        }
        return {name: value for name, value in words.items() if value is not None}

    async def _take(
        self,
        id: str,
        source: Source,
        commit: Commit,
        what: Literal["added", "replaced"],
    ) -> Reference:
        incoming = await asyncio.to_thread(self._originals.incoming, self._limits.upload_bytes)
        try:
            if isinstance(source, bytes):
                await asyncio.to_thread(incoming.write, source)
            else:
                while piece := await source.read(PIECE):
                    await asyncio.to_thread(incoming.write, piece)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(ACCEPTING, self._accept, id, incoming, commit, what)
        finally:  # not awaited, so that cancellation cannot prevent it
            asyncio.get_running_loop().run_in_executor(None, incoming.discard)

    def _accept(
        self,
        id: str,
        incoming: Incoming,
        commit: Commit,
        what: Literal["added", "replaced"],
    ) -> Reference:
        content = self._content(id, incoming)
        path = content["path"]
        if incoming.bytes > SMALL:
            incoming.seal()  # before the transaction, which others wait for
        try:
            committed = commit(content, lambda sidecar: self._originals.publish([(incoming, path)], sidecar))
        except BaseException:
            self._originals.remove([path])
            raise
        self._tell(what, committed)
        return committed

    def _content(self, id: str, incoming: Incoming) -> dict[str, Any]:
        """The fields of a version that follow from what came in."""
        key = identify(incoming, self._limits)
        return {
            "kind": key.kind,
            "key": key,
            "bytes": incoming.bytes,
            "path": self._new_path(id),
            "sha256": incoming.sha256,
            "updated_at": self._clock(),
            "tokens": None,
            "state": "compiling",
            "error": None,
        }

    def _new_path(self, id: str) -> Path:
        """Every version has a name of its own, so that no two ever share a file."""
        return self._originals.path(SHARED, new_id(f"{id}@"))
