"""Models put together from a vision tower and a published language model that it was trained on.

The folder of a graft has the tower and projector alone; the weights of the language model, by far the most, come from
where it is published. Both are joined once, to the folder of a `LlavaForConditionalGeneration` as transformers has it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import transformers
from safetensors.torch import load_file, save_file

from mpic.data.published import GRAFT, graft_folder, language_model_of
from mpic.errors import ModelRefused
from mpic.model import gguf_model

log = logging.getLogger(__name__)

TOWER = "tower.safetensors"
"""Tower and projector, under the names of a published LLaVA."""
_VERSION = "1"
"""Raised when joining writes something else than before."""


def folder_of(model: str, dtype: str = "auto") -> str:
    """Return the folder of a model, joining a graft or converting a GGUF file that has not been so yet.

    Args:
        model: ``mpic serve --model``; any other kind of model is returned as it is.
        dtype: of the weights in the folder: float32 if that is asked for, else the tower's and the GGUF file's.

    Raises:
        ModelRefused: the language model is not installed or not the right one, or a file cannot be read.
    """
    source = graft_folder(model)
    if source is None:
        return gguf_model.folder_of(model, dtype)
    language = Path(gguf_model.folder_of(language_model_of(source), dtype))
    folder = gguf_model.converted_folder() / _digest(source, language) / source.name
    if not (folder / "config.json").is_file():
        log.info("%s: joining its tower with %s in %s", source.name, language.name, folder)
        _join(source, language, folder)
    return str(folder)


def _digest(source: Path, language: Path) -> str:
    """Return a name for what a graft and its language model are now."""
    facts: list[object] = [_VERSION, transformers.__version__, str(source)]
    for path in (*sorted(source.iterdir()), language / "config.json"):
        about = path.stat()
        facts += [str(path), about.st_size, about.st_mtime_ns]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _join(source: Path, language: Path, folder: Path) -> None:
    """Write the folder of a whole model; it appears whole or not at all."""
    config = json.loads((source / "config.json").read_text())
    _check_text_config(source, config["text_config"], json.loads((language / "config.json").read_text()))
    tower, text = load_file(source / TOWER), {}
    for path in sorted(language.glob("*.safetensors")):
        text |= {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    dtype = next(iter(text.values())).dtype
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        made = Path(part) / folder.name
        shutil.copytree(language, made, ignore=shutil.ignore_patterns("*.safetensors*"))
        shutil.copytree(source, made, ignore=shutil.ignore_patterns(TOWER, GRAFT), dirs_exist_ok=True)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        image = json.loads((source / "processor_config.json").read_text())["image_token"]
        rename_token(made / "tokenizer.json", config["image_token_index"], image)
        weights = text | {name: tensor.to(dtype) for name, tensor in tower.items()}
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(
            folder, ignore_errors=True
        )  # what was left by a process that was killed while it renamed
        os.replace(made, folder)


def _check_text_config(source: Path, asked: dict, found: dict) -> None:
    """Refuse a language model of other shapes than the one that the tower was trained on."""
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if asked[name] != found[name]:
            raise ModelRefused(
                f"{source} was trained on a language model whose {name} is {asked[name]}, not {found[name]}"
            )


def rename_token(tokenizer: Path, token: int, name: str) -> None:
    """Give a token of a tokenizer.json that stands for nothing another name, so that no embedding must be added.

    Raises:
        ModelRefused: it is not one of the special tokens, or the name is another token's.
    """
    content = json.loads(tokenizer.read_text())
    spare = next((one for one in content["added_tokens"] if one["id"] == token), None)
    vocabulary = content["model"]["vocab"]
    if spare is None or vocabulary.get(name, token) != token:
        raise ModelRefused(f"{tokenizer}: token {token} cannot become {name}")
    vocabulary.pop(spare["content"], None)
    vocabulary[name] = token
    spare["content"] = name
    tokenizer.write_text(json.dumps(content, ensure_ascii=False))
