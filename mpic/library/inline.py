"""Chunks of images, clips and documents that come inside requests: checked like uploads, owned by a user, no files."""

from __future__ import annotations

from functools import cache, partial

from mpic.errors import InvalidText, TooLarge, UnsupportedModality
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library.intake.decode import (
    HEAD,
    NO_CLIPS,
    clip_key,
    decode_clip,
    decode_image,
    decode_text,
    encoding_of,
    image_key,
    is_document,
    read_document,
    sniff,
)
from mpic.library.intake.remembered import ImageKeys, TokenCache
from mpic.library.part import LibraryPart, Storage
from mpic.library.records import Tokenize


class InlineChunks(LibraryPart):
    """The half of ``UploadLibrary`` that keeps nothing on the disk.

    Attributes:
        tokenize: text -> token ids of the served model; must be set before the first text is linked.
        no_clips: why clips are not taken, uploaded or inside requests, as the end of a sentence; None: they are.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.tokenize: Tokenize | None = None
        self.no_clips: str | None = NO_CLIPS
        self._image_keys = ImageKeys()
        self._clip_keys = ImageKeys()
        self._page_keys = ImageKeys()
        self._tokens = TokenCache()

    def inline_image(self, user: str, data: bytes, label: str | None = None) -> Chunk:
        """Return the chunk of an image that came inside a request (data URL). It is checked like an upload and owned
        by the user, but no file. The same bytes once more are not decoded again to find their chunk.

        Raises:
            InvalidImage, TooLarge, DecoderBusy: as ``image_key``; TooLarge: more bytes than an upload may have.
        """
        self._admit(data)
        load = partial(decode_image, data, self._limits)
        key = self._image_keys.key(user, data, partial(image_key, data, self._limits))
        return Chunk(key, user, load_image=load, label=label)

    def inline_clip(self, user: str, data: bytes, label: str | None = None) -> Chunk:
        """Return the chunk of a clip that came inside a request (data URL). It is checked like an upload and owned by
        the user, but no file. The same bytes once more are not decoded again to find their chunk.

        Raises:
            UnsupportedModality: clips are not taken (``no_clips``).
            InvalidVideo, NoVideoDecoder, TooLarge, DecoderBusy: as ``clip_key``; TooLarge: more bytes than an upload
                may have.
        """
        if self.no_clips is not None:
            raise UnsupportedModality(self.no_clips)
        self._admit(data)
        key = self._clip_keys.key(user, data, partial(clip_key, data, self._limits))
        load = lambda sample: decode_clip(data, sample, self._limits)
        return Chunk(key, user, load_clip=load, label=label)

    def inline_text(self, user: str, text: str, label: str | None = None) -> Chunk:
        """Return the chunk of a document that came inside a request. It is checked like an upload and owned by the
        user, but no file.

        Raises:
            InvalidText, TooLarge: as ``decode_text``.
        """
        try:
            text = decode_text(text.encode(), self._limits)
        except UnicodeEncodeError as error:
            raise InvalidText("the text contains half of a surrogate pair") from error
        return Chunk(ChunkKey.of_text(text), user, token_ids=tuple(self._tokenizer()(text)), label=label)

    def inline_file(self, user: str, data: bytes, label: str | None = None) -> list[Chunk]:
        """Return the chunks of a file of any kind that came inside a request: one, or one for each page of a document.
        It is checked like an upload and owned by the user, but no file. The same bytes once more are not read again.

        Raises:
            As ``inline_image``, ``inline_clip``, ``inline_text``, ``encoding_of`` and ``read_document``.
        """
        self._admit(data)
        kind = sniff(data[:HEAD], self.no_clips)
        if kind != "text":
            return [(self.inline_image if kind == "image" else self.inline_clip)(user, data, label)]
        if not is_document(data):
            return [self.inline_text(user, decode_text(data, self._limits, encoding_of(data)), label)]
        document = cache(lambda: read_document(data, self._limits))
        keys = lambda: (document().paged, tuple(map(ChunkKey.of_text, document().pages)))
        paged, keys = self._page_keys.key(user, data, keys)
        found = []
        for number, key in enumerate(keys):
            read = lambda number=number: document().pages[number]
            ids = self._tokens.ids(f"{user} {key.digest}", self._tokenizer(), read)
            found.append(Chunk(key, user, ids, label=label, page=number + 1 if paged else None))
        return found

    def _admit(self, data: bytes) -> None:
        if len(data) > self._limits.upload_bytes:
            raise TooLarge(f"a file inside a request has more than {self._limits.upload_bytes} bytes")

    def _tokenizer(self) -> Tokenize:
        if self.tokenize is None:
            raise RuntimeError("the library has no tokenizer; set UploadLibrary.tokenize")
        return self.tokenize
