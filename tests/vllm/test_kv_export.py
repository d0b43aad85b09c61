"""Compiled chunks out of a device that computes later than it is told to: no step waits, and no block is given back too
early."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine_kit import until
from paged_kit import BLOCK, LAYERS, TOKENS, chunk, paged
from safetensors.torch import load_file
from slow_device import LateDevice
from threads_kit import started
from torch import nn

from mpic.engine.vllm.plugin import kv_export
from mpic.engine.vllm.plugin.kv_export import KVExporter
from mpic.engine.vllm.plugin.prompt_snapshot import snapshot
from mpic.engine.vllm.plugin.runner import PromptInputs
from mpic.engine.vllm.plugin.step_messages import ChunkExport, StepReport
from mpic.engine.vllm.wire import DISK_FULL, NO_MEMORY, NOT_WRITTEN, part_name

WAIT = 60.0
BLOCKS = (5, 2, 7)
WIDTH = 8


TEXT = PromptInputs(None, (), {})


def runner_with(cache, prompt: PromptInputs = TEXT, stages: int = 1):
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=stages)
    model = SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=WIDTH))
    return SimpleNamespace(
        paged=cache,
        report=StepReport(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        vllm_config=SimpleNamespace(parallel_config=parallel, model_config=model),
        prompt_inputs=lambda request: prompt,
        language_model=SimpleNamespace(embed_input_ids=nn.Embedding(100, WIDTH).requires_grad_(False)),
    )


def fill(cache, kv: torch.Tensor) -> None:
    """Has a step's KV written into the blocks of a prompt."""
    slots = cache.slots(torch.tensor(BLOCKS), torch.arange(kv.shape[3]))
    for layer, (keys, values) in enumerate(kv):
        cache.write(layer, keys.transpose(0, 1), values.transpose(0, 1), slots)


@pytest.fixture
def device():
    device = LateDevice()
    yield device
    device.computed.set()


@pytest.fixture
def exporter(device):
    exporter = KVExporter(device)
    yield exporter
    device.computed.set()
    exporter.close()


@pytest.fixture
def order(tmp_path) -> ChunkExport:
    return ChunkExport(str(tmp_path), 2, list(range(10, 10 + TOKENS)), BLOCKS)


def exported(tmp_path) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / f"{part_name(0, 0)}.safetensors")


def test_a_step_goes_on_while_its_chunk_is_not_computed_yet(exporter, device, order, tmp_path):
    cache, kv = paged(), chunk(1)
    exporter.export(runner_with(cache), "a", order)
    assert exporter.released({"a"}) == set() and not any(tmp_path.iterdir())
    fill(cache, kv)  # the device gets to it later than the step that gave it the work
    device.computed.set()
    exporter.close()
    assert torch.equal(exported(tmp_path)["kv"], kv[:, :, :, order.skip :])
    assert exported(tmp_path)["token_ids"].tolist() == order.token_ids[order.skip :]
    assert device.readers and threading.current_thread().name not in device.readers


def test_blocks_are_released_once_when_they_are_read_and_their_request_has_ended(exporter, device, order):
    exporter.export(runner_with(paged()), "a", order)
    device.computed.set()
    exporter.close()
    assert exporter.released(set()) == set(), "the scheduler does not expect a request that goes on"
    assert exporter.released({"a", "another"}) == {"a"}
    assert exporter.released({"a"}) == set()


def test_an_export_that_cannot_begin_ends_its_request_and_releases_its_blocks(exporter, order):
    runner = runner_with(paged())
    runner.prompt_inputs = lambda request: {}[request]
    exporter.export(runner, "a", order)
    assert (
        runner.report.faults["a"].code == "compile_failed" and "KeyError" in runner.report.faults["a"].message
    )
    assert exporter.released({"a"}) == {"a"}


def test_a_device_that_cannot_be_read_at_all_ends_the_request_and_not_the_engine(order, monkeypatch):
    """The first export makes what reads the device."""
    monkeypatch.setattr(kv_export, "readback_for", Mock(side_effect=RuntimeError("no stream is left")))
    exporter, runner = KVExporter(), runner_with(paged())
    exporter.export(runner, "a", order)
    assert "no stream is left" in runner.report.faults["a"].message
    assert exporter.released({"a"}) == {"a"}
    exporter.close()


def test_an_export_that_cannot_begin_without_memory_says_so(exporter, order):
    """Whoever asked for it may try again."""
    runner = runner_with(paged())
    runner.prompt_inputs = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    exporter.export(runner, "a", order)
    assert runner.report.faults["a"].code == "out_of_memory"


def test_an_export_without_a_thread_to_read_it_ends_its_request_and_releases_its_blocks(exporter, order):
    """Its thread has been stopped, or the system gives no other one."""
    exporter.close()
    runner = runner_with(paged())
    exporter.export(runner, "a", order)
    assert runner.report.faults["a"].code == "compile_failed"
    assert exporter.released({"a"}) == {"a"}


@pytest.mark.parametrize(
    "error, name",
    [
        (RuntimeError("the device is lost"), NOT_WRITTEN),
        (OSError(28, "full"), DISK_FULL),
        (MemoryError(), NO_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), NO_MEMORY),
    ],
)
def test_an_export_that_fails_later_tells_the_frontend_and_releases_its_blocks(
    exporter, device, order, tmp_path, error, name
):
    device.error = error
    exporter.export(runner_with(paged()), "a", order)
    device.computed.set()
    exporter.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{part_name(0, 0)}{name}"]
    assert exporter.released({"a"}) == {"a"}


def test_with_several_pipeline_stages_a_step_waits_until_the_blocks_are_read(exporter, device, order):
    """Its scheduler may already have given them away in a step that follows."""
    exporting = started(exporter.export, runner_with(paged(), stages=2), "a", order)
    exporting.join(0.05)
    assert exporting.is_alive()
    device.computed.set()
    exporting.join(WAIT)
    assert not exporting.is_alive() and exporter.released({"a"}) == {"a"}


@pytest.fixture
def slow_disk(monkeypatch):
    """Files are written when the event is set."""
    answers, save = threading.Event(), kv_export.save_file

    def waiting(*told):
        assert answers.wait(WAIT)
        save(*told)

    monkeypatch.setattr(kv_export, "save_file", waiting)
    yield answers
    answers.set()


def order_in(folder) -> ChunkExport:
    folder.mkdir()
    return ChunkExport(str(folder), 0, list(range(10, 10 + TOKENS)), BLOCKS)


def test_with_several_pipeline_stages_a_step_does_not_wait_for_the_disk(
    exporter, device, slow_disk, tmp_path
):
    device.computed.set()
    runner = runner_with(paged(), stages=2)
    orders = {name: order_in(tmp_path / name) for name in "abc"}

    def steps() -> None:
        for name, order in orders.items():
            exporter.export(runner, name, order)

    stepping = started(steps, daemon=True)
    stepping.join(WAIT / 10)
    assert not stepping.is_alive(), "a step waits for a file of an earlier chunk"
    assert exporter.released(set("abc")) == set("abc") and not any(tmp_path.glob("*/*.safetensors"))
    slow_disk.set()
    exporter.close()
    assert all((tmp_path / name / f"{part_name(0, 0)}.safetensors").exists() for name in orders)


def test_a_slow_disk_makes_the_next_prompt_keep_its_blocks_so_that_no_kv_piles_up(
    exporter, device, slow_disk, tmp_path
):
    device.computed.set()
    for name in "ab":
        exporter.export(runner_with(paged()), name, order_in(tmp_path / name))
    until(lambda: exporter.released({"a", "b"}) == {"a"})
    assert exporter.released(set()) == set()
    slow_disk.set()
    exporter.close()
    assert exporter.released(set()) == {"b"}


def test_a_worker_that_is_not_the_first_exports_kv_alone(exporter, device, order, tmp_path):
    cache, kv = paged(tensor_rank=1, workers=2), chunk(3, heads=2)
    fill(cache, kv)
    device.computed.set()
    exporter.export(runner_with(cache), "a", order)
    exporter.close()
    found = load_file(tmp_path / f"{part_name(1, 0)}.safetensors")
    assert set(found) == {"kv"} and torch.equal(found["kv"], kv[:, :, :, order.skip :])


@pytest.mark.parametrize("deepstack", [0, 2])
def test_what_later_requests_overwrite_is_taken_in_the_step(order, deepstack):
    """Rows of images come from the encoder, the others from the embedding table; positions from the batch's state."""
    positions = torch.arange(TOKENS).expand(3, -1) + torch.arange(3)[:, None]
    mine = positions.clone()
    image = torch.randn(4, WIDTH * (1 + deepstack))
    place = SimpleNamespace(offset=10, length=6, is_embed=torch.tensor([0, 1, 1, 1, 1, 0], dtype=torch.bool))
    encoded = {"image": image}
    prompt = PromptInputs(mine, [SimpleNamespace(identifier="image", mm_position=place)], encoded)
    runner = runner_with(paged(), prompt)
    taken = snapshot(runner, "a", order)
    mine.zero_()
    encoded.clear()
    inputs = taken.inputs(lambda tensor: tensor)
    assert torch.equal(inputs.positions, positions[:, order.skip :] - order.skip)
    assert inputs.rotary_length == int(positions.max()) - order.skip + 1
    rows = torch.arange(11, 15) - order.skip
    assert torch.equal(inputs.embeds[rows], image[:, :WIDTH])
    words = torch.ones(TOKENS - order.skip, dtype=torch.bool)
    words[rows] = False
    table = runner.language_model.embed_input_ids
    assert torch.equal(inputs.embeds[words], table(inputs.token_ids[words]))
    if deepstack:
        assert inputs.deepstack.shape == (deepstack, TOKENS - order.skip, WIDTH)
        assert torch.equal(inputs.deepstack[:, rows].transpose(0, 1).flatten(1), image[:, WIDTH:])
        assert not inputs.deepstack[:, words].any()
    else:
        assert inputs.deepstack is None


def test_kv_read_layer_by_layer_is_that_of_the_whole():
    cache, kv = paged(), chunk(4)
    fill(cache, kv)
    blocks = torch.tensor(BLOCKS)
    layers = [cache.read_layer(number, blocks, 3, BLOCK + 5) for number in range(LAYERS)]
    assert torch.equal(torch.stack(layers), kv[:, :, :, 3 : BLOCK + 5])
    assert torch.equal(cache.read(blocks, 3, BLOCK + 5), kv[:, :, :, 3 : BLOCK + 5])
