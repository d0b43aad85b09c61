"""Chunks that cross to a GPU while the forward computes: a layer attends over what was placed in it, however late its
copies are and however small the memory that they go through. The device is a thread that copies late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from paged_kit import HEADS, LAYERS, TOKENS, WIDTH, chunk, paged
from slow_device import SlowDevice

from mpic.engine.vllm.plugin.connector import MPICConnector
from mpic.engine.vllm.plugin.kv_import import PagedWrite
from mpic.engine.vllm.plugin.placement import Placement, Staging, transfers
from mpic.engine.vllm.plugin.runner import LinkRunner
from mpic.engine.vllm.plugin.step_messages import StepReport
from mpic.kernels.attention import rotate

TOKEN = 2 * HEADS * WIDTH * 4  # bytes in a layer
SIZES = [TOKEN, 5 * TOKEN, TOKENS * TOKEN, 2 * TOKENS * TOKEN, 1 << 20]
BASE = 9


class Ordered(SlowDevice):
    """Notes what the computing stream was given, and refuses a copy that is not ordered behind all of it: a buffer
    could still be read."""

    computed = ordered = 0

    def order(self) -> None:
        self.ordered = self.computed

    def start(self, target, source):
        assert self.ordered == self.computed, "a buffer is filled before what reads it"
        return super().start(target, source)


@pytest.fixture
def device():
    device = Ordered(delays=(0.0, 0.002))
    yield device
    device.go.set()
    device.close()


def cache_on(device) -> object:
    cache = paged()
    write = cache.write

    def noted(*told):
        device.computed += 1
        write(*told)

    cache.write = noted
    return cache


BLOCKS = [torch.tensor([1, 3, 4]), torch.tensor([6, 5, 2])]


def writes_of(cache) -> tuple[list[PagedWrite], list[torch.Tensor]]:
    """A whole chunk at the start of one request, and tokens of another further on in a second, mapped from its file."""
    first, second = chunk(1), chunk(2)
    some = torch.tensor([0, 2, 3, 7, 30, 40])
    return [
        PagedWrite(first, slice(0, TOKENS), TOKENS, 0, cache.slots(BLOCKS[0], torch.arange(TOKENS))),
        PagedWrite(list(second), some, len(some), BASE, cache.slots(BLOCKS[1], some)),
    ], [first, second]


def expected_of(kvs, rotation) -> list[torch.Tensor]:
    first, second = (kv.clone() for kv in kvs)
    second[:, 0] = rotate(second[:, 0], rotation.by(BASE))
    return [first, second[:, :, :, [0, 2, 3, 7, 30, 40]]]


def found_in(cache, layer) -> list[torch.Tensor]:
    whole = [cache.read(blocks, 0, TOKENS)[layer] for blocks in BLOCKS]
    return [whole[0], whole[1][:, :, [0, 2, 3, 7, 30, 40]]]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size / TOKEN:g} tokens")
def test_every_layer_has_its_keys_and_values_when_it_attends(size, device, rotation):
    cache = cache_on(device)
    writes, kvs = writes_of(cache)
    placement = Placement(cache, rotation, writes, Staging(cache.device, device, size))
    expected = expected_of(kvs, rotation)
    for layer in range(LAYERS):
        placement.layer(layer)
        for found, wanted in zip(found_in(cache, layer), expected, strict=True):
            torch.testing.assert_close(found, wanted[layer])
    assert placement.done


def test_without_waiting_for_its_copies_a_layer_would_be_wrong(device, rotation, monkeypatch):
    cache = cache_on(device)
    writes, kvs = writes_of(cache)
    device.go.clear()
    monkeypatch.setattr(device, "follow", lambda mark: None)
    placement = Placement(cache, rotation, writes, Staging(cache.device, device, SIZES[3]))
    placement.layer(0)
    assert not torch.equal(found_in(cache, 0)[0], kvs[0][0])


def test_a_layer_waits_for_its_own_transfers_and_for_no_later_one(device, rotation):
    cache = cache_on(device)
    writes, _ = writes_of(cache)
    followed = []
    follow = device.follow
    device.follow = lambda mark: followed.append(mark) or follow(mark)
    placement = Placement(cache, rotation, writes, Staging(cache.device, device, TOKENS * TOKEN))
    counts = []
    for layer in range(LAYERS):
        placement.layer(layer)
        counts.append(len(followed))
    assert counts == [2, 3, 4], "the first chunk a layer at a time, the small one at once"


def test_the_buffers_are_used_again_by_the_next_step_behind_what_reads_them(device, rotation):
    cache, staging = cache_on(device), Staging(torch.device("cpu"), device, TOKENS * TOKEN)
    writes, kvs = writes_of(cache)
    left = Placement(cache, rotation, writes, staging)
    left.layer(0)  # its step has failed, and nobody asks for the other layers
    Placement(cache, rotation, writes, staging).finish()
    expected = expected_of(kvs, rotation)
    for layer in range(LAYERS):
        for found, wanted in zip(found_in(cache, layer), expected, strict=True):
            torch.testing.assert_close(found, wanted[layer])
    assert staging.buffers is staging.buffers and len(staging.buffers) == 2


def test_transfers_are_bounded_and_those_of_the_first_layers_come_first(rotation):
    cache = paged()
    writes, _ = writes_of(cache)
    layer = TOKENS * TOKEN
    found = transfers(writes, 2 * layer, layer)
    assert [(len(t.layers), t.layers.start) for t in found if t.write is writes[0]] == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [t.layers for t in found if t.write is writes[1]] == [range(0, 3)]
    found = transfers(writes, 2 * layer, 2 * layer)
    assert [t.layers for t in found if t.write is writes[0]] == [range(0, 2), range(2, 3)]
    assert [t.layers.start for t in found] == sorted(t.layers.start for t in found)
    parts = [
        t.tokens for t in transfers(writes, 20 * TOKEN, 1) if t.write is writes[0] and t.layers.start == 1
    ]
    assert parts == [range(0, 20), range(20, 40), range(40, 41)]
    with pytest.raises(ValueError, match="a token takes"):
        transfers(writes, TOKEN - 1, 1)


# ---- in a step of the runner


@pytest.fixture
def runner(device, rotation):
    cache = cache_on(device)
    runner = LinkRunner()
    runner.paged, runner.rotation, runner.report = cache, rotation, StepReport()
    runner.staging = Staging(cache.device, device, TOKENS * TOKEN)
    runner._links = {name: SimpleNamespace(seconds=0.0) for name in ("a", "b")}
    runner.writes, runner.kvs = writes_of(cache)
    return runner


def begin(runner) -> None:
    runner._place(list(zip("ab", runner.writes, strict=True)))


def test_the_connector_has_the_runner_place_each_layer_that_is_about_to_attend(runner, rotation):
    connector = MPICConnector.__new__(MPICConnector)
    connector._place_layer = None
    connector.wait_for_layer_load("model.layers.0.self_attn.attn")  # before there is a runner
    connector.attach(runner)
    begin(runner)
    expected = expected_of(runner.kvs, rotation)
    for layer in range(LAYERS):
        connector.wait_for_layer_load(f"model.layers.{layer}.self_attn.attn")
        for found, wanted in zip(found_in(runner.paged, layer), expected, strict=True):
            torch.testing.assert_close(found, wanted[layer])
    runner.end_placing()
    assert not runner.report.faults and runner._placement is None


def test_an_error_during_the_forward_ends_the_requests_that_are_placed_and_not_the_engine(runner):
    begin(runner)
    runner.place_layer(0)
    runner.paged.write = lambda *told: 1 / 0
    runner.place_layer(1)
    runner.place_layer(2)
    runner.end_placing()
    assert {name: fault.code for name, fault in runner.report.faults.items()} == dict.fromkeys(
        "ab", "internal_error"
    )
    assert not runner._links


def test_a_forward_that_does_not_ask_for_all_layers_is_an_error_of_its_requests(runner):
    begin(runner)
    runner.place_layer(0)
    runner.end_placing()
    runner.end_placing()
    assert runner.report.faults.keys() == {"a", "b"} and runner._placement is None


def test_a_step_begins_with_nothing_of_the_last_one(runner):
    begin(runner)
    runner.begin_links(
        SimpleNamespace(finished_req_ids={"a", "b"}, preempted_req_ids=None, kv_connector_metadata=None)
    )
    runner.place_layer(2)
    runner.end_placing()
    assert not runner.report.faults and not runner._links
