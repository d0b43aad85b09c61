"""The demo models' tokenizer: a byte-level BPE trained on the generator's own words, kept in `tokenizer.json`.

Byte level, so any text survives a round trip; common words are one token, digits stand alone and
upper-case handles fall into syllables, so that a fresh handle is spelled with familiar pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mpic.data.generator import words
from mpic.data.generator.conversation import CHAT_TEMPLATE, SPECIAL, segments
from mpic.data.generator.documents import SENTENCE
from mpic.data.generator.tasks import SYSTEMS, Generator
from mpic.data.generator.wordings import WORDINGS

STORED = Path(__file__).parent / "tokenizer.json"
_SYLLABLE = "[BCDFGHJKLMNPQRSTVWXYZ][AEIOU](?![a-z])"
_PATTERN = (
    rf" ?ASSISTANT:| ?USER:| ?{_SYLLABLE}| ?[A-Z](?![a-z])| ?\d| ?\p{{L}}+| ?[^\s\p{{L}}\d]+|\s+(?!\S)|\s+"
)


def _corpus() -> Iterator[str]:
    """Every word of the generator, each twice with and without a space before it, and a few conversations."""
    lists = [words.COLOURS, words.SHAPES, words.CITIES, words.JOBS, words.PETS, words.OBJECTS, words.NUMBERS]
    lists += [words.FIRST_NAMES, words.LAST_NAMES, words.POSITIONS, [s for s in SYSTEMS if s]]
    lists += [
        words.fillers("train"),
        words.fillers("eval"),
        SENTENCE.values(),
        [" ASSISTANT: USER: ASSISTANT: USER:"],
    ]
    lists += [kind for asking in ("train", "eval") for kind in WORDINGS[asking].values()]
    lists += [["yes no and so first second nothing show shows Does picture of with city job pet code Card"]]
    for texts in lists:
        for text in texts:
            for word in text.split():
                yield f" {word} {word}"
            yield from [text, f" {text}"] * 2
    syllables = [c + v for c in "BCDFGHJKLMNPQRSTVWXYZ" for v in "AEIOU"]
    yield from (f" {s} {s}{s}{s}" for s in [*syllables, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *words.DIGITS])
    for seed in range(40):
        conversation = Generator(seed).training(4, 8)
        yield from (s.content for s in segments(conversation) if s.kind != "image")


def train_tokenizer() -> Tokenizer:
    """Trains a tokenizer anew (a second of work). A model only works with the one it was trained with, so what
    models are trained with is the stored one, whatever becomes of the generator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The stored tokenizer with its special tokens and the chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(STORED)),
        bos_token=SPECIAL["bos"],
        eos_token=SPECIAL["eos"],
        pad_token=SPECIAL["pad"],
        additional_special_tokens=[SPECIAL["image"], SPECIAL["search"], SPECIAL["end"]],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
