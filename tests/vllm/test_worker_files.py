"""Workers in other processes than the scheduler's: they verify what they read from chunk files themselves."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from paged_kit import HEADS, LAYERS, TOKENS, WIDTH, chunk, paged

from mpic.engine.vllm.plugin.host_memory import CachedFile
from mpic.engine.vllm.plugin.runner import LinkRunner
from mpic.engine.vllm.plugin.step_messages import LinkStart, PlacedChunk, StepInstructions, StepReport
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, Recipe
from mpic.kv.file import ChunkFile, write

LAYER = 2 * HEADS * TOKENS * WIDTH * 4  # bytes


def saved(path, number: int) -> CachedFile:
    """Write a chunk and return it as a worker in another process receives it."""
    key = KVKey("local", ChunkKey.of_text(str(number)), "model", Recipe("float32"))
    inputs = ChunkInputs(torch.arange(TOKENS), torch.arange(TOKENS)[None], TOKENS)
    write(path, ChunkKV(key, inputs, chunk(number)))
    found = CachedFile(path.name, key.digest, TOKENS)
    found.file, found.state = str(path), "ready"
    return pickle.loads(pickle.dumps(found))


def flip(path, layer: int, offset: int) -> None:
    file = ChunkFile(path)
    first = file._data
    file.close()
    with path.open("r+b") as written:
        written.seek(first + layer * LAYER + offset)
        byte = written.read(1)[0]
        written.seek(-1, 1)
        written.write(bytes([byte ^ 1]))


def start(one: CachedFile) -> LinkStart:
    return LinkStart(TOKENS + 1, 0, ((TOKENS, TOKENS + 1),), (PlacedChunk(one, 0, TOKENS, 0),))


@pytest.fixture
def runner():
    """The second of two tensor-parallel workers."""
    runner = LinkRunner()
    runner.paged, runner._links, runner.report = paged(tensor_rank=1, workers=2), {}, StepReport()
    return runner


def begin(runner, **links: CachedFile) -> None:
    made = StepInstructions(links={name: start(one) for name, one in links.items()})
    runner.begin_links(
        SimpleNamespace(finished_req_ids=set(), preempted_req_ids=None, kv_connector_metadata=made)
    )


def test_a_worker_maps_its_own_heads_of_a_sound_file(runner, tmp_path):
    begin(runner, sound=saved(tmp_path / "1.kv", 1))
    (kv,) = runner._links["sound"]._kv.values()
    assert torch.equal(torch.stack(list(kv)), chunk(1)[:, :, HEADS // 2 :]) and not runner.report.faults


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("offset", [0, LAYER - 1], ids=["another worker's head", "its own head"])
def test_one_flipped_byte_ends_its_own_request_and_no_other(runner, tmp_path, layer, offset):
    damaged, sound = saved(tmp_path / "1.kv", 1), saved(tmp_path / "2.kv", 2)
    flip(tmp_path / "1.kv", layer, offset)
    begin(runner, damaged=damaged, sound=sound)
    assert {name: fault.code for name, fault in runner.report.faults.items()} == {"damaged": "corrupt"}
    assert f"layer {layer}" in runner.report.faults["damaged"].message
    assert list(runner._links) == ["sound"]


def test_a_pipeline_stage_verifies_its_own_layers_alone(tmp_path):
    one = saved(tmp_path / "1.kv", 1)
    flip(tmp_path / "1.kv", 0, 0)
    (last,) = one.slice_kv(range(LAYERS - 1, LAYERS), range(HEADS))
    assert torch.equal(last, chunk(1)[-1])


@pytest.mark.parametrize("change", ["cut off", "another chunk", "gone"])
def test_a_file_that_is_another_by_now_ends_its_request(runner, tmp_path, change):
    one, path = saved(tmp_path / "1.kv", 1), tmp_path / "1.kv"
    if change == "cut off":
        path.write_bytes(path.read_bytes()[: 4096 + LAYER])
    elif change == "gone":
        path.unlink()
    else:
        saved(path.with_name("2.kv"), 2)
        path.with_name("2.kv").replace(path)
    begin(runner, one=one)
    assert runner.report.faults["one"].code == ("missing" if change == "gone" else "corrupt")
    assert not runner._links
