"""Models in GGUF files, the format of llama.cpp, Ollama and LM Studio.

A file is converted once to a folder as transformers has them: weights dequantised by transformers' loader, tokenizer,
chat template. The folder is what every engine then loads. The loader ignores what it does not know, so every tensor and
every setting of the architecture that would be lost is refused: such a model would answer, wrongly.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from mpic.data.published import gguf_path, is_gguf
from mpic.errors import ModelRefused

if TYPE_CHECKING:
    from gguf import GGUFReader

log = logging.getLogger(__name__)

_VERSION = "1"
"""Raised when a conversion writes something else than before."""
_ROTARY = "rope_freqs.weight"
_KNOWN_ELSEWHERE = {"vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count"}
"""Settings that follow from the shapes of tensors, which are checked against the configuration."""
_LLAMA3 = [{"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0} for factor in (8.0, 32.0)]
"""Rotary scalings of Llama 3.1 and 3.2: a GGUF file keeps only the divisors that come of them."""


def folder_of(model: str, dtype: str = "auto") -> str:
    """Return the folder of a model, converting a GGUF file that has not been converted yet.

    Args:
        model: ``mpic serve --model``; anything but a GGUF file is returned as it is.
        dtype: of the weights in the folder: float32 if that is asked for, else bfloat16.

    Raises:
        ModelRefused: the file cannot be read, or something in it would be lost.
    """
    if not is_gguf(model):
        return model
    path = gguf_path(model)
    stored = "float32" if dtype == "float32" else "bfloat16"
    folder = _cache_folder(path, stored) / path.stem
    if not (folder / "config.json").is_file():
        log.info("%s: converting to %s in %s", path.name, stored, folder)
        _convert(path, folder, getattr(torch, stored))
    return str(folder)


def _cache_folder(path: Path, dtype: str) -> Path:
    """Return the folder for the conversion of a file as it is now."""
    about = path.stat()
    facts = (str(path), about.st_size, about.st_mtime_ns, dtype, _VERSION, transformers.__version__)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return converted_folder() / name


def converted_folder() -> Path:
    """Return the folder in which converted models are kept for this user."""
    import platformdirs  # here, because a GPU is measured on machines without it (`make report-gpu`)

    return Path(platformdirs.user_cache_dir("mpic", appauthor=False)) / "gguf"


def _convert(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the folder of a GGUF file; it appears whole or not at all."""
    reader = _read(path)
    config = _config(path, reader)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=dtype, output_loading_info=True
        )
        model, report = loaded
    except Exception as error:
        raise ModelRefused(f"transformers cannot load {path}: {error}") from error
    if lost := [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]:
        raise ModelRefused(
            f"{path} lacks {len(lost)} weights that a {config.model_type} has, such as {lost[0]}"
        )
    _check_weights(path, model)
    with torch.device("meta"):  # transformers refuses to save a model that it has loaded from a GGUF file
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        made = Path(part) / folder.name
        plain.save_pretrained(made, state_dict=model.state_dict())
        tokenizer.save_pretrained(made)
        shutil.rmtree(
            folder, ignore_errors=True
        )  # what a conversion left that was killed while it was renamed
        os.replace(made, folder)


def _read(path: Path) -> GGUFReader:
    """Return a reader of a GGUF file. Raise ModelRefused if it is none, or a part of several."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelRefused(f"{path} needs the package gguf: pip install gguf") from error
    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelRefused(f"{path} is not a GGUF file that can be read: {error}") from error
    if _value(reader, "split.count", 1) > 1:
        raise ModelRefused(
            f"{path} is one of several files of a model: merge them with `llama-gguf-split --merge`"
        )
    return reader


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _config(path: Path, reader: GGUFReader) -> PretrainedConfig:
    """Return the configuration of a GGUF file, with the rotary scaling that transformers' loader leaves out.

    Raises:
        ModelRefused: the architecture is unknown, or the loader would ignore a setting.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_SUPPORTED_ARCHITECTURES,
        GGUF_TO_TRANSFORMERS_MAPPING,
    )

    architecture = _value(reader, "general.architecture", "")
    if architecture == "clip":
        raise ModelRefused(
            f"{path} is the vision encoder of a model (mmproj); GGUF models are served for text only"
        )
    name = architecture.replace("moe", "_moe") if architecture in ("qwen2moe", "qwen3moe") else architecture
    if name not in GGUF_SUPPORTED_ARCHITECTURES:
        known = ", ".join(sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"}))
        raise ModelRefused(
            f"{path}: transformers reads no GGUF files of architecture {architecture!r}; it reads {known}"
        )
    read = GGUF_TO_TRANSFORMERS_MAPPING["config"][name]
    settings = [
        key.removeprefix(f"{architecture}.") for key in reader.fields if key.startswith(f"{architecture}.")
    ]
    ignored = [
        key
        for key in settings
        if key not in _KNOWN_ELSEWHERE and not key.startswith("rope.scaling.") and read.get(key, -1) == -1
    ]
    if ignored:
        raise ModelRefused(f"{path}: transformers ignores its setting {architecture}.{ignored[0]}")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise ModelRefused(f"transformers cannot read the configuration of {path}: {error}") from error
    _add_rotary_scaling(path, reader, architecture, config)
    return config


def _add_rotary_scaling(path: Path, reader: GGUFReader, architecture: str, config: PretrainedConfig) -> None:
    """Put the scaling of the rotary embedding into a configuration. Raise ModelRefused if it is not understood."""
    scaling = f"{architecture}.rope.scaling."
    kind, factor = _value(reader, f"{scaling}type", "none"), _value(reader, f"{scaling}factor", 1.0)
    divisors = next((t.data for t in reader.tensors if t.name == _ROTARY), None)
    if architecture == "gpt-oss" or (kind == "none" and divisors is None):
        return
    if kind == "linear" and divisors is None:
        found: dict[str, Any] | None = {"rope_type": "linear", "factor": float(factor)}
    elif kind == "yarn" and divisors is None:
        original = _value(reader, f"{scaling}original_context_length")
        found = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    else:
        found = _llama3(config, torch.tensor(divisors)) if kind == "none" and divisors is not None else None
    if found is None:
        raise ModelRefused(f"{path}: its rotary scaling ({kind}) cannot be read")
    config.rope_parameters = {**config.rope_parameters, **found}


def _llama3(config: PretrainedConfig, divisors: torch.Tensor) -> dict[str, Any] | None:
    """Return the scaling of Llama 3 whose frequencies are the plain ones over these divisors ``[head_dim / 2]``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for known in _LLAMA3:
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": 8192, **known}
        given: Any = {**config.to_dict(), "rope_parameters": {**config.rope_parameters, **scaling}}
        tried = type(config)(**given)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](tried, device="cpu")
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        if len(scaled) == len(divisors) and torch.allclose(plain / scaled, divisors.float(), rtol=1e-3):
            return scaling
    return None


def _check_weights(path: Path, model: transformers.PreTrainedModel) -> None:
    """Refuse a model whose tensors were not all taken over, or hold numbers that are not finite."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    reader = _read(path)
    kind = TENSOR_PROCESSORS.get(_value(reader, "general.architecture"), TensorProcessor)
    known = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    if lost := [
        t.name for t in reader.tensors if t.name not in known and t.name != _ROTARY and "_exps" not in t.name
    ]:
        raise ModelRefused(f"{path}: transformers ignores {len(lost)} of its tensors, such as {lost[0]}")
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ModelRefused(f"{path}: the weight {name} holds numbers that are not finite")
