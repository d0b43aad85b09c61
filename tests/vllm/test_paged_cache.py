"""Chunks into and out of a GPU's paged cache, with a kernel that addresses memory as CUDA's does."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from paged_kit import BLOCK, LAYERS, TOKENS, chunk, paged
from torch import nn

from mpic.engine.vllm.plugin import selftest
from mpic.engine.vllm.plugin.key_rotation import KeyRotation
from mpic.engine.vllm.plugin.kv_import import PagedWrite
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.placement import Placement, TransferBuffers
from mpic.engine.vllm.plugin.selftest import self_test
from mpic.engine.vllm.plugin.transfers import TransferSizes
from mpic.errors import ModelRefused
from mpic.kernels.attention import rotate


def place(cache: PagedCache, rotation: KeyRotation, writes: list[PagedWrite], size: int = 1 << 20) -> None:
    Placement(cache, rotation, writes, TransferBuffers(cache.device, sizes=TransferSizes(size))).finish()


def rotated(rotary, keys: torch.Tensor, first: int) -> torch.Tensor:
    """Rotate ``keys [layers, heads, n, width]`` to the positions from ``first`` on with vLLM's own rotary module."""
    layers, heads, n, width = keys.shape
    rows = keys.permute(2, 0, 1, 3).reshape(n, -1)
    positions = torch.arange(first, first + n)
    query, _ = rotary.forward_native(positions, rows.clone(), rows.clone())
    return query.view(n, layers, heads, width).permute(1, 2, 0, 3)


@pytest.mark.parametrize("mapped", [False, True], ids=["in host memory", "mapped from its file"])
@pytest.mark.parametrize("tokens", [slice(0, TOKENS), slice(7, 30), torch.tensor([0, 3, 4, 20, 40])], ids=str)
def test_a_placed_chunk_is_read_back_with_its_keys_at_their_new_positions(rotation, rotary, tokens, mapped):
    raw, cache, base = chunk(1), paged(), 100
    kv = raw.clone()
    kv[:, 0] = rotated(rotary, raw[:, 0], 0)
    indices = torch.arange(TOKENS)[tokens]
    blocks = torch.tensor([5, 2, 7])
    write = PagedWrite(list(kv) if mapped else kv, tokens, len(indices), base, cache.slots(blocks, indices))
    place(cache, rotation, [write])
    found = cache.read(blocks, 0, TOKENS)
    torch.testing.assert_close(found[:, 0][:, :, indices], rotated(rotary, raw[:, 0], base)[:, :, indices])
    torch.testing.assert_close(found[:, 1][:, :, indices], raw[:, 1][:, :, indices])
    rest = torch.ones(TOKENS, dtype=torch.bool)
    rest[indices] = False
    assert found[..., rest, :].isnan().all(), "a slot that no token was given stays as it was"


def test_writes_of_several_requests_are_placed_each_with_its_own_rotation(rotation, rotary):
    cache, first, second = paged(), chunk(1), chunk(2, 20)
    blocks = torch.tensor([1, 3, 4]), torch.tensor([6, 5])
    writes = [
        PagedWrite(kv, slice(0, n), n, base, cache.slots(own, torch.arange(n)))
        for kv, n, base, own in ((first, TOKENS, 0, blocks[0]), (second, 20, 9, blocks[1]))
    ]
    place(cache, rotation, writes)
    torch.testing.assert_close(cache.read(blocks[0], 0, TOKENS), first)
    torch.testing.assert_close(cache.read(blocks[1], 0, 20)[:, 1], second[:, 1])
    moved = rotate(second[:, 0], rotation.by(9))
    torch.testing.assert_close(cache.read(blocks[1], 0, 20)[:, 0], moved)


def test_a_worker_of_several_holds_its_own_heads(rotation):
    whole, cache = chunk(3), paged(tensor_rank=1, workers=2)
    assert cache.heads == range(2, 4) and cache.rank == (1, 0)
    mine = whole[:, :, cache.heads.start : cache.heads.stop]
    blocks = torch.tensor([2, 1, 3])
    slots = cache.slots(blocks, torch.arange(TOKENS))
    place(cache, rotation, [PagedWrite(mine, slice(0, TOKENS), TOKENS, 0, slots)])
    torch.testing.assert_close(cache.read(blocks, 0, TOKENS), mine)


def test_the_kernel_of_these_tests_sees_a_transposed_view(rotation):
    """The kernel's arguments must be contiguous within a token: with a view, every head but the first is wrong."""
    cache, kv = paged(), chunk(5)
    attention = cache.attention[0]
    slots = torch.arange(TOKENS) + BLOCK
    views = (part.transpose(0, 1) for part in kv[0])
    attention.impl.do_kv_cache_update(attention, *views, attention.kv_cache, slots)
    found = cache.read(torch.tensor([1, 2, 3]), 0, TOKENS)[0]
    assert not torch.equal(found[:, 1:], kv[0][:, 1:])


@pytest.fixture
def runner(rotation, rotary):
    """The parts of a model runner that the self-test uses, on the fake GPU."""

    def metadata(owners, queries, ends, blocks, slots, positions):
        return SimpleNamespace(blocks=blocks[0].long(), end=int(ends[0]))

    parts = {"language_model": nn.ModuleList([rotary]), "attention_metadata": metadata}
    cpu = torch.device("cpu")
    return SimpleNamespace(
        paged=paged(),
        rotation=rotation,
        device=cpu,
        staging=TransferBuffers(cpu, sizes=TransferSizes(1 << 20)),
        **parts,
    )


def test_an_engine_whose_cache_path_is_right_passes_its_self_test_and_starts_empty(runner):
    self_test(runner)
    assert all(not layer.kv_cache.any() for layer in runner.paged.attention)


def test_the_self_test_leaves_the_models_rotary_table_as_it_is(runner, rotary):
    """A model in half precision was compiled for the table in its dtype, and reads it without a check."""
    half = copy.deepcopy(rotary).bfloat16()
    runner.language_model, table = nn.ModuleList([half]), half.cos_sin_cache
    keys = chunk(1)[:, 0]
    moved = [selftest._rotated(runner, keys, first) for first in (0, 37)]
    assert half.cos_sin_cache is table and table.dtype == torch.bfloat16
    assert not torch.equal(*moved)


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 0.08), (torch.float16, 0.01)])
def test_large_values_may_be_rounded_as_their_dtype_rounds_them_and_no_further(dtype, off):
    values = torch.linspace(-5.5, 5.5, 1000)
    selftest._compare(values + off, values, dtype, "rounded")
    with pytest.raises(ModelRefused, match="misplaced"):
        selftest._compare(values + 2 * off, values, dtype, "misplaced")
    with pytest.raises(ModelRefused, match="misplaced"):
        selftest._compare(0.1 * values + off, 0.1 * values, dtype, "misplaced")


def in_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Cut float32 numbers to the bits that a GPU multiplies in TF32."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_a_gpu_that_attends_in_tf32_passes_the_self_test_and_one_that_misses_a_token_does_not(runner):
    def attend(end: int):
        def forward(layer, query, key, value, kv_cache, metadata, output):
            metadata = SimpleNamespace(blocks=metadata.blocks, end=end)
            rest = (in_tf32(key), in_tf32(value), in_tf32(kv_cache), metadata, output)
            plain(layer, in_tf32(query), *rest)

        return forward

    plain, tokens = runner.paged.attention[0].impl.forward, 2 * BLOCK + 3
    for attention in runner.paged.attention:
        attention.impl.forward = attend(tokens)
    self_test(runner)
    runner.paged.attention[-1].impl.forward = attend(tokens - 1)
    with pytest.raises(ModelRefused, match="backend does not see"):
        self_test(runner)


def test_what_is_read_back_on_a_gpu_must_be_exact_in_float32(runner, monkeypatch):
    write = runner.paged.write
    rounded = lambda layer, keys, values, slots: write(layer, keys, in_tf32(values), slots)
    monkeypatch.setattr(runner.paged, "write", rounded)
    with pytest.raises(ModelRefused, match="come back from the paged cache changed"):
        self_test(runner)


def test_an_engine_whose_kernel_gets_strided_views_is_refused(runner, monkeypatch):
    def strided(layer, keys, values, slots):
        attention = runner.paged.attention[layer]
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    monkeypatch.setattr(runner.paged, "write", strided)
    with pytest.raises(ModelRefused, match="come back from the paged cache changed"):
        self_test(runner)


def test_an_engine_that_turns_keys_the_wrong_way_is_refused(runner):
    rotation = runner.rotation
    runner.rotation = SimpleNamespace(by=lambda delta: rotation.by(-delta))
    with pytest.raises(ModelRefused, match="not what vLLM's rotary gives"):
        self_test(runner)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_engine_whose_backend_reads_another_layout_is_refused(runner, layer):
    attention = runner.paged.attention[layer]
    forward = attention.impl.forward

    def swapped(layer, query, key, value, kv_cache, metadata, output):
        values, keys = kv_cache.chunk(2, -1)
        forward(layer, query, key, value, torch.cat([keys, values], -1), metadata, output)

    attention.impl.forward = swapped
    with pytest.raises(ModelRefused, match="backend does not see"):
        self_test(runner)
