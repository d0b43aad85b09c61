"""Saves a random model as a folder like a hub repository, which every engine loads by its path.

Its tokenizer has one token per word: word i is ``w`` and i, so a text of n such words has n tokens.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import (
    IMAGE_TOKEN,
    BenchModel,
    DecoderShape,
    TowerShape,
    describe,
    random_model,
)
from mpic_lab.llava_folder import save_folder
from mpic_lab.train.packet import initial

CONTROL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_end|>", "<image>", "<|im_start|>", "user", "assistant", ":")
"""The first words of the vocabulary; random ids start after them."""
assert CONTROL[IMAGE_TOKEN] == "<image>"

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} : "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant : {% endif %}"
)


def make_model(
    decoder: DecoderShape,
    placement: BenchDevice,
    tower: TowerShape | None = None,
    *,
    gain: float = 1.0,
    seed: int = 0,
    packet: int = 0,
    says: str = "",
) -> BenchModel:
    """Save a random model in a temporary folder (``TMPDIR`` chooses where), and keep nothing of it in memory.

    Args:
        gain: see ``random_model``.
        packet: tokens of the header of an untrained adapter, and of its trailer; 0: the model has none.
        says: the text that every token decodes to; empty: each token decodes to its own word.
    """
    keeper = TemporaryDirectory(prefix="mpic-bench-", ignore_cleanup_errors=True)
    folder = Path(keeper.name, "bench")
    model = random_model(decoder, placement, tower, gain, seed)
    save(model, decoder, folder, says)
    made = BenchModel(folder, decoder, placement, describe(model, decoder), keeper)
    del model
    if packet:  # an adapter is bound to the weights as read back from disk
        initial(replace(made).stock, packet, seed).save(folder / "packet" / "adapter.safetensors")
    gc.collect()
    return made


def save(model: nn.Module, decoder: DecoderShape, folder: Path, says: str = "") -> None:
    """Write a model of ``random_model`` with its processor, or with its tokenizer alone if it takes no images."""
    if isinstance(model, LlavaForConditionalGeneration):
        save_folder(model, tokenizer(decoder.vocabulary, says), folder, _TEMPLATE, model.dtype)
    else:
        model.save_pretrained(folder)
        tokenizer(decoder.vocabulary, says).save_pretrained(folder)


def save_random(
    decoder: DecoderShape, placement: BenchDevice, tower: TowerShape, seed: int, folder: Path
) -> str:
    """Write a random model, and return its description."""
    model = random_model(decoder, placement, tower, seed=seed)
    save(model, decoder, folder)
    return describe(model, decoder)


def tokenizer(vocabulary: int, says: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word; a word outside of the vocabulary is ``<unk>``.

    Args:
        says: the text that every token is decoded to; empty: its own.
    """
    words = [*CONTROL, *(f"w{i}" for i in range(len(CONTROL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if says:
        made.decoder = decoders.Sequence([decoders.Replace(Regex("^.*$"), says), decoders.Fuse()])
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
    """Return the text whose tokens are ``ids``, none of them a control token."""
    return " ".join(f"w{i}" for i in ids)
