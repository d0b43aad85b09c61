"""The model that vLLM runs, described with the same digests as in the native engine, so that each engine links what
the other has compiled."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from mpic.config import EngineConfig
from mpic.kv.chunk import KVShape, Recipe, digest
from mpic.link import Wrapping
from mpic.model.checkpoint import NotStreamable, stored_fingerprint, streamed_fingerprint
from mpic.model.identity import bos_id, eos_ids, fingerprint, preprocessing_digest, shape_of
from mpic.model.load import (
    DTYPES,
    empty_model,
    is_vision,
    load_config,
    load_processor,
    load_weights,
    model_name,
)
from mpic.model.quantized_checkpoint import quantization_of
from mpic.model.refusals import context_on_vllm, refuse_on_vllm

log = logging.getLogger(__name__)

VERIFIED = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
)
"""``model_type`` of the families whose links inside vLLM are tested."""


@dataclass(frozen=True)
class ModelDescription:
    """A model, without its weights.

    Args:
        digest, preprocessing: as in the ``KVKey`` of each of its chunks.
        dtype: the type it is loaded in.
        context: the most tokens it was made for.
        image: the token that stands for an image; None for a model that takes no images.
    """

    name: str
    family: str
    digest: str
    preprocessing: str
    dtype: str
    context: int
    shape: KVShape
    eos: frozenset[int]
    bos: int
    image: int | None
    processor: Any

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def page_token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return self.shape.per_token * DTYPES[self.dtype].itemsize

    def recipe(self, wrapping: Wrapping) -> Recipe:
        """Returns the recipe of chunks with this wrapping. Policies of packets do not run here
        (``mpic.link.engines``)."""
        return Recipe(self.dtype, "raw", wrapping.sink, self.preprocessing)


def describe_model(config: EngineConfig, cpu: bool, digests: Path | None = None) -> ModelDescription:
    """Reads the description of a model.

    Args:
        cpu: True if the model will run on a CPU, which decides what ``dtype = auto`` means, as in the native engine.
        digests: file that keeps them between starts; without it the weights are read at every start.

    Raises:
        ModelRefused: it cannot be loaded, or its answers would be wrong.
    """
    path, trust = config.model, config.trust_remote_code
    found = load_config(path, config.dtype, trust)
    text = found.get_text_config()
    refuse_on_vllm(found, text)
    own = str(getattr(found, "dtype", None) or torch.float32).removeprefix("torch.")
    dtype = config.dtype if config.dtype != "auto" else "float32" if cpu else own
    processor = load_processor(path, is_vision(found), trust)
    return ModelDescription(
        name=model_name(path),
        family=found.model_type,
        digest=_digest(config, found, dtype, digests),
        preprocessing=preprocessing_digest(processor),
        dtype=dtype,
        context=context_on_vllm(text),
        shape=shape_of(text),
        eos=eos_ids(_generation_config(path), text),
        bos=bos_id(text, getattr(processor, "tokenizer", processor)),
        image=getattr(found, "image_token_id", None) if is_vision(found) else None,
        processor=processor,
    )


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # there is none
        return None


def _digest(config: EngineConfig, found: PretrainedConfig, dtype: str, digests: Path | None) -> str:
    """Returns the fingerprint of the weights as transformers loads them in this dtype. It takes a pass over the files,
    so it is remembered for as long as no file of the model changes."""
    name = _files_digest(config.model, dtype)
    known = _read(digests)
    if name not in known:
        log.info("reading the weights of %s once, for their fingerprint", config.model)
        digest_of_weights = _fingerprint(config, found, DTYPES[dtype])
        name = _files_digest(config.model, dtype)  # the files of a hub id have only now been fetched
        known = {**known, name: digest_of_weights}
        if digests is not None:
            _write(digests, known)
    return known[name]


def _fingerprint(config: EngineConfig, found: PretrainedConfig, dtype: torch.dtype) -> str:
    """Reads the weights from their files, or loads all of them into host memory where they cannot be read file by
    file."""
    path, trust = config.model, config.trust_remote_code
    cache = _download_dir(config.vllm_args)
    try:
        if quantization_of(found) is not None:  # vLLM unpacks weights that transformers may not be able to
            return stored_fingerprint(path, found, cache)
        return streamed_fingerprint(path, empty_model(found, dtype, trust), dtype, cache)
    except NotStreamable as why:
        log.info("the weights of %s are loaded for that: %s", path, why)
        return fingerprint(load_weights(path, found, dtype, trust))


def _download_dir(vllm_args: str) -> str | None:
    """Returns the folder that vLLM keeps the weights in that it fetches; None for the hub's own cache."""
    try:
        given = json.loads(vllm_args or "{}")
    except ValueError:  # ``options.engine_args`` refuses it with the reason
        return None
    return given.get("download_dir") if isinstance(given, dict) else None


def _files_digest(path: str, dtype: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        found = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
        folder = Path(found).parent if found else folder
    files = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else ():
        status = file.stat()
        files.append(f"{file.relative_to(folder)}|{status.st_size}|{status.st_mtime_ns}")
    return digest("files", str(folder.resolve()), dtype, transformers.__version__, *files)


def _read(digests: Path | None) -> dict[str, str]:
    try:
        known = json.loads(digests.read_text(encoding="utf-8")) if digests is not None else {}
    except (OSError, ValueError):  # there is none yet, or it is damaged and will be made again
        return {}
    return known if isinstance(known, dict) else {}


def _write(digests: Path, known: dict[str, str]) -> None:
    try:
        digests.parent.mkdir(parents=True, exist_ok=True)
        partial = digests.with_suffix(".partial")
        partial.write_text(json.dumps(known), encoding="utf-8")
        partial.replace(digests)
    except OSError as error:
        log.warning("the model's fingerprint could not be kept: %s", error)
