"""The file of an adapter, the model that it belongs to, and the recipe of chunks that are compiled inside it."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_kit import adapter, family
from families import make_model

from mpic.config import EngineConfig, load_config
from mpic.engine import load_engine
from mpic.errors import AdapterRefused, NoAdapter
from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.model.identity import weights_digest
from mpic.packet.adapter import PLACE, Adapter, find_adapter, load_adapter


@pytest.fixture
def saved(tmp_path):
    """A folder with the tiny llama's adapter beside where the model would be."""
    adapter().save(tmp_path / PLACE)
    return tmp_path


def test_an_adapter_comes_back_as_it_was_from_beside_the_model_or_from_its_file(saved):
    model = family("llama").loaded
    for found in (find_adapter(model, str(saved)), find_adapter(model, "elsewhere", str(saved / PLACE))):
        assert torch.equal(found.header, adapter().header) and torch.equal(found.trailer, adapter().trailer)
        assert (found.digest, found.model, len(found)) == (adapter().digest, adapter().model, 8)
    assert find_adapter(model, "elsewhere") is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw[:-3] + b"\0\0\0", "damaged: its SHA-256"),
        (lambda raw: raw[:40], "cannot be read"),
        (lambda raw: b"", "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(saved, change, says):
    path = saved / PLACE
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(AdapterRefused, match=says):
        find_adapter(family("llama").loaded, str(saved))


def test_an_adapter_of_other_weights_of_another_width_or_that_is_not_there_is_refused(saved, tmp_path):
    other, _ = make_model("llama", seed=1)
    with pytest.raises(AdapterRefused, match=r"other weights.*mpic train packet"):
        load_adapter(saved / PLACE, weights_digest(other), 64)
    with pytest.raises(AdapterRefused, match=r"the model takes \[any, 32\]"):
        load_adapter(saved / PLACE, adapter().model, 32)
    Adapter(torch.zeros(0, 64), torch.zeros(0, 64), adapter().model).save(tmp_path / "empty.safetensors")
    with pytest.raises(AdapterRefused, match="has no tokens"):
        load_adapter(tmp_path / "empty.safetensors", adapter().model, 64)
    with pytest.raises(AdapterRefused, match="there is no adapter"):
        find_adapter(family("llama").loaded, str(saved), str(tmp_path / "none.safetensors"))


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_the_digest_of_weights_is_the_same_in_every_dtype_and_another_for_other_weights(name):
    stock, _ = make_model(name)
    stock = stock.to(torch.bfloat16)  # the checkpoint's own
    loaded = copy.deepcopy(stock).float()
    assert weights_digest(stock) == weights_digest(loaded)
    next(loaded.parameters()).data.view(-1)[0] += 1
    assert weights_digest(stock) != weights_digest(loaded)


def test_what_was_compiled_before_there_were_adapters_keeps_its_address():
    recipe = Recipe("float32", "raw", 4, "abc")
    key = KVKey("ann", ChunkKey("text", "00" * 32), "a1" * 32, recipe)
    assert recipe.digest == "0507066ce7641a4d8b66b51acea67fdc159529be3eb392537ebf9899a1505358"
    assert key.digest == "202a77beaf5b8c3c37c2d327aaa436b73cf455f3113f35a65a7252353067b62f"
    assert recipe.fields() == {"dtype": "float32", "codec": "raw", "sink": 4, "preprocessing": "abc"}
    packet = Recipe("float32", "raw", 0, "abc", adapter().digest)
    assert packet.digest != Recipe("float32", "raw", 0, "abc").digest
    assert Recipe(**packet.fields()) == packet


def test_two_adapters_differ_in_their_digest_also_where_only_the_cut_differs():
    soft = torch.cat([adapter().header, adapter().trailer])
    digests = {Adapter(soft[:n], soft[n:], adapter().model).digest for n in range(len(soft) + 1)}
    assert len(digests) == 9


def test_a_server_whose_policy_needs_packets_does_not_start_without_an_adapter(tiny_model):
    with pytest.raises(NoAdapter, match=r"there is no packet/adapter\.safetensors beside it"):
        load_engine(EngineConfig(model=tiny_model, policy="packet-16", pool_bytes=1 << 24))
    with pytest.raises(AdapterRefused, match="there is no adapter"):
        load_engine(EngineConfig(model=tiny_model, packet="none.safetensors", pool_bytes=1 << 24))


def test_either_engine_may_be_configured_with_packets():
    for engine in ("native", "vllm"):
        found = load_config(None, {"engine": engine, "policy": "packet-4", "packet": "adapter.safetensors"})
        assert (found.engine.policy, found.engine.packet) == ("packet-4", "adapter.safetensors")
