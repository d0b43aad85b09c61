"""What the facade knows of the model that vLLM runs: the same digests as the native engine's, so that each links what
the other has compiled."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.utils import cached_file

from mpic.config import EngineConfig
from mpic.errors import ModelRefused
from mpic.kv.chunk import KVShape, Recipe, digest
from mpic.model.identity import bos_id, eos_ids, fingerprint, preprocessing_digest, shape_of
from mpic.model.load import DTYPES, load_processor
from mpic.model.refusals import context_limit, refuse_unsupported

log = logging.getLogger(__name__)

VERIFIED = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
)
"""model_type of the families whose links are tested inside vLLM; of others it is not known."""


@dataclass(frozen=True)
class Described:
    """A model, without its weights.

    Args:
        digest, preprocessing: as in every ``KVKey`` of its chunks.
        dtype: what it is loaded in.
        context: the most tokens it was made for.
        image: the token that stands for an image; None: it takes none.
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

    def recipe(self, sink: int) -> Recipe:
        return Recipe(self.dtype, "raw", sink, self.preprocessing)


def describe(config: EngineConfig, cpu: bool, memory: Path | None = None) -> Described:
    """Read what is needed of a model.

    Args:
        cpu: whether it will run on one; decides what ``dtype = auto`` means, as in the native engine.
        memory: file that keeps digests between starts; without it the weights are read at every start.

    Raises:
        ModelRefused: it cannot be loaded, or cannot be right.
    """
    path, trust = config.model, config.trust_remote_code
    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:
        raise ModelRefused(f"no transformers model at '{path}': {error}") from error
    text = found.get_text_config()
    refuse_unsupported(found, text)
    if config.dtype != "auto" and config.dtype not in DTYPES:
        raise ModelRefused(f"unknown dtype '{config.dtype}'; available: auto, {', '.join(DTYPES)}")
    own = str(getattr(found, "dtype", None) or torch.float32).removeprefix("torch.")
    dtype = config.dtype if config.dtype != "auto" else "float32" if cpu else own
    vision = hasattr(found, "vision_config")
    processor = load_processor(path, vision, trust)
    return Described(
        name=Path(path).name if Path(path).exists() else path,
        family=found.model_type,
        digest=_digest(config, dtype, vision, memory),
        preprocessing=preprocessing_digest(processor),
        dtype=dtype,
        context=context_limit(found, text),
        shape=shape_of(text),
        eos=eos_ids(_generation_config(path), text),
        bos=bos_id(text, getattr(processor, "tokenizer", processor)),
        image=getattr(found, "image_token_id", None) if vision else None,
        processor=processor,
    )


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # it has none
        return None


def _digest(config: EngineConfig, dtype: str, vision: bool, memory: Path | None) -> str:
    """The fingerprint of the weights as transformers loads them in this dtype. It takes a pass over a copy in host
    memory, so it is remembered for as long as no file of the model changes."""
    name = _files_digest(config.model, dtype)
    known = _read(memory)
    if name not in known:
        auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        log.info("reading the weights of %s once, for their fingerprint", config.model)
        try:
            model = auto.from_pretrained(
                config.model, dtype=DTYPES[dtype], trust_remote_code=config.trust_remote_code
            )
        except Exception as error:
            raise ModelRefused(f"the weights at '{config.model}' could not be loaded: {error}") from error
        found = fingerprint(model)
        del model
        name = _files_digest(config.model, dtype)  # a hub id's files have only now been fetched
        known = {**known, name: found}
        if memory is not None:
            _write(memory, known)
    return known[name]


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


def _read(memory: Path | None) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8")) if memory is not None else {}
    except (OSError, ValueError):  # none yet, or torn: it is made again
        return {}
    return known if isinstance(known, dict) else {}


def _write(memory: Path, known: dict[str, str]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_suffix(".partial")
        partial.write_text(json.dumps(known), encoding="utf-8")
        partial.replace(memory)
    except OSError as error:
        log.warning("the model's fingerprint could not be kept: %s", error)
