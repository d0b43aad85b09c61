"""Tokenizing long texts slice by slice, while other threads run.

``encode`` of the tokenizers library lets no other thread run until it is through; ``encode_batch`` does, and so does
``encode_batch_fast``, which leaves out the places of tokens and takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from tokenizers import Encoding, Tokenizer

from mpic import memory
from mpic.cancel import checkpoint
from mpic.prompt.bounds import SLICE, least_tokens
from mpic.prompt.slices import Slicer, shifted

BYTES_PER_BYTE = 450
"""Memory that the tokenizers library takes for each byte of a text: 150 to 410 were seen."""
COUNTED, REMEMBERED = 4096, 1024
"""Characters of a slice of which the number of tokens is remembered, and how many such slices are."""


class SlicedTokenizer:
    """Between two slices it ends when nobody waits for it (``mpic.cancel``).

    Args:
        tokenizer: adds nothing to a text and truncates nothing.
        longest: most bytes of a text that one token can stand for; None: any number.
        source: the tokenizer.json of a tokenizer that gives the same ids, for another process.
    """

    def __init__(self, tokenizer: Tokenizer, slicer: Slicer, longest: int | None, source: str) -> None:
        self.tokenizer, self.slicer, self.longest, self.source = tokenizer, slicer, longest, source

    def ids(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[list[int]]:
        """The ids of texts that are tokenized as one, slice by slice.

        Args:
            pieces: texts, each with whether it may be cut.
        """
        for text in self.slicer.joined(pieces, SLICE):
            yield self._fast(text).ids

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """For each id of a text the characters it stands for."""
        for part in self.slicer.slices(text, SLICE):
            encoding = _encoded(self.tokenizer.encode_batch, part.text)
            yield from shifted(_offsets(encoding), part.start, self.slicer.drops_space and part.start > 0)

    def counter(self) -> Callable[[str, int], int]:
        """A function that tells how many ids a text has, or, if they are more than a number, something above that. It
        remembers parts of texts: a splitter asks again and again for texts that begin alike."""
        remembered = lru_cache(maxsize=REMEMBERED)(lambda part: len(self._fast(part)))

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
    """One text through a method for batches.

    Raises:
        OutOfMemory: the tokenizer, which ends the process when it gets no memory, might get none.
    """
    checkpoint()
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    with memory.set_aside(BYTES_PER_BYTE * size, "tokenizing the text"):
        [encoding] = encode([text], add_special_tokens=False)
    return encoding


def _offsets(encoding: Encoding) -> list[tuple[int, int]]:
    """``encoding.offsets``; of many tokens one by one, because no other thread runs while all are made at once."""
    if len(encoding) <= SLICE:
        return encoding.offsets
    return [encoding.token_to_chars(i) for i in range(len(encoding))]
