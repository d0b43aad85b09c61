"""Saves a bench model as a folder like a hub repository, for servers and vLLM, which load models by path.

Its tokenizer has one token per word: word i is ``w`` and i, so a text of n such words has n tokens.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import IMAGE_TOKEN, DecoderShape, TowerShape, describe, random_model
from mpic_lab.train.model import save_folder

CONTROL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_end|>", "<image>", "<|im_start|>", "user", "assistant", ":")
"""The first words of the vocabulary; random ids begin behind them."""
assert CONTROL[IMAGE_TOKEN] == "<image>"

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} : "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant : {% endif %}"
)


def save(model: LlavaForConditionalGeneration, decoder: DecoderShape, folder: Path) -> None:
    """Writes a model of ``workload.random_model`` with its processor."""
    save_folder(model, tokenizer(decoder.vocabulary), folder, _TEMPLATE, model.dtype)


def save_random(
    decoder: DecoderShape, placement: BenchDevice, tower: TowerShape, seed: int, folder: Path
) -> str:
    """Writes a random model, and returns its description."""
    model = random_model(decoder, placement, tower, seed=seed)
    save(model, decoder, folder)
    return describe(model, decoder)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word; a word outside of the vocabulary is ``<unk>``."""
    words = [*CONTROL, *(f"w{i}" for i in range(len(CONTROL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=["<image>", "<|im_start|>", "<|im_end|>"],
        chat_template=_TEMPLATE,
    )


def words(ids: tuple[int, ...]) -> str:
    """Returns the text whose tokens are ``ids``, none of them a control token."""
    return " ".join(f"w{i}" for i in ids)
