"""Decoders with the shapes of real models and random weights, made on the device, and the engine on them.

A model of 7 B parameters is not saved first, as the benches save theirs: this is the only module of the laboratory's
measurements that makes a ``LoadedModel`` and an engine itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers as tf

from mpic.engine.native.engine import NativeEngine
from mpic.kv.store import ChunkStore
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import MOST, TOLERANCE, self_test
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import PAGE, DecoderShape, made_on

__all__ = ["LLAVA", "MOST", "QWEN", "TOLERANCE", "LoadedModel", "ModelShape", "native_engine", "self_test"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder by name; ``side`` > 0: an image's positions are a grid with three axes (M-RoPE)."""

    name: str
    decoder: DecoderShape
    side: int = 0

    def config(self) -> tf.PretrainedConfig:
        text = self.decoder.sizes()
        if not self.side:
            return tf.LlamaConfig(**text)
        half = self.decoder.hidden // self.decoder.heads // 2
        sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        vision = {"depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
        tokens = {
            "image_token_id": 5,
            "vision_start_token_id": 6,
            "vision_end_token_id": 7,
            "video_token_id": 8,
        }
        vision |= {"out_hidden_size": self.decoder.hidden, "fullatt_block_indexes": [0]}
        return tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)

    def build(self, placement: BenchDevice) -> LoadedModel:
        """Return a model with random weights, made on the device."""
        kind = tf.Qwen2_5_VLForConditionalGeneration if self.side else tf.LlamaForCausalLM
        torch.manual_seed(0)
        with made_on(placement):
            model = kind(self.config())
        model.generation_config.eos_token_id = None
        return LoadedModel(model.to(placement.device), None, self.name)


LLAVA = ModelShape("LLaVA-1.6-7B shape", DecoderShape(32, 4096, 32, 11008, 32, 32_064))
QWEN = ModelShape("Qwen2.5-VL-7B shape", DecoderShape(28, 3584, 28, 18944, 4, 152_064), side=48)


@contextmanager
def native_engine(
    loaded: LoadedModel, tokens: int, store: ChunkStore | None = None, **options: object
) -> Iterator[NativeEngine]:
    """Start the engine on a model in this process, with a pool that has room for ``tokens``, and close it at the
    end."""
    engine = NativeEngine(loaded, store, pages=-(-tokens // PAGE), page_size=PAGE, **options)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
