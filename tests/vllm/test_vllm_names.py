"""Every name of vLLM that this engine uses, for both model runners: a version that moves one fails here, in seconds and
without a GPU."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import vllm_kit  # noqa: F401 - sets the environment before vLLM is imported

import mpic.engine.vllm

ROOT = Path(mpic.engine.vllm.__file__).parent
V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

METHODS = {
    V1: {
        "_update_states": ["scheduler_output"],
        "_init_mrope_positions": ["req_state"],
        "_prepare_inputs": ["scheduler_output", "num_scheduled_tokens"],
        "_determine_batch_execution_and_padding": [],
        "_build_attention_metadata": ["num_tokens", "slot_mappings"],
        "_gather_mm_embeddings": ["scheduler_output", "shift_computed_tokens"],
        "execute_model": ["scheduler_output"],
        "get_model": [],
    },
    V2: {
        "finish_requests": ["scheduler_output"],
        "add_requests": ["scheduler_output"],
        "update_requests": ["scheduler_output"],
        "gather_batch_req_state": ["scheduler_output", "dummy_run"],
        "prepare_inputs": ["scheduler_output"],
        "execute_model": ["scheduler_output"],
        "get_model": [],
    },
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": {
        "prepare_inputs": ["input_batch", "req_states"],
        "prepare_attn": ["input_batch", "cudagraph_mode", "block_tables", "slot_mappings"],
        "apply_staged_writes": [],
    },
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner": {"gather_mm_embeddings": ["req_ids"]},
    "vllm.v1.worker.gpu.mm.rope:RopeState": {
        "read_prefill_positions": ["req_idx", "length"],
        "update_prefill_positions": ["req_idx", "positions", "delta"],
    },
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": {
        "dispatch": ["num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len"]
    },
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher": {"dispatch": ["invalid_modes"]},
    "vllm.v1.worker.block_table:MultiGroupBlockTable": {"compute_slot_mapping": ["num_reqs"]},
    "vllm.v1.worker.block_table:BlockTable": {"get_device_tensor": ["num_reqs"]},
    "vllm.v1.worker.utils:AttentionGroup": {"get_metadata_builder": []},
    "vllm.v1.attention.backend:AttentionMetadataBuilder": {
        "__init__": ["kv_cache_spec", "layer_names", "vllm_config", "device"],
        "build": ["common_prefix_len", "common_attn_metadata"],
    },
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "update_from_output": ["scheduler_output", "model_runner_output"],
        "finish_requests": ["request_ids", "finished_status"],
        "has_finished_requests": [],
        "_free_encoder_inputs": ["request"],
        "_preempt_request": ["request"],
    },
    "vllm.v1.core.block_pool:BlockPool": {
        "get_new_blocks": ["num_blocks"],
        "touch": ["blocks"],
        "free_blocks": ["ordered_blocks"],
        "unpin_blocks": ["blocks", "on_reuse"],
        "get_num_free_blocks": [],
    },
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": {
        "forward": ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"],
    },
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": {"clear_override": []},
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": {
        "get_finished": ["finished_req_ids"],
        "update_connector_output": ["connector_output"],
        "wait_for_save": [],
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {
        "cache_blocks": ["request"],
        "get_block_ids": [],
        "evict_blocks": ["block_ids"],
        "get_computed_blocks": ["request"],
    },
    "vllm.v1.worker.gpu_worker:Worker": {
        "init_device": [],
        "load_model": [],
        "initialize_from_config": ["kv_cache_config"],
    },
    "vllm.v1.worker.cpu_worker:CPUWorker": {
        "init_device": [],
        "load_model": [],
        "initialize_from_config": ["kv_cache_config"],
    },
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": {"forward": ["input_"]},
    "vllm.renderers.base:BaseRenderer": {"validate_token_ids": ["token_ids", "parameter"]},
}
"""Methods that are overridden or called, and the parameters that are given or taken by name or place."""

ATTRIBUTES = {
    V1: "requests input_batch positions input_ids mrope_positions query_start_loc uses_mrope encoder_cache attn_groups "
    "cudagraph_dispatcher device dtype vllm_config intermediate_tensors max_num_tokens model_config",
    V2: "req_states model_state encoder_cache attn_groups cudagraph_manager device dtype vllm_config "
    "intermediate_tensors",
    "vllm.v1.core.block_pool:BlockPool": "num_gpu_blocks",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": "alibi_slopes logits_soft_cap sinks attn_type scale "
    "kv_sharing_target_layer_name",
    "vllm.v1.worker.gpu.states:RequestState": "req_id_to_index prompt_len prefill_len all_token_ids",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": "rope_state",
    "vllm.v1.worker.gpu.model_states.interface:ModelState": "supports_mm_inputs encoder_runner device",
    "vllm.v1.worker.gpu.mm.rope:RopeState": "positions",
    "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache": "mm_features encoder_outputs",
    "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor": "gpu",
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor": "np",
    "vllm.v1.worker.gpu_worker:Worker": "use_v2_model_runner model_runner",
}
"""Attributes that their objects set on themselves."""

FIELDS = {
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids num_tokens num_scheduled_tokens num_computed_tokens_np "
    "idx_mapping_np positions input_ids",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor": "cg_mode num_tokens num_reqs",
    "vllm.v1.outputs:KVConnectorOutput": "finished_sending kv_connector_worker_meta",
    "vllm.v1.core.sched.output:SchedulerOutput": "finished_req_ids preempted_req_ids kv_connector_metadata "
    "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens",
    "vllm.v1.core.sched.output:NewRequestData": "req_id block_ids prefill_token_ids num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids new_block_ids num_computed_tokens",
    "vllm.v1.worker.utils:AttentionGroup": "backend layer_names kv_cache_spec",
}
"""Fields of dataclasses."""


def found(path: str) -> type:
    module, name = path.split(":")
    return getattr(import_module(module), name)


def imported() -> set[tuple[str, str]]:
    """Every name of vLLM that a file of this engine imports anywhere: in functions and for type checking too."""
    return {
        (node.module, alias.name)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def test_every_name_that_is_imported_of_vllm_exists():
    names = imported()
    assert len(names) > 50
    missing = [
        f"{module}.{name}" for module, name in sorted(names) if not hasattr(import_module(module), name)
    ]
    assert not missing


@pytest.mark.parametrize("path", METHODS)
def test_methods_that_are_overridden_or_called_have_the_parameters_they_are_used_with(path):
    for method, used in METHODS[path].items():
        parameters = inspect.signature(getattr(found(path), method)).parameters
        assert set(used) <= set(parameters), method


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_attributes_that_are_read_are_set_by_vllms_objects(path):
    source = "".join(
        inspect.getsource(cls) for cls in found(path).__mro__ if cls.__module__.startswith("vllm")
    )
    absent = [name for name in ATTRIBUTES[path].split() if f"self.{name}" not in source]
    assert not absent


@pytest.mark.parametrize("path", FIELDS)
def test_fields_that_are_read_are_those_of_vllms_records(path):
    assert set(FIELDS[path].split()) <= set(found(path).__dataclass_fields__)


def test_the_choice_of_a_backend_that_vllm_remembers_can_be_forgotten():
    assert callable(import_module("vllm.v1.attention.selector")._cached_get_attn_backend.cache_clear)


def test_neither_runner_has_a_method_that_a_mixin_would_replace_unknowingly():
    from mpic.engine.vllm.plugin.runner import LinkRunner
    from mpic.engine.vllm.plugin.runner_v1 import LinkRunnerV1
    from mpic.engine.vllm.plugin.runner_v2 import LinkRunnerV2

    for path, mixin in ((V1, LinkRunnerV1), (V2, LinkRunnerV2)):
        ours = {name for cls in (mixin, LinkRunner) for name in vars(cls) if not name.startswith("__")}
        assert ours & set(dir(found(path))) <= METHODS[path].keys()
