"""Chunks that cross to a GPU while the forward computes: a layer attends over what was placed in it, however late its
copies are and however small the memory that they go through. The device is a thread that copies late."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from paged_kit import HEADS, LAYERS, TOKENS, WIDTH, chunk, paged
from slow_device import SlowDevice

from mpic.engine.vllm.plugin.connector import MPICConnector
from mpic.engine.vllm.plugin.kv_import import PagedWrite
from mpic.engine.vllm.plugin.placement import Placement, TransferBuffers
from mpic.engine.vllm.plugin.runner import LinkRunner
from mpic.engine.vllm.plugin.step_messages import StepReport
from mpic.engine.vllm.plugin.transfers import TransferSizes, transfers
from mpic.kernels.attention import rotate

TOKEN = 2 * HEADS * WIDTH * 4  # bytes in a layer
HEAD = WIDTH * 4  # bytes of a token in one head
SIZES = [TOKEN, 5 * TOKEN, TOKENS * TOKEN, 2 * TOKENS * TOKEN, 1 << 20]
BASE = 9


class Ordered(SlowDevice):
    """Notes what the computing stream was given, and refuses a copy that is not ordered behind all of it: a buffer
    could still be read. It also refuses what torch would not copy beside computing: memory that is not page-locked, and
    what is not contiguous."""

    computed = ordered = 0

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.page_locked = set()  # addresses
        self.copied = []  # of what was started, the bytes of each

    def lock(self, memory: torch.Tensor) -> torch.Tensor:
        self.page_locked.add(memory.untyped_storage().data_ptr())
        return memory

    def buffer(self, shape, dtype):
        return self.lock(super().buffer(shape, dtype))

    def order(self) -> None:
        self.ordered = self.computed

    def start_all(self, copies):
        assert self.ordered == self.computed, "a buffer is filled before what reads it"
        copies = list(copies)
        for target, source in copies:
            assert target.is_contiguous() and source.is_contiguous(), "torch would gather it on the host"
            assert source.untyped_storage().data_ptr() in self.page_locked, "the copy would be synchronous"
            self.copied.append(source.nbytes)
        return super().start_all(copies)


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
SOME = torch.tensor([0, 2, 3, 7, 30, 40])


def writes_of(cache, device) -> tuple[list[PagedWrite], list[torch.Tensor]]:
    """A whole chunk at the start of one request, and tokens of another further on in a second, mapped from its file."""
    first, second = device.lock(chunk(1)), chunk(2)
    return [
        PagedWrite(first, slice(0, TOKENS), TOKENS, 0, cache.slots(BLOCKS[0], torch.arange(TOKENS))),
        PagedWrite(list(second), SOME, len(SOME), BASE, cache.slots(BLOCKS[1], SOME)),
    ], [first, second]


def expected_of(kvs, rotation) -> list[torch.Tensor]:
    first, second = (kv.clone() for kv in kvs)
    second[:, 0] = rotate(second[:, 0], rotation.by(BASE))
    return [first, second[:, :, :, SOME]]


def found_in(cache, layer) -> list[torch.Tensor]:
    whole = [cache.read(blocks, 0, TOKENS)[layer] for blocks in BLOCKS]
    return [whole[0], whole[1][:, :, SOME]]


def staging_of(device, size: int, **sizes) -> TransferBuffers:
    return TransferBuffers(torch.device("cpu"), device, TransferSizes(size, **sizes))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size / TOKEN:g} tokens")
def test_every_layer_has_its_keys_and_values_when_it_attends(size, device, rotation):
    cache = cache_on(device)
    writes, kvs = writes_of(cache, device)
    placement = Placement(cache, rotation, writes, staging_of(device, size))
    expected = expected_of(kvs, rotation)
    for layer in range(LAYERS):
        placement.layer(layer)
        for found, wanted in zip(found_in(cache, layer), expected, strict=True):
            torch.testing.assert_close(found, wanted[layer])
    assert placement.done


def test_without_waiting_for_its_copies_a_layer_would_be_wrong(device, rotation, monkeypatch):
    cache = cache_on(device)
    writes, kvs = writes_of(cache, device)
    device.go.clear()
    monkeypatch.setattr(device, "follow", lambda mark: None)
    placement = Placement(cache, rotation, writes[:1], staging_of(device, SIZES[3]))
    placement.layer(0)
    assert not torch.equal(found_in(cache, 0)[0], kvs[0][0])


def test_a_layer_waits_for_its_own_transfers_and_for_no_later_one(device, rotation):
    cache = cache_on(device)
    writes, _ = writes_of(cache, device)
    followed = []
    follow = device.follow
    device.follow = lambda mark: followed.append(mark) or follow(mark)
    placement = Placement(cache, rotation, writes, staging_of(device, TOKENS * TOKEN, gap=10 * HEAD))
    counts = []
    for layer in range(LAYERS):
        placement.layer(layer)
        counts.append(len(followed))
    assert counts == [3, 4, 5], "the first chunk a layer at a time, two parts of the small one at once"


def test_the_buffers_are_used_again_by_the_next_step_behind_what_reads_them(device, rotation):
    cache, staging = cache_on(device), staging_of(device, TOKENS * TOKEN)
    writes, kvs = writes_of(cache, device)
    left = Placement(cache, rotation, writes, staging)
    left.layer(0)  # its step has failed, and nobody asks for the other layers
    Placement(cache, rotation, writes, staging).finish()
    expected = expected_of(kvs, rotation)
    for layer in range(LAYERS):
        for found, wanted in zip(found_in(cache, layer), expected, strict=True):
            torch.testing.assert_close(found, wanted[layer])
    assert staging.buffers is staging.buffers and len(staging.buffers) == 2


# ---- which bytes cross


def one(cache, kv, tokens) -> PagedWrite:
    picked = torch.arange(TOKENS)[tokens]
    return PagedWrite(kv, tokens, len(picked), BASE, cache.slots(BLOCKS[0], picked))


SELECTIONS = {
    "all": slice(0, TOKENS),
    "behind the first": slice(8, TOKENS),
    "in front of the last": slice(0, 30),
    "one": slice(17, 18),
    "all but some": torch.tensor([i for i in range(TOKENS) if i % 7]),
    "a few, far apart": SOME,
    "two": torch.tensor([3, 40]),
}


@pytest.mark.parametrize("mapped", [False, True], ids=["page-locked", "mapped"])
@pytest.mark.parametrize("gap", [0, 3, 12, TOKENS], ids=lambda gap: f"gap {gap}")
@pytest.mark.parametrize("tokens", SELECTIONS.values(), ids=SELECTIONS)
def test_whatever_tokens_are_linked_the_cache_has_those_and_no_others(tokens, gap, mapped, device, rotation):
    kv = chunk(3)
    wanted = kv.clone()
    wanted[:, 0] = rotate(kv[:, 0], rotation.by(BASE))
    others = torch.ones(TOKENS, dtype=torch.bool)
    others[tokens] = False
    for size in SIZES:
        cache = cache_on(device)
        write = one(cache, list(kv) if mapped else device.lock(kv), tokens)
        Placement(cache, rotation, [write], staging_of(device, size, least=TOKEN, gap=gap * HEAD)).finish()
        found = cache.read(BLOCKS[0], 0, TOKENS)
        torch.testing.assert_close(found[:, :, :, tokens], wanted[:, :, :, tokens])
        assert found[:, :, :, others].isnan().all()


@pytest.mark.parametrize("tokens", SELECTIONS.values(), ids=SELECTIONS)
def test_the_host_touches_no_byte_of_a_page_locked_chunk(tokens, device, rotation):
    """Every copy begins in the chunk's own memory: nothing else is page-locked here."""
    cache, kv = cache_on(device), device.lock(chunk(3))
    for gap in (0, 3, TOKENS):
        staging = staging_of(device, 20 * TOKEN, gap=gap * HEAD)
        Placement(cache, rotation, [one(cache, kv, tokens)], staging).finish()
    assert device.allocated == 0


def test_a_chunk_of_which_nearly_all_is_linked_crosses_in_one_copy_a_transfer(device, rotation):
    cache, kv = cache_on(device), device.lock(chunk(3))
    for tokens in (slice(8, TOKENS), torch.tensor([i for i in range(TOKENS) if i % 7])):
        staging = staging_of(device, 2 * TOKENS * TOKEN, gap=8 * HEAD)
        Placement(cache, rotation, [one(cache, kv, tokens)], staging).finish()
    assert device.copied == 2 * [2 * TOKENS * TOKEN, TOKENS * TOKEN]


def test_a_small_part_of_a_chunk_crosses_alone(device, rotation):
    cache, kv = cache_on(device), device.lock(chunk(3))
    staging = staging_of(device, 1 << 20, gap=8 * HEAD)
    Placement(cache, rotation, [one(cache, kv, slice(20, 25))], staging).finish()
    Placement(cache, rotation, [one(cache, kv, torch.tensor([0, 2, 40]))], staging).finish()
    heads = LAYERS * 2 * HEADS
    assert device.copied == heads * [5 * HEAD] + heads * [3 * HEAD] + heads * [HEAD]


def test_a_mapped_chunk_crosses_through_page_locked_memory_that_is_allocated_once(device, rotation):
    cache, kv = cache_on(device), chunk(3)
    staging = staging_of(device, TOKENS * TOKEN)
    for _ in range(3):
        Placement(cache, rotation, [one(cache, list(kv), slice(8, TOKENS))], staging).finish()
    assert device.allocated == 2 * TOKENS * TOKEN


def test_a_mapped_chunk_is_read_when_the_copies_of_a_step_that_failed_are_done(device, rotation, monkeypatch):
    cache, kv = cache_on(device), chunk(3)
    staging, write = staging_of(device, TOKENS * TOKEN), one(cache, list(kv), slice(0, TOKENS))

    def wait(mark):
        device.go.set()
        SlowDevice.wait(device, mark)

    monkeypatch.setattr(device, "wait", wait)
    device.go.clear()
    Placement(cache, rotation, [write], staging)  # its two copies have not happened, and nobody follows them
    assert device.done == 0
    Placement(cache, rotation, [write], staging)
    assert device.done >= 2


def test_a_mapped_chunk_that_is_read_before_the_last_copy_is_done_would_be_wrong(
    device, rotation, monkeypatch
):
    monkeypatch.setattr(device, "wait", lambda mark: None)
    monkeypatch.setattr(device, "follow", lambda mark: None)
    cache, kv = cache_on(device), chunk(3)
    device.go.clear()
    staging = staging_of(device, TOKENS * TOKEN)
    targets, start = [], device.start
    monkeypatch.setattr(
        device, "start", lambda target, source: targets.append(target) or start(target, source)
    )
    Placement(cache, rotation, [one(cache, list(kv), slice(0, TOKENS))], staging).finish()
    device.go.set()
    # all before it is done
    SlowDevice.wait(device, start(torch.empty(1), device.buffer((1,), torch.float32)))
    assert len(targets) == LAYERS and torch.equal(targets[0], targets[2]), "the last layer came twice"


def test_transfers_are_bounded_and_those_of_the_first_layers_come_first(device):
    cache = paged()
    writes, _ = writes_of(cache, device)
    layer = TOKENS * TOKEN
    found = transfers(writes, TransferSizes(2 * layer, layer))
    for write in writes:
        assert [t.layers for t in found if t.write is write] == [range(0, 1), range(1, 2), range(2, 3)]
    found = transfers(writes, TransferSizes(2 * layer, 2 * layer))
    assert [t.layers for t in found if t.write is writes[0]] == [range(0, 2), range(2, 3)]
    assert [t.layers.start for t in found] == sorted(t.layers.start for t in found)
    parts = [
        t.picks
        for t in transfers(writes, TransferSizes(20 * TOKEN, 1))
        if t.write is writes[0] and t.layers.start == 1
    ]
    assert parts == [range(0, 20), range(20, 40), range(40, 41)]
    with pytest.raises(ValueError, match="a token takes"):
        transfers(writes, TransferSizes(TOKEN - 1, 1))


def test_no_transfer_is_larger_than_its_buffer_and_none_is_empty(device):
    cache, kv = paged(), device.lock(chunk(3))
    for tokens in SELECTIONS.values():
        for size in (1, 2, 7, TOKENS, 3 * TOKENS):
            for gap in (0, 3, TOKENS):
                found = transfers([one(cache, kv, tokens)], TransferSizes(size * TOKEN, TOKEN, gap * HEAD))
                assert all(0 < math.prod(t.shape) * 4 <= size * TOKEN for t in found)
                placed = [(layer, pick) for t in found for layer in t.layers for pick in t.picks]
                count = len(torch.arange(TOKENS)[tokens])
                assert sorted(placed) == [(layer, pick) for layer in range(LAYERS) for pick in range(count)]


# ---- in a step of the runner


@pytest.fixture
def runner(device, rotation):
    cache = cache_on(device)
    runner = LinkRunner()
    runner.paged, runner.rotation, runner.report = cache, rotation, StepReport()
    runner.staging = staging_of(device, TOKENS * TOKEN)
    runner._links = {name: SimpleNamespace(seconds=0.0) for name in ("a", "b")}
    runner.writes, runner.kvs = writes_of(cache, device)
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
