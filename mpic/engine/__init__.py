"""Engines: the contract (``base``) and the native one. ``load_engine`` is the only way in for the layers above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpic.config import EngineConfig
    from mpic.engine.base import ChunkStore, Engine


def load_engine(config: EngineConfig, store: ChunkStore | None = None) -> tuple[Engine, Any]:
    """Load the configured model and start an engine on it.

    Returns:
        The engine and the model's processor (vision models) or tokenizer.

    Raises:
        ModelRefused: with what and why.
    """
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
