"""Makes chunks of the images and documents inside messages, without a library."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from mpic.errors import BadRequest, NotFound, UnknownHandle, UnsupportedModality, cut
from mpic.imaging.clip_header import NO_CLIPS
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.prompt.messages import HandleKind
from mpic.prompt.template import ChatTemplate


class InlineResolver:
    """Implements ``mpic.prompt.Resolver``.

    Args:
        template: tokenizes documents.
        decode: function that decodes the bytes of an image file to an RGB image.
        owner: owner of the chunks.
    """

    def __init__(self, template: ChatTemplate, decode: Callable[[bytes], Image.Image], owner: str) -> None:
        self._template, self._decode, self._owner = template, decode, owner

    def by_handle(self, kind: HandleKind, name: str) -> Chunk:
        raise UnknownHandle(f"there are no uploads here: {cut(name)!r}", handle=name)

    def by_file_id(self, file_id: str) -> Chunk:
        raise NotFound(f"there are no uploads here: {cut(file_id)!r}")

    def by_cache_id(self, cache_id: str) -> Chunk:
        raise NotFound(f"there are no uploads here: {cut(cache_id)!r}")

    def inline_image(self, data: bytes) -> Chunk:
        image = self._decode(data)
        return Chunk(ChunkKey.of_image(image), self._owner, load_image=lambda: image)

    def inline_clip(self, data: bytes) -> Chunk:
        raise UnsupportedModality(NO_CLIPS)

    def inline_file(self, data: bytes, label: str | None) -> Chunk:
        raise BadRequest("files inside requests are read by a server only")

    def inline_text(self, text: str, label: str | None) -> Chunk:
        tokens = tuple(self._template.tokenize_document(text))
        return Chunk(ChunkKey.of_text(text), self._owner, tokens, label=label)
