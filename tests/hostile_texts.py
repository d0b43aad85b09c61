"""Texts that are difficult for tokenizers and splitters, and a tokenizer that records its input."""

from __future__ import annotations

import json
import threading
from functools import cache

import pytest
from hypothesis import strategies as st
from small_models import SMALL
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mpic.prompt.sliced_tokenizer import SlicedTokenizer

SCRIPTS = ("The quick brown fox", "Привет мир", "東京は 日本の 首都", "한국어 문장", "مرحبا بالعالم")
SCRIPTS += ("naïve café", "ﬁne ﬂow")
PIECES = ("a", "b", "the ", " fox", "USER: ", " ASSISTANT:", "don't", "I'LL ", "x" * 50, " " * 40)
PIECES += ("\n\n", "\t", "\r\n", "<|end|>", "<image>", "</s>", "<0x0A>", "▁", "Ġ", "🙂", "👩‍👩‍👧", "e\u0301")
PIECES += ("\u200b", "\u3000", "7", "1234567", "...", "!?", "a b", " c d ", "\ufeff", "\u212a")
TEXTS = st.lists(st.sampled_from((*PIECES, *SCRIPTS)) | st.text(max_size=4), max_size=30).map("".join)
LONG = (
    "a" * 300_000,
    " " * 300_000,
    "東京" * 100_000,
    "🙂" * 60_000,
    "the quick brown fox " * 15_000,
    "x\n" * 100_000,
    "<|end|><image>" * 15_000,
    "word " + " " * 200_000 + "word word",
)


def prose(characters: int) -> str:
    text = "The quick brown fox jumps over the lazy dog. "
    return (text * (characters // len(text) + 1))[:characters]


@cache
def demo() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SMALL)


@cache
def sentencepiece(legacy: bool = True) -> PreTrainedTokenizerFast:
    """BPE over whole texts in the manner of Llama 2, whose vocabulary was learnt within words. ``legacy``: a normalizer
    puts a space in front of every text; otherwise a pre-tokenizer does, in front of the first."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    corpus = [*SCRIPTS, prose(300), "user assistant document image of the end."] * 4
    tokenizer.train_from_iterator(corpus, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    if legacy:
        state["pre_tokenizer"] = None
    else:
        state["pre_tokenizer"] |= {"prepend_scheme": "first", "split": False}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Recorder:
    """Replaces a tokenizers.Tokenizer and records texts and threads. It only has methods that let other threads run
    meanwhile."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []
        self.threads: set[int] = set()

    def encode_batch(self, texts: list[str], **options: bool) -> list:
        self._note(texts)
        return self._tokenizer.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> list:
        self._note(texts)
        return self._tokenizer.encode_batch_fast(texts, **options)

    def _note(self, texts: list[str]) -> None:
        self.sizes += map(len, texts)
        self.threads.add(threading.get_ident())


def recorded(sliced: SlicedTokenizer, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Record the texts that a tokenizer receives from now on."""
    recorder = Recorder(sliced.tokenizer)
    monkeypatch.setattr(sliced, "tokenizer", recorder)
    return recorder
