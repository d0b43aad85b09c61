"""Tokenizing long texts slice by slice, while other threads run.

``encode`` of the tokenizers library lets no other thread run until it is done; ``encode_batch`` does, and so does
``encode_batch_fast``, which leaves out the offsets of tokens and takes a third of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from tokenizers import Encoding, Tokenizer

from mpic import memory
from mpic.cancel import checkpoint
from mpic.prompt import slice_cache
from mpic.prompt.bounds import least_tokens
from mpic.prompt.slice_cache import SliceCache
from mpic.prompt.slicer import Slicer, shifted

SLICE = 1 << 14
"""Characters of a slice that is tokenized at a time."""
BYTES_PER_BYTE = 450
"""Bytes of memory that the tokenizers library takes for each byte of a text: 150 to 410 were measured."""
COUNTED, REMEMBERED = 4096, 1024
"""Characters of a slice whose number of tokens is remembered, and the number of slices that are remembered."""


class SlicedTokenizer:
    """Tokenizes texts in slices. Between slices it can be cancelled (``mpic.cancel``).

    Args:
        tokenizer: adds nothing to a text and truncates nothing.
        longest: most bytes of a text that one token can stand for; None: any number.
        source: the tokenizer.json of a tokenizer that gives the same ids, for another process.
    """

    def __init__(self, tokenizer: Tokenizer, slicer: Slicer, longest: int | None, source: str) -> None:
        self.tokenizer, self.slicer, self.longest, self.source = tokenizer, slicer, longest, source
        self.known = SliceCache()

    def ids(
        self, pieces: Iterable[tuple[str, bool]], owner: str | None = None
    ) -> Iterator[tuple[str, list[int]]]:
        """Yield the slices of texts that are tokenized as one, with their ids.

        Args:
            pieces: texts, and for each whether it may be cut.
            owner: the user whose slices are remembered; None: no slices are.
        """
        if owner is None:
            for text in self.slicer.joined(pieces, SLICE):
                yield text, self._fast(text).ids
            return
        for text in self.slicer.joined(pieces, slice_cache.SLICE):
            checkpoint()
            if len(text) < slice_cache.LEAST:
                yield text, self._fast(text).ids
                continue
            ids = self.known.find(owner, text)
            if ids is None:
                ids = self._fast(text).ids
                self.known.keep(owner, text, ids)
            yield text, ids

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the characters ``[start, end)`` of each id of a text."""
        for part in self.slicer.slices(text, SLICE):
            encoding = _encoded(self.tokenizer.encode_batch, part.text)
            yield from shifted(_offsets(encoding), part.start, part.dropped)

    def counter(self) -> Callable[[str, int], int]:
        """Return a function that counts the ids of a text; above a given number, the count may be inexact. It
        remembers parts of texts, because a splitter counts many texts with the same beginning."""
        known: dict[bytes, int] = {}  # by digest: keeping the parts would take many times as much memory

        def remembered(part: str) -> int:
            key = hashlib.blake2b(part.encode(errors="surrogatepass"), digest_size=16).digest()
            if key not in known:
                if len(known) >= REMEMBERED:
                    del known[next(iter(known))]
                known[key] = len(self._fast(part))
            return known[key]

        def count(text: str, most: int) -> int:
            found = least_tokens([text], self.longest, most)
            if found > most:
                return found
            found = 0
            for part in self.slicer.slices(text, COUNTED):
                found += remembered(part.text)
                if found > most:
                    break
            return found

        return count

    def _fast(self, text: str) -> Encoding:
        return _encoded(self.tokenizer.encode_batch_fast, text)


def _encoded(encode: Callable[..., list[Encoding]], text: str) -> Encoding:
    """Tokenize one text with a method for batches.

    Raises:
        OutOfMemory: there may not be enough memory; without it the tokenizer would end the process.
    """
    checkpoint()
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    with memory.set_aside(BYTES_PER_BYTE * size, "tokenizing the text"):
        [encoding] = encode([text], add_special_tokens=False)
    return encoding


def _offsets(encoding: Encoding) -> list[tuple[int, int]]:
    """Return ``encoding.offsets``; those of many tokens one by one, because making all at once blocks other
    threads."""
    if len(encoding) <= SLICE:
        return encoding.offsets
    return [encoding.token_to_chars(i) for i in range(len(encoding))]  # ty: ignore[invalid-explicit-return] (None: special tokens, and there are none)
