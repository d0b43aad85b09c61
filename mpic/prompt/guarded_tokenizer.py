"""Tokenizing text of two authors at once: control strings count in text of the template, but not in text of clients.

A tokenizer finds its control tokens (``<|im_start|>``, ``<image>``) by matching strings, regardless of their author. We
therefore keep a *twin* of it in which every control token is spelt with an unguessable string of the same behaviour
(id, stripping, normalization). In text of the template the control strings are respelt; text of clients goes in as it
is. One call of the twin then gives exactly the ids of the stock tokenizer, except where a client wrote a control
string, which is tokenized as ordinary characters. Because the respelling also covers the model's vocabulary (and
merges), no text of a client can produce a control id in any way; that holds for BPE, Unigram, WordPiece and WordLevel.

The twin has two more control tokens, the *cuts*, which stand for chunks: text on either side is tokenized as it would
be beside an image token (SentencePiece-like tokenizers treat the start of a text differently), and the ids are split
there.

A text whose length already exceeds a ``Limit`` is not tokenized. Others are tokenized in slices
(``mpic.prompt.sliced_tokenizer``) until they are too long.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from mpic.errors import ModelRefused
from mpic.prompt.bounds import Limit, least_tokens
from mpic.prompt.sliced_tokenizer import SlicedTokenizer

LIGHT = r"\w\s.,:;/()'\-"
NOT_LIGHT = re.compile(f"[^{LIGHT}]")
NOTATION = frozenset((
    "additionalProperties", "allOf", "anyOf", "arguments", "array", "boolean", "const", "content",
    "default", "description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "format",
    "function", "id", "integer", "items", "maxItems", "maxLength", "maximum", "minItems", "minLength",
    "minimum", "name", "not", "null", "number", "object", "oneOf", "parameters", "pattern",
    "properties", "required", "return", "role", "strict", "string", "title", "tool_call_id",
    "tool_calls", "type",
))  # fmt: skip
"""Words of tools, calls and JSON Schema. Templates look for them."""
MARKUP = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Trusted(str):
    """Text written by the template: control strings in it are control tokens."""


class Cut:
    """A place for a chunk; ``image`` selects the cut token that stands there."""

    __slots__ = ("image",)

    def __init__(self, image: bool) -> None:
        self.image = image


class GuardedTokenizer:
    """Tokenizes pieces of template text (``Trusted``), client text (``str``) and ``Cut`` s.

    Args:
        tokenizer: a transformers tokenizer backed by the tokenizers library.
        image_token: the model's image token, or None for a text model.
        video_token: the model's token of a clip, if it has one.

    Attributes:
        control: ids of the tokens that client text can never produce. These are all special tokens, and the added
            ones that look like markup (``<think>``, ``[INST]``); other added tokens (runs of spaces, domain words) and
            the bytes of SentencePiece (``<0x0A>``) are ordinary text.
        prefix: ids that the tokenizer puts in front of every text (BOS), or empty.
        sliced: tokenizes client text.

    Raises:
        ModelRefused: there is no such backend, or the twin does not behave as described.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_token: str | None = None,
        video_token: str | None = None,
    ) -> None:
        stock = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(stock, Tokenizer):
            raise ModelRefused(
                f"{type(tokenizer).__name__} is not backed by the tokenizers library: client text could not be kept "
                "apart from control tokens. Convert it to a tokenizer.json first."
            )
        state = json.loads(stock.to_str())
        always = {image_token, video_token, *tokenizer.all_special_tokens}
        added = [
            token
            for token in state["added_tokens"]
            if token["special"] or token["content"] in always or MARKUP.fullmatch(token["content"])
            if not BYTE.fullmatch(token["content"])
        ]
        nonce = secrets.token_hex(16)
        self._spelling = {t["content"]: f"x{nonce}{i:06d}x" for i, t in enumerate(added)}
        respelt = _respell(state, self._spelling)
        source = json.dumps(respelt)
        self._twin = Tokenizer.from_str(source)
        self._control = re.compile(
            "|".join(map(re.escape, sorted(self._spelling, key=len, reverse=True))) or "(?!)"
        )
        self.control = frozenset(t["id"] for t in added)
        # every inner part of a control token, its light beginnings and its light ends, without regard to case
        spelt = [t["content"].lower() for t in added]
        self._within = "\0".join(spelt)
        begin, end = re.compile(f"[{LIGHT}]+"), re.compile(f"[{LIGHT}]+$")
        begins = [found[0] for text in spelt if (found := begin.match(text))]
        ends = [found[0] for text in spelt if (found := end.search(text))]
        self._starts = tuple({text[: n + 1] for text in begins for n in range(len(text))})
        self._ends = tuple({text[n:] for text in ends for n in range(len(text))})
        flags = next((t for t in added if t["content"] == image_token), {})
        self._cuts = {}
        for image in (False, True):
            spelling = f"x{nonce}{'image' if image else 'chunk'}x"
            strip = {k: bool(image and flags.get(k)) for k in ("lstrip", "rstrip")}
            self._twin.add_special_tokens([AddedToken(spelling, normalized=False, special=True, **strip)])
            self._cuts[image] = spelling
        self._cut_ids = {self._twin.token_to_id(spelling) for spelling in self._cuts.values()}
        names = frozenset(self._spelling.values())
        self.sliced = SlicedTokenizer.of(self._twin, source, respelt, names)
        self._verify(stock, tokenizer)
        self.prefix = _prefix(tokenizer)

    def encode(self, text: str, limit: Limit | None = None) -> tuple[int, ...]:
        """Return the ids of a client's text by itself; nothing is added.

        Raises:
            ContextLengthExceeded: the text has more tokens than ``limit`` allows.
        """
        self._check(limit, [text])
        found: list[int] = []
        for _, ids in self.sliced.ids([(text, True)]):
            found += ids
            if limit is not None:
                limit.check(len(found))
        return tuple(found)

    def encode_whole(self, text: str, limit: Limit | None = None) -> tuple[int, ...]:
        """Return the ids of a text as the stock tokenizer gives them: control strings count, ``prefix`` comes first.

        Raises:
            ContextLengthExceeded: there are more ids than ``limit`` allows.
        """
        pieces: list[Trusted | str | Cut] = []
        at = 0
        for found in self._control.finditer(text):
            pieces += [text[at : found.start()], Trusted(found[0])]
            at = found.end()
        if limit is not None:
            limit.check(len(pieces) // 2)
        return self.encode_pieces([piece for piece in (*pieces, text[at:]) if piece], limit)[0]

    def encode_pieces(
        self, pieces: Iterable[Trusted | str | Cut], limit: Limit | None = None
    ) -> list[tuple[int, ...]]:
        """Return the ids before, between and after the cuts: one tuple more than there are cuts; tuples may be empty.

        The first starts with ``prefix``, once.

        Raises:
            ContextLengthExceeded: there are more ids than ``limit`` allows.
        """
        pieces = list(pieces)
        self._check(limit, [piece for piece in pieces if type(piece) is str])
        parts: list[list[int]] = [[]]
        count = 0
        for text, ids in self.sliced.ids(map(self._spelt, pieces)):
            before = 0
            for at in self._cuts_in(text, ids):
                parts[-1] += ids[before:at]
                parts.append([])
                before = at + 1
                count -= 1
            parts[-1] += ids[before:]
            count += len(ids)
            if limit is not None:
                limit.check(count)
        if tuple(parts[0][: len(self.prefix)]) != self.prefix:
            parts[0][:0] = self.prefix
        return [tuple(part) for part in parts]

    def _cuts_in(self, text: str, ids: list[int]) -> list[int]:
        """Return the places of the cuts among the ids of a text. Searching for their spelling is faster than searching
        the ids."""
        if not any(spelling in text for spelling in self._cuts.values()):
            return []
        return [at for at, token in enumerate(ids) if token in self._cut_ids]

    def _spelt(self, piece: Trusted | str | Cut) -> tuple[str, bool]:
        """Return a piece as the twin reads it, and whether it is text that may be cut into slices."""
        if isinstance(piece, Cut):
            return self._cuts[piece.image], False
        if isinstance(piece, Trusted):
            return self._control.sub(lambda match: self._spelling[match[0]], piece), False
        return piece, True

    def _check(self, limit: Limit | None, texts: list[str]) -> None:
        """Refuse texts that are too long however they are tokenized. White space at the ends does not count, because
        it may become part of a control token beside it."""
        if limit is not None and least_tokens(texts, self.sliced.longest, limit.tokens) > limit.tokens:
            limit.check(least_tokens([text.strip() for text in texts], self.sliced.longest, limit.tokens))

    def is_plain(self, text: str) -> bool:
        """Return whether a text is only words and light punctuation, and may stand in text of the template.

        A word that could be a part of a control token is not plain, because the template may put the rest around it:
        ``<`` and ``>`` around ``image``.
        """
        if NOT_LIGHT.search(text) or self._control.search(text):
            return False
        word = text.strip().lower()
        return text in NOTATION or not word or not self._may_be_part(word)

    def _may_be_part(self, word: str) -> bool:
        return word in self._within or word.endswith(self._starts) or word.startswith(self._ends)

    def _verify(self, stock: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the twin gives every control token as the stock tokenizer does, and none for its plain string."""
        unknown = tokenizer.unk_token_id  # plain strings may become this one
        for text, spelling in self._spelling.items():
            ids = self._twin.encode(spelling, add_special_tokens=False).ids
            if ids != stock.encode(text, add_special_tokens=False).ids:
                raise ModelRefused(
                    f"control token {text!r} cannot be kept apart from text: respelt it gives {ids}"
                )
            if leaked := (self.control - {unknown}).intersection(self.encode(text)):
                raise ModelRefused(f"the text {text!r} still gives the control tokens {sorted(leaked)}")


def _respell(state: dict[str, Any], spelling: dict[str, str]) -> dict[str, Any]:
    """Spell control tokens of a tokenizer.json differently: in the added tokens, the vocabulary and the merges."""
    model = dict(state["model"])
    if isinstance(model["vocab"], list):  # Unigram: [[piece, score], ...]
        model["vocab"] = [[spelling.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {spelling.get(piece, piece): token for piece, token in model["vocab"].items()}
    if model.get("unk_token") in spelling:
        model["unk_token"] = spelling[model["unk_token"]]
    if "merges" in model:
        pairs = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        model["merges"] = [
            [a, b] for a, b in pairs if a not in spelling and b not in spelling and a + b not in spelling
        ]
    added = [{**t, "content": spelling.get(t["content"], t["content"])} for t in state["added_tokens"]]
    return {
        **state,
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts in front of a text when it adds special tokens."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for n in range(len(full) - len(bare) + 1):
        if full[n : n + len(bare)] == bare:
            return tuple(full[:n])
    return ()
