"""Engines: the contract (``base``), the native engine and the one over vLLM. The layers above call ``load_engine``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpic.data.published import graft_folder, is_gguf

if TYPE_CHECKING:
    from mpic.config import EngineConfig
    from mpic.engine.base import Engine
    from mpic.kv.staging import Staging
    from mpic.kv.store import ChunkStore

log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig, store: ChunkStore | None = None, host_bytes: int | None = None
) -> tuple[Engine, Any]:
    """Load the configured model and start an engine on it.

    Args:
        host_bytes: host memory that the vllm engine may use for chunk files; None: its own choice. For the native
            engine the store does that.

    Returns:
        The engine and the model's processor (vision models) or tokenizer.

    Raises:
        ModelRefused: results of the model would be wrong; the message says why.
        NoAdapter, AdapterRefused: the policy needs an adapter that the model does not have; the one it has cannot be
            used.
        ConfigError: the engine cannot follow an option, or vLLM is not installed.
        UnsupportedParameter: the press cannot compress chunks of this model.
    """
    from mpic.config import check_engine

    check_engine(config)
    if is_gguf(config.model) or graft_folder(config.model):
        from mpic.model.graft import folder_of

        config = replace(config, model=folder_of(config.model, config.dtype))
    if config.engine == "vllm":
        return _load_vllm(config, store, host_bytes)
    return _load_native(config, store)


def _load_native(config: EngineConfig, store: ChunkStore | None) -> tuple[Engine, Any]:
    from mpic.engine.native.choose import choose_attention, graphs_beside
    from mpic.engine.native.cuda_executor import reserved_bytes
    from mpic.engine.native.device_memory import pool_pages
    from mpic.engine.native.engine import NativeEngine
    from mpic.engine.native.presser import check_press
    from mpic.link import named_policy
    from mpic.model.load import load_model
    from mpic.packet.adapter import find_adapter, require_adapter

    model = load_model(
        config.model,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantize=config.quantize,
        trust_remote_code=config.trust_remote_code,
    )
    choose_attention(model, config.attention)
    check_press(model, config.press)
    adapter = find_adapter(model, config.model, config.packet)
    if (policy := named_policy(config.policy)) is not None and policy.wrapping.packet:
        require_adapter(adapter, model.info.name, model.no_packets)
    if adapter is not None:
        model.info.details["packet"] = adapter.digest
    graphs = graphs_beside(config.attention, config.cuda_graphs)
    reserved = reserved_bytes(model, config.max_running, graphs, config.step_tokens)
    pages = pool_pages(model, config.pool_bytes, reserved)
    engine = NativeEngine(
        model,
        store,
        adapter=adapter,
        pages=pages,
        budget=config.step_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        loaders=config.loaders,
        staging=_staging(config, model.device.type),
        cuda_graphs=graphs,
    )
    return engine, model.processor


def _staging(config: EngineConfig, device: str) -> Staging | None:
    """Return the size of the ring that chunks are read through; None on a device that has none."""
    from mpic.kv.staging import SLOTS, staging_for

    if device == "cuda":
        return staging_for(config.staging_slots, config.staging_slot_bytes)
    if (config.staging_slots, config.staging_slot_bytes) != (SLOTS, 0):
        log.info("staging_slots and staging_slot_bytes change nothing on %s", device)
    return None


def _load_vllm(config: EngineConfig, store: ChunkStore | None, host_bytes: int | None) -> tuple[Engine, Any]:
    from mpic.engine.vllm.frontend.options import prepare_environment

    cpu = prepare_environment()
    from mpic.engine.vllm.frontend.engine import VLLMEngine  # imports vLLM, which reads its environment then

    engine = VLLMEngine(config, store, cpu, host_bytes)
    return engine, engine.model.processor
