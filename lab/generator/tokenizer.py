"""The demo models' tokenizer: a byte-level BPE trained on the generator's own words, kept in `tokenizer.json`.

Byte level, so any text survives a round trip; common words are one token, digits stand alone and upper-case handles
fall into syllables, so that a fresh handle is spelled with familiar pieces. A model only works with the tokenizer it
was trained with, so models are always trained with the stored tokenizer, however the generator changes.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mpic_lab.generator.conversation import CHAT_TEMPLATES, SPECIAL

STORED = Path(__file__).parent / "tokenizer.json"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the stored tokenizer with its special tokens and the chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(STORED)),
        bos_token=SPECIAL["bos"],
        eos_token=SPECIAL["eos"],
        pad_token=SPECIAL["pad"],
        additional_special_tokens=[SPECIAL["image"], SPECIAL["search"], SPECIAL["end"]],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATES["around"]
    return fast
