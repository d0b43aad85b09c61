"""Finds the chunks that a prompt refers to, in the library of the user who makes the request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpic.errors import BadRequest, MPICError, UnknownHandle, cut
from mpic.handles import without_pages
from mpic.kv.chunk import Chunk
from mpic.server.cutting import check_whole

if TYPE_CHECKING:
    from mpic.library import File, Library
    from mpic.prompt.messages import HandleKind


class LibraryResolver:
    """Implements ``mpic.prompt.Resolver`` for one request.

    Args:
        user: the user whose uploads may be used.
        max_chunks: maximum number of images and documents linked in the request.
        context: maximum number of tokens that the model reads; None: a document may have any number.
    """

    def __init__(self, library: Library, user: str, max_chunks: int, context: int | None = None) -> None:
        self.library = library
        self.user = user
        self.max_chunks = max_chunks
        self.context = context
        self.found = 0

    def by_handle(self, kind: HandleKind, name: str) -> list[Chunk]:
        name, pages = without_pages(name)
        file = self.library.files.by_handle(self.user, name)
        if kind == "image" and file.kind != "image":
            what = "video" if file.kind == "video" else "document"
            raise UnknownHandle(f"{cut(name)!r} is a {what}, not an image: write FILE#{name}", handle=name)
        return self._all(file, pages)

    def by_file_id(self, file_id: str) -> list[Chunk]:
        """Return an upload of the user, or a reference (``ref_...``), which every user may read."""
        with _without_param():
            if file_id.startswith("ref_"):
                shelf = self.library.references
                return [self._counted(shelf.chunk(shelf.get(file_id)))]
            file_id, pages = without_pages(file_id)
            return self._all(self.library.files.get(self.user, file_id), pages)

    def by_cache_id(self, cache_id: str) -> list[Chunk]:
        with _without_param():
            files = self.library.caches.resolve(self.user, cache_id)
            return [self._counted(self.library.files.chunk(self.user, file)) for file in files]

    def inline_image(self, data: bytes) -> Chunk:
        with _without_param():
            return self._counted(self.library.files.inline_image(self.user, data))

    def inline_clip(self, data: bytes) -> Chunk:
        with _without_param():
            return self._counted(self.library.files.inline_clip(self.user, data))

    def inline_text(self, text: str, label: str | None) -> Chunk:
        with _without_param():
            return self._counted(self.library.files.inline_text(self.user, text, label))

    def inline_file(self, data: bytes, label: str | None) -> list[Chunk]:
        with _without_param():
            return [self._counted(chunk) for chunk in self.library.files.inline_file(self.user, data, label)]

    def _all(self, file: File, pages: tuple[int, int] | None) -> list[Chunk]:
        if self.context is not None and pages is None:
            check_whole(file, self.context)
        return [self._counted(chunk) for chunk in self.library.files.chunks(self.user, file, pages)]

    def _counted(self, chunk: Chunk) -> Chunk:
        self.found += 1
        if self.found > self.max_chunks:
            raise BadRequest(
                f"more than {self.max_chunks} images and documents in one request", limit=self.max_chunks
            )
        return chunk


@contextmanager
def _without_param() -> Iterator[None]:
    """Remove the parameter the library names in an error; the prompt parser names the place in the request."""
    try:
        yield
    except MPICError as exc:
        exc.param = None
        raise
