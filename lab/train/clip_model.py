"""The demo CLIP: a standard open_clip model in a folder of its own, built, saved and loaded.

The folder holds what open_clip's `local-dir:` schema wants: `open_clip_config.json` (architecture and
preprocessing), `open_clip_model.safetensors`, and a Hugging Face tokenizer. Nothing else is needed, so

    open_clip.create_model_and_transforms("local-dir:data/models/clip")
    open_clip.get_tokenizer("local-dir:data/models/clip")

work without a network and without this package.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mpic_lab.generator.images import SIZE
from mpic_lab.generator.pairs import Pairs

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
CONTEXT = 48
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
MEAN, STD = (0.15, 0.15, 0.15), (0.27, 0.27, 0.27)
TOKENIZER_PAIRS = 6000  # number of texts of each kind to train the tokenizer on


@functools.cache
def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE over the generator's words, lower case, digits alone; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\d|[^\s\p{L}\d]"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        min_frequency=20,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(t, tokenizer.token_to_id(t)) for t in (BOS, EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> Iterator[str]:
    pairs = Pairs(0)
    for _ in range(TOKENIZER_PAIRS // 100):
        images, texts = pairs.batch(20, 200)
        yield from (p.query for p in images)
        yield from (text for p in texts for text in (p.query, str(p.entry)))


def config(vocabulary: int, width: int = 128, layers: int = 2, text_layers: int = 2) -> dict[str, Any]:
    """Returns the architecture file: a ViT with 16-pixel patches and a causal text tower."""
    return {
        "model_cfg": {
            "embed_dim": width,
            "vision_cfg": {
                "image_size": SIZE,
                "layers": layers,
                "width": width,
                "head_width": 64,
                "patch_size": 16,
            },
            "text_cfg": {
                "context_length": CONTEXT,
                "vocab_size": vocabulary,
                "hf_tokenizer_name": "tokenizer",  # any name: open_clip takes the folder itself
                "width": width,
                "heads": width // 64,
                "layers": text_layers,
                "pool_type": "eos",
                "eos_id": 2,
            },
        },
        "preprocess_cfg": {
            "size": SIZE,
            "mean": MEAN,
            "std": STD,
            "interpolation": "bicubic",
            "resize_mode": "squash",
        },
    }


def create(folder: Path, width: int = 128, layers: int = 2, text_layers: int = 2) -> open_clip.CLIP:
    """Returns a freshly initialised model; writes architecture and tokenizer into the folder where they are missing."""
    if not (folder / CONFIG).exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(folder)
        body = json.dumps(config(len(tokenizer), width, layers, text_layers), indent=2)
        (folder / CONFIG).write_text(body + "\n", encoding="utf-8")
    return open_clip.create_model(f"local-dir:{folder}", load_weights=False)


def copy(source: Path, folder: Path) -> open_clip.CLIP:
    """Returns a trained model of another folder, with its architecture and tokenizer written into this one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return open_clip.create_model(f"local-dir:{source}")


def save(model: open_clip.CLIP, folder: Path) -> None:
    """Writes the weights beside architecture and tokenizer."""
    state = {k: v.detach().float().cpu().contiguous() for k, v in model.state_dict().items()}
    temporary = folder / f"{WEIGHTS}.tmp"
    save_file(state, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)


Preprocess = Callable[[Image.Image], torch.Tensor]
Tokenize = Callable[[list[str]], torch.Tensor]


def load(folder: Path, device: str = "cpu") -> tuple[open_clip.CLIP, Preprocess, Tokenize]:
    """Returns model (in evaluation mode), preprocessing and tokenizer, as anyone would load them."""
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}", device=device)
    return model.eval(), preprocess, open_clip.get_tokenizer(f"local-dir:{folder}")
