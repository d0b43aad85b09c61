"""Accepts versions of references: a version is received, checked, made durable and committed, then listeners are
notified."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from mpic.errors import BadRequest, ReferenceExists, ReferenceNotFound, cut
from mpic.library.catalog.reference_rows import ReferenceRows
from mpic.library.folder.layout import sidecar_of
from mpic.library.folder.originals import Incoming
from mpic.library.folder.sidecars import Sidecar
from mpic.library.intake.checks import check_metadata, clean_name, identify, is_text, new_id
from mpic.library.intake.receive import Arriving, receive
from mpic.library.part import LibraryPart, Storage
from mpic.library.records import SHARED, AsyncReader, Reference, Scalar

REFERENCE_ID = re.compile(r"ref_[A-Za-z0-9_.-]{1,124}")
TITLE_CHARS, DESCRIPTION_CHARS = 255, 4096

SMALL = 1 << 20
"""An original of at most so many bytes is synced within the transaction, together with its sidecar, which takes less
time in all; a larger one is synced before it."""

Source = bytes | AsyncReader | Arriving
What = Literal["added", "replaced"]

Commit = Callable[[dict[str, Any], Callable[[Sidecar], None]], Reference]
"""Commits a version. Takes the fields that follow from its content, and a function that it calls with the version's
sidecar before it commits."""


class ReferenceIntake(LibraryPart):
    """Accepts versions of references. Async methods never block the event loop. Listeners are notified of every commit,
    even if the task is cancelled meanwhile.

    Args:
        notify: called after each commit, on the thread that made it.
    """

    def __init__(
        self, storage: Storage, rows: ReferenceRows, notify: Callable[[What, Reference], None]
    ) -> None:
        super().__init__(storage)
        self._rows, self._notify = rows, notify

    async def first(self, id: str | None, source: Source, words: dict[str, Any]) -> Reference:
        """Accepts the first version of a reference; see ``ReferenceLibrary.add``.

        Args:
            words: the result of ``checked``, complete.
        """
        if id is None:
            id = new_id("ref_")
        elif not REFERENCE_ID.fullmatch(id):
            raise BadRequest(
                f"an id is ref_ and 1 to 124 letters, digits, '_', '.' or '-', not {cut(id)!r}", param="id"
            )
        elif await asyncio.to_thread(self._rows.get, id) is not None:
            raise ReferenceExists(f"there is a reference {cut(id)!r}; replace it", param="id")

        def commit(content: dict[str, Any], publish: Callable[[Sidecar], None]) -> Reference:
            new = Reference(id=id, version=1, created_at=content["updated_at"], **words, **content)
            return self._rows.insert(new, publish)

        return await self._receive(id, source, commit, "added")

    async def next(self, id: str, source: Source, words: dict[str, Any]) -> Reference:
        """Accepts a further version; see ``ReferenceLibrary.replace``.

        Args:
            words: the result of ``checked``. Missing ones are taken from the version that is replaced, which another
                replacement may have made while this one was received.
        """

        def commit(content: dict[str, Any], publish: Callable[[Sidecar], None]) -> Reference:
            make = lambda current: replace(current, **words, **content)
            committed = self._rows.replace(id, make, publish)
            if committed is None:
                raise ReferenceNotFound(f"no reference {cut(id)!r}", param="id", id=id)
            new, old = committed
            self._originals.remove_files([sidecar_of(old.path)])  # a recovery must not bring it back
            return new

        return await self._receive(id, source, commit, "replaced")

    def checked(
        self,
        filename: str | None,
        title: str | None,
        description: str | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> dict[str, Any]:
        """Checks the arguments that are not None, and returns them by name.

        Raises:
            BadRequest: an argument is malformed.
        """
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

    async def _receive(self, id: str, source: Source, commit: Commit, what: What) -> Reference:
        accept = lambda incoming: self._accept(id, incoming, commit, what)
        return await receive(self._originals, self._limits.upload_bytes, source, accept)

    def _accept(self, id: str, incoming: Incoming, commit: Commit, what: What) -> Reference:
        key, format, _ = identify(incoming, self._limits)
        path = self._originals.path(SHARED, new_id(f"{id}@"))  # no two versions ever share a file
        content = {
            "kind": key.kind,
            "key": key,
            "bytes": incoming.bytes,
            "path": path,
            "sha256": incoming.sha256,
            "updated_at": self._clock(),
            "tokens": None,
            "state": "compiling",
            "error": None,
            "format": format,
        }
        if incoming.bytes > SMALL:
            incoming.seal()  # done before the transaction, for which other writers wait
        try:
            committed = commit(content, lambda sidecar: self._originals.publish([(incoming, path)], sidecar))
        except BaseException:
            self._originals.remove([path])
            raise
        self._notify(what, committed)
        return committed
