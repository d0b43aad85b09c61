"""Cuts uploaded documents into chunks by KVSplit (``mpic.prompt.split``), on request or when they are too long for one
chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mpic.api.requests import SplitOptions
from mpic.errors import BadRequest, DocumentTooLong
from mpic.http.body import parse
from mpic.library.caches import MOST_CHUNKS
from mpic.prompt.sliced_tokenizer import SlicedTokenizer
from mpic.prompt.split import MODES, Split, TooManyPieces
from mpic.prompt.split_process import split_in_process

if TYPE_CHECKING:
    from mpic.library import File

TOKENS = 512
"""Most tokens of a chunk of a document that is cut without being asked for; EPIC measures with as many (section 5)."""
MOST_CHARACTERS = 1_000
"""The settings by which an upload is cut have at most as many characters, because they are read on the event loop."""
MARKDOWN = (".md", ".markdown")
ONLY_OVER = "only_over"
"""In how a document is cut: only if it has more tokens; 0: than the model's context."""


def check_whole(file: File, context: int) -> None:
    """Refuse a compiled document that is too long for the model's context, so that no prompt can link all of it.

    Args:
        context: maximum number of tokens of the model.

    Raises:
        DocumentTooLong: the message says how long the document is and what to do.
    """
    if file.tokens is not None and file.tokens >= context:
        name = f"FILE#{file.handle}" if file.handle else file.id
        parts = (
            f"name the pages that you need, such as {name}[1-3]"
            if file.pages
            else ("upload the parts that you need as separate files")
        )
        raise DocumentTooLong(
            f"{name} has {file.tokens:,} tokens, and this model reads at most {context:,} at once: no prompt can "
            f"link all of it; {parts}",
            prompt_tokens=file.tokens,
            context_length=context,
        )


def split_of(asked: str | None, filename: str, only_over: int) -> dict[str, Any] | None:
    """Return the settings by which an upload is to be cut if it is a document; None: it is not cut.

    Args:
        asked: ``auto`` (or nothing), a mode of KVSplit, or its options as JSON.
        only_over: see ``ONLY_OVER``.

    Raises:
        BadRequest: it is none of these.
    """
    if asked is None or asked == "auto":
        mode = "section" if PurePath(filename).suffix.lower() in MARKDOWN else "paragraph"
        return {**asdict(Split(mode, TOKENS)), ONLY_OVER: only_over}
    try:
        if len(asked) > MOST_CHARACTERS:
            raise ValueError("too long")
        options = parse(asked.encode()) if asked.startswith("{") else {"mode": asked}
        split = Split(**SplitOptions.model_validate(options).model_dump())
    except (BadRequest, ValueError) as error:
        raise BadRequest(
            f"split must be auto, one of {', '.join(MODES)}, or an object with mode, tokens and overlap",
            param="split",
        ) from error
    return None if split.mode == "none" else asdict(split)


def cut_document(
    text: str, split: Mapping[str, Any], tokenizer: SlicedTokenizer, context: int
) -> list[tuple[int, int]]:
    """Return the characters ``[start, end)`` of the pieces of a document, in order. It may take seconds.

    Args:
        split: the result of ``split_of``.
        context: maximum number of tokens that the model can read.

    Raises:
        BadRequest: it would have too many pieces.
    """
    options = dict(split)
    most = options.pop(ONLY_OVER, None)
    if most is not None:
        most = min(most or context, context)
        if tokenizer.counter()(text, most) <= most:
            return [(0, len(text))]
        options["tokens"] = min(options["tokens"], most)
    try:
        return [
            (piece.start, piece.end)
            for piece in split_in_process(text, Split(**options), tokenizer, MOST_CHUNKS)
        ]
    except TooManyPieces:
        raise BadRequest(
            f"the document would be cut into more than {MOST_CHUNKS} chunks; larger ones (split.tokens) make fewer",
            limit=MOST_CHUNKS,
        ) from None
