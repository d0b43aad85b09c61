"""Describes the model that vLLM runs with the same digests as the native engine, so that each engine links chunks that
the other has compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

from mpic.config import EngineConfig
from mpic.engine.vllm.frontend.digests import download_dir, fingerprint, weights_digest
from mpic.engine.vllm.wire import packet_ids
from mpic.errors import AdapterRefused
from mpic.kv.chunk import KVShape, Recipe
from mpic.kv.expected import Expected
from mpic.link import Wrapping
from mpic.model.dtype_choice import own_dtype
from mpic.model.identity import bos_id, deepstack_layers, eos_ids, preprocessing_digest, shape_of
from mpic.model.load import DTYPES, is_vision, load_config, load_processor, model_name
from mpic.model.quantized_checkpoint import quantization_of
from mpic.model.refusals import context_on_vllm, refuse_on_vllm
from mpic.model.structure import OWN_EMBEDDINGS
from mpic.packet.adapter import Adapter, adapter_file, load_adapter, require_adapter

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
        context: maximum tokens it was made for.
        image: the token that stands for an image; None for a model that takes no images.
        expected: the properties that a stored chunk must have to fit it.
        adapter, adapter_path: its adapter and the adapter's file; None if it has none.
        no_packets: the reason why it cannot have packets; empty if it can.
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
    expected: Expected
    adapter: Adapter | None = None
    adapter_path: Path | None = None
    no_packets: str = ""

    def some_words(self, count: int, seed: int) -> list[int]:
        """Return random tokens, none of them special."""
        special = {*self.tokenizer.all_special_ids, self.image}
        usable = [i for i in range(len(self.tokenizer)) if i not in special]
        drawn = torch.randint(len(usable), (count,), generator=torch.Generator().manual_seed(seed))
        return [usable[i] for i in drawn.tolist()]

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def page_token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return self.shape.per_token * DTYPES[self.dtype].itemsize

    def recipe(self, wrapping: Wrapping) -> Recipe:
        """Return the recipe of chunks with this wrapping.

        Raises:
            NoAdapter: the wrapping is that of packets, and the model has no adapter.
        """
        packet = self.require_adapter().digest if wrapping.packet else ""
        return Recipe(self.dtype, "raw", wrapping.sink, self.preprocessing, packet)

    def require_adapter(self) -> Adapter:
        """Return the model's adapter; raise NoAdapter with the reason if it has none."""
        return require_adapter(self.adapter, self.name, self.no_packets)

    def soft_tokens(self, recipe: Recipe) -> tuple[int, int]:
        """Return how many trained tokens stand before and behind a chunk of this recipe."""
        return self.adapter.lengths if recipe.packet and self.adapter is not None else (0, 0)

    def prompt_ids(self, ids: Sequence[int], recipe: Recipe) -> tuple[int, ...]:
        """Return the ids of a chunk of this recipe as prompts have them.

        Args:
            ids: ids of the chunk's own tokens.
        """
        return packet_ids(ids, *self.soft_tokens(recipe))


def describe_model(config: EngineConfig, cpu: bool, digests: Path | None = None) -> ModelDescription:
    """Read the description of a model from its folder, without its weights.

    Args:
        cpu: True if the model will run on a CPU, where ``dtype = auto`` means float32.
        digests: file that keeps them between starts; without it the weights are read at every start.

    Raises:
        ModelRefused: it cannot be loaded, or its answers would be wrong.
        AdapterRefused: the adapter beside it, or the configured one, cannot be used.
    """
    path, trust = config.model, config.trust_remote_code
    found = load_config(path, config.dtype, trust)
    text = found.get_text_config()
    refuse_on_vllm(found, text)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if cpu else own_dtype(path, found, download_dir(config.vllm_args))
    processor = load_processor(path, is_vision(found), trust)
    no_packets = _no_packets(found)
    if config.packet and no_packets:
        raise AdapterRefused(f"model {model_name(path)} cannot have packets: {no_packets}")
    where, adapter = None if no_packets else adapter_file(path, config.packet), None
    if where is not None:
        adapter = load_adapter(where, weights_digest(config, found, dtype, digests), text.hidden_size)
    shape = shape_of(text)
    image = getattr(found, "image_token_id", None) if is_vision(found) else None
    width, features = text.hidden_size, deepstack_layers(found)
    return ModelDescription(
        name=model_name(path),
        family=found.model_type,
        digest=fingerprint(config, found, dtype, digests),
        preprocessing=preprocessing_digest(processor),
        dtype=dtype,
        context=context_on_vllm(text),
        shape=shape,
        eos=eos_ids(_generation_config(path), text),
        bos=bos_id(text, getattr(processor, "tokenizer", processor)),
        image=image,
        processor=processor,
        expected=Expected(shape, DTYPES[dtype], width, features, adapter, image=image),
        adapter=adapter,
        adapter_path=where,
        no_packets=no_packets,
    )


def _no_packets(config: PretrainedConfig) -> str:
    """Return the reason why a model cannot have packets in vLLM; empty if it can."""
    if getattr(config.get_text_config(), "hidden_size_per_layer_input", None):
        return OWN_EMBEDDINGS
    if quantization_of(config) is not None:
        return (
            "vLLM unpacks the weights of its quantised checkpoint itself, and whether an adapter was trained with them "
            "cannot be known; use engine = native"
        )
    return ""


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # there is none
        return None
