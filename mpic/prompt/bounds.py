"""Lower bounds on the number of tokens of a text, from its length: a text that cannot fit is refused before it is
tokenized.

Every token of a vocabulary stands for at most a certain number of bytes of text (``longest_token``), so a text of n
bytes has at least n / longest tokens. This holds for tokenizers that account for every byte of a text. Tokenizers that
drop white space or characters, or that make one token of an unknown word of any length, have no such bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from mpic.cancel import checkpoint
from mpic.errors import ContextLengthExceeded
from mpic.handles import LONGEST

SLICE = 1 << 16
"""Characters that are processed before other threads may run."""

REASONED = "</think>"
HANDLE_BYTES = len("IMAGE#") + 12 * LONGEST
"""Most bytes of a handle: a character of its name may be written as four of three bytes each."""

SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
"""Normalizers that may shorten a text, with the largest factor in bytes of UTF-8: composing turns up to nine bytes into
three, and a compatibility character such as a mathematical letter turns four bytes into one."""

KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Pre-tokenizers that drop nothing."""


@dataclass(frozen=True)
class Limit:
    """The longest text that is accepted.

    Args:
        tokens: maximum number of tokens.
        context: the model's context in tokens, for the message.
        what: the name of the text in the message.
        param: the request field at fault, or None.
    """

    tokens: int
    context: int
    what: str = "the text"
    param: str | None = None

    def check(self, least: int) -> None:
        """Refuse a text of at least ``least`` tokens if that is too long.

        Raises:
            ContextLengthExceeded: it is too long.
        """
        if least > self.tokens:
            raise ContextLengthExceeded(
                f"{self.what} has at least {least} tokens; the model's context is {self.context}",
                param=self.param,
                prompt_tokens=least,
                context_length=self.context,
            )


def least_tokens(texts: Iterable[str], longest: int | None, most: int) -> int:
    """Return a lower bound on the number of tokens of texts that are tokenized one after another.

    Args:
        longest: maximum number of bytes of a token; None: unknown.
        most: the number with which the caller compares the result; the bound need not be more exact than that.
    """
    if longest is None:
        return 0
    texts = list(texts)
    characters = sum(map(len, texts))
    if characters > most * longest or 4 * characters <= most * longest:
        return -(-characters // longest)
    return -(-sum(map(utf8_length, texts)) // longest)


def check_conversation(messages: Sequence[Mapping[str, Any]], context: int, longest: int | None) -> None:
    """Refuse a conversation that cannot fit a model's context, before anything else is done with it.

    Every message and every part of one is assumed to need at least one token.

    Args:
        messages: the messages as the client sent them.
        context: maximum number of tokens of the model.
        longest: maximum number of bytes of a token; None: unknown.

    Raises:
        ContextLengthExceeded: there are too many messages or parts, or their texts are too long.
    """
    limit = Limit(context - 1, context, "the conversation", "messages")
    limit.check(len(messages))
    limit.check(sum(len(content) for content in _contents(messages) if not isinstance(content, str)))
    texts = list(_texts(messages))
    if least_tokens(texts, longest, limit.tokens) > limit.tokens:
        size = sum(_least_bytes(text) for text in texts)
        limit.check(-(-size // (longest or 1)))


def _contents(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    return (content for m in messages if isinstance(content := m.get("content"), str | list))


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts that the model will certainly read. Some chat templates leave out the reasoning of earlier
    answers."""
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        for part in parts:
            if part.get("type") != "text" or not isinstance(text := part.get("text"), str):
                continue
            yield text[text.rfind(REASONED) + 1 :] if message.get("role") == "assistant" else text


def _least_bytes(text: str) -> int:
    """Return the bytes of a text without the white space around it, which a chat template may trim, and without its
    handles, each of which may become a single token."""
    handles = text.count("IMAGE#") + text.count("FILE#")
    return max(0, utf8_length(text.strip()) - HANDLE_BYTES * handles)


def utf8_length(text: str) -> int:
    """Return the bytes of a text in UTF-8, counted in slices."""
    if text.isascii():
        return len(text)
    size = 0
    for at in range(0, len(text), SLICE):
        checkpoint()
        size += len(text[at : at + SLICE].encode("utf-8", "surrogatepass"))
    return size


def longest_token(state: Mapping[str, Any], control: Collection[str]) -> int | None:
    """Return the maximum number of UTF-8 bytes that one token of a client's text can stand for; None if there is no
    maximum.

    Args:
        state: a tokenizer.json.
        control: tokens that no text of a client can produce.
    """
    shrink = _shrink(state["normalizer"])
    if shrink is None or not _keeps_all(state["pre_tokenizer"]):
        return None
    added = [token for token in state["added_tokens"] if token["content"] not in control]
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    model = state["model"]
    pairs = model["vocab"] if isinstance(model["vocab"], list) else model["vocab"].items()
    vocabulary = {piece for piece, _ in pairs} - set(control)
    if is_byte_level(state):  # a character of the vocabulary is a byte
        if model["type"] != "BPE" or not vocabulary.issuperset(ByteLevel.alphabet()):
            return None
        longest = max(map(len, vocabulary))
    elif _knows_all(model, vocabulary):
        longest = max(len(piece.encode()) for piece in vocabulary)
    else:
        return None
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return longest * shrink


def is_byte_level(state: Mapping[str, Any]) -> bool:
    """Return whether the vocabulary of a tokenizer.json spells bytes as characters, as GPT-2's does."""
    parts = [
        *parts_of(state["normalizer"], "normalizers"),
        *parts_of(state["pre_tokenizer"], "pretokenizers"),
    ]
    return any(part["type"] == "ByteLevel" for part in parts)


def parts_of(part: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    """Return the members of a sequence, or the part alone."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [found for member in part[inside] for found in parts_of(member, inside)]
    return [part]


def _shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return the factor by which a normalizer may shorten a text at most; None: any."""
    factor = 1
    for part in parts_of(normalizer, "normalizers"):
        if part["type"] == "Replace":
            old = part["pattern"].get("String")
            if old is None or len(part["content"].encode()) < len(old.encode()):
                return None
        elif part["type"] in SHRINKS:
            factor *= SHRINKS[part["type"]]
        else:
            return None
    return factor


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    for part in parts_of(pre_tokenizer, "pretokenizers"):
        kept = part["type"] in KEEPING or part.get("behavior", "Removed") != "Removed"
        if not kept:
            return False
    return True


def _knows_all(model: Mapping[str, Any], vocabulary: Collection[str]) -> bool:
    """Return whether a vocabulary of text has a token for each unknown character, and none for several of them."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["type"] == "BPE" and model.get("unk_token") in vocabulary and not model.get("fuse_unk")
