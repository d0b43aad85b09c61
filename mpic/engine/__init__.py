"""Engines: the contract (``base``), the native one and vLLM's. ``load_engine`` is the way in for the layers above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpic.config import EngineConfig
    from mpic.engine.base import ChunkStore, Engine


def load_engine(
    config: EngineConfig, store: ChunkStore | None = None, host_bytes: int = 0
) -> tuple[Engine, Any]:
    """Load the configured model and start an engine on it.

    Args:
        host_bytes: what the vllm engine may keep of chunk files in host memory; 0: its own choice. The native one's
            store does that.

    Returns:
        The engine and the model's processor (vision models) or tokenizer.

    Raises:
        ModelRefused: with what and why.
        ConfigError: an option that the engine cannot follow, or vLLM is not installed.
    """
    from mpic.config import check_engine

    check_engine(config)
    if config.engine == "vllm":
        return _load_vllm(config, store, host_bytes)
    from mpic.engine.native.engine import NativeEngine
    from mpic.engine.native.sizing import pool_pages
    from mpic.model.load import load_model
    from mpic.model.selftest import self_test

    model = load_model(
        config.model, device=config.device, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    if config.attention != "auto":
        model.choose_attention(config.attention)
        self_test(model)
    pages = pool_pages(model, config.pool_bytes)
    engine = NativeEngine(
        model,
        store,
        pages=pages,
        budget=config.step_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        loaders=config.loaders,
    )
    return engine, model.processor


def _load_vllm(config: EngineConfig, store: ChunkStore | None, host_bytes: int) -> tuple[Engine, Any]:
    from mpic.engine.vllm.options import prepare_environment

    cpu = prepare_environment()
    from mpic.engine.vllm.engine import VLLMEngine  # imports vLLM, which reads its environment then

    engine = VLLMEngine(config, store, cpu, host_bytes)
    return engine, engine.model.processor
