"""Resolves the chunks of an evaluation, which are images and documents inside the messages, without a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from mpic.errors import BadRequest, NotFound, UnknownHandle, UnsupportedModality, cut
from mpic.imaging.clip_header import NO_CLIPS
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library import Limits, decode_image
from mpic.prompt import ChatTemplate
from mpic.prompt.messages import HandleKind

OWNER = "eval"


class LocalResolver:
    """Makes chunks of the images and documents inside messages; implements ``mpic.prompt.Resolver``.

    Args:
        template: tokenizes documents.
        owner: of the chunks.
    """

    def __init__(self, template: ChatTemplate, owner: str = OWNER) -> None:
        self._template, self._owner = template, owner

    def by_handle(self, kind: HandleKind, name: str) -> Chunk:
        raise UnknownHandle(f"there are no uploads here: {cut(name)!r}", handle=name)

    def by_file_id(self, file_id: str) -> Chunk:
        raise NotFound(f"there are no uploads here: {cut(file_id)!r}")

    def by_cache_id(self, cache_id: str) -> Chunk:
        raise NotFound(f"there are no uploads here: {cut(cache_id)!r}")

    def inline_image(self, data: bytes) -> Chunk:
        image = decode_image(data, Limits())
        return Chunk(ChunkKey.of_image(image), self._owner, load_image=lambda: image)

    def inline_clip(self, data: bytes) -> Chunk:
        raise UnsupportedModality(NO_CLIPS)

    def inline_file(self, data: bytes, label: str | None) -> Chunk:
        raise BadRequest("files inside requests are read by a server only")

    def inline_text(self, text: str, label: str | None) -> Chunk:
        tokens = tuple(self._template.tokenize_document(text))
        return Chunk(ChunkKey.of_text(text), self._owner, tokens, label=label)


SPARE = 500
"""Tokens that a prompt leaves free by default, for the chat template: as LongBench's lengths for its models do."""


def counter_of(template: ChatTemplate) -> Callable[[str], int]:
    """Return a function that counts a text's tokens for the model."""
    return lambda text: sum(1 for _ in template.documents.spans(text))


def fitter_of(template: ChatTemplate, context: int, most: int | None) -> Callable[[str, str, str, int], str]:
    """Return a function that shortens a context until the prompt fits. Its middle is left out where LongBench cuts the
    prompt (Bai et al. 2023, section 4.1): the first and second half of what is kept have the same number of tokens, the
    instruction counted with the first and the question with the second.

    Args:
        context: the model's context in tokens.
        most: maximum number of tokens of the prompt; None: the model's context without the answer and ``SPARE`` (or a
            quarter of a context that is shorter than four times that).
    """

    count = counter_of(template)

    def fit(before: str, text: str, after: str, answer: int) -> str:
        room = context - answer - min(SPARE, context // 4) if most is None else most
        around, spans = count(before) + count(after), list(template.documents.spans(text))
        if len(spans) + around <= room:
            return text
        kept = max(0, room - around)
        head = min(kept, max(0, room // 2 - count(before)))
        tail = kept - head
        return (text[: spans[head - 1][1]] if head else "") + (text[spans[-tail][0] :] if tail else "")

    return fit


def splitter_of(template: ChatTemplate) -> Callable[[str, str, int], list[str]]:
    """Return KVSplit with the model's tokenizer: ``(text, mode, tokens) -> pieces``."""
    # here, because a GPU is measured on machines without its splitter (`make report-gpu`)
    from mpic.prompt.split import Mode, Split, split_text

    def split(text: str, mode: str, tokens: int) -> list[str]:
        split = Split(cast(Mode, mode), tokens)
        found = split_text(text, split, template.documents.spans, template.documents.counter())
        return [text[piece.start : piece.end] for piece in found]

    return split
