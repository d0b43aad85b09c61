"""Pins, admissions, preemptions and evictions of shared chunks on vLLM's own scheduler and cache manager, without a
model. A pretended worker keeps what each block holds, and looks in every step whether a link finds there what it maps.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import vllm_kit as kit
from engine_kit import until

from mpic.engine.vllm.plugin.step_messages import EndReason, StepReport
from mpic.engine.vllm.wire import ChunkRef, LinkOrder
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, Recipe
from mpic.kv.file import write

BLOCK, CONTEXT, PLACES, ROWS = 32, 512, 6, 160
CHUNKS = [33, 64, 96, 31, 130, 70, 200, 65]
"""Tokens of the chunks that prompts choose from."""
STEPS = 4000
"""More than any of these runs takes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chunks")


class Life:
    """A scheduler with ``blocks`` blocks, a worker that pretends, and requests."""

    def __init__(
        self,
        folder,
        blocks: int,
        seed: int,
        chunks=CHUNKS,
        context=CONTEXT,
        places=PLACES,
        rows=ROWS,
        **settings,
    ) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from mpic.engine.vllm.plugin.scheduler import LinkScheduler

        transfer = KVTransferConfig(
            kv_connector="MPICConnector",
            kv_connector_module_path="mpic.engine.vllm.plugin.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"folders": [str(folder)], "sharing": True, **settings},
        )
        parts = {
            "worker_cls": "mpic.engine.vllm.plugin.worker.LinkWorker",
            "scheduler_cls": "mpic.engine.vllm.plugin.scheduler.LinkScheduler",
            "async_scheduling": False,
        }
        model = kit.checkpoint("llama")
        kit.look_at("LlamaForCausalLM")
        args = EngineArgs(
            str(model),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=context,
            max_num_seqs=places,
            max_num_batched_tokens=rows,
            kv_transfer_config=transfer,
            **parts,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = LinkScheduler(config, cache, StructuredOutputManager(config), BLOCK)
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(BLOCK, hashed)
        self.folder, self.random = folder, random.Random(seed)
        self.refs = [self._file(number, tokens) for number, tokens in enumerate(chunks)]
        self.connector = self.scheduler.connector
        self.shared = self.connector._admission.shared
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.blocks: dict[int, object] = {}  # what the worker has written to each
        self.starts: dict[str, object] = {}  # links that it knows
        self.ended: dict[str, str] = {}
        self.preempted = self.steps = self.checked = 0
        self.unreadable: set[str] = set()  # keys of chunks that the worker cannot place
        self._names = map(str, itertools.count())

    def _file(self, number: int, tokens: int) -> tuple[str, str, list[int]]:
        key = KVKey("local", ChunkKey("text", f"{number:032}{tokens:032}"), "model", Recipe("float32"))
        path, ids = f"{number}-{tokens}.kv", list(range(10, 10 + tokens))
        if not (self.folder / path).exists():
            inputs = ChunkInputs(torch.tensor(ids), torch.arange(tokens)[None], tokens, None)
            write(self.folder / path, ChunkKV(key, inputs, torch.zeros(3, 2, 2, tokens, 32)))
        return path, key.digest, ids

    def _request(self, ids, tokens: int, order=None, salt: str = ""):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": order.params()} if order is not None else None
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        name = next(self._names)
        request = Request(
            name, ids, sampling, None, cache_salt=salt or f"salt {name}", block_hasher=self._hasher
        )
        self.scheduler.add_request(request)
        return request

    def plain(self, tokens: int, answer: int):
        return self._request([1] * tokens, answer)

    def link(
        self, chunks, head: int = 4, text: int = 7, answer: int = 5, shared: bool = True, salt: str = ""
    ):
        """Add a link of chunks, by number, with text before, between and behind them."""
        refs, rows, ids, at = [], [], [], 0
        for number in chunks:
            path, key, tokens = self.refs[number]
            own = [1] * text + tokens[:head]
            rows.append((at, at + len(own)))
            refs.append(ChunkRef(path, key, at + text, len(tokens), at + text))
            ids += own if shared else own + tokens[head:]
            at += text + len(tokens)
        rows.append((at, at + text))
        length = at + text
        order = LinkOrder(length, length, tuple(rows), tuple(refs), shared)
        return self._request(ids + [1] * text, answer, order, salt)

    def abort(self, request: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
        self.ended[request] = "abort"

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        # however slow the disk is
        self.steps += bool(scheduled.num_scheduled_tokens) or not self.connector._admission._reading()
        self.preempted += len(scheduled.preempted_req_ids or ())
        report = self._work(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        for name in names:
            self._check(name, scheduled.num_scheduled_tokens[name])
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            sampled.append([5] if request.num_computed_tokens >= request.num_tokens else [])
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        output.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=report)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
        self._check_pool()

    def _work(self, scheduled) -> StepReport:
        """Do what a worker does before it computes."""
        report, made = StepReport(), scheduled.kv_connector_metadata
        for gone in {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}:
            self.starts.pop(gone, None)
        for fill in made.loads:
            assert fill.file.kv is not None, "a chunk that is loaded is in host memory"
            if fill.key in self.unreadable:
                report.lost[fill.blocks] = EndReason("corrupt", "it cannot be read")
                continue
            self.blocks |= {block: (fill.key, i) for i, block in enumerate(fill.blocks)}
        self.starts |= made.shared
        for name, start in made.links.items():  # a link that copies
            self.starts[name] = None
            report.placed[name] = 0.0
            assert start.chunks
        return report

    def _check(self, name: str, count: int) -> None:
        """The blocks that a link maps hold its chunks, and those of its own tokens are nobody else's."""
        request = self.scheduler.requests[name]
        own = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        first = (request.num_computed_tokens - count) // BLOCK
        for block in own[first:]:
            self.blocks[block] = name
        order = self.connector._admission._tracked.get(name)
        if order is None or not order.shared:
            return
        start = self.starts[name]
        keys = [ref.key for ref in order.order.chunks]
        assert [span.row for span in start.spans] == sorted(span.row for span in start.spans)
        for span, key in zip(start.spans, keys, strict=True):
            if key not in self.unreadable:
                assert [self.blocks[block] for block in span.blocks] == [
                    (key, i) for i in range(len(span.blocks))
                ]
                self.checked += 1
            assert not set(span.blocks) & set(own)

    def _check_pool(self) -> None:
        """Held blocks are those of running requests and of chunks that they map, each counted once."""
        requests = [one.request_id for one in self.scheduler.running]
        own = {block for name in requests for block in self.scheduler.kv_cache_manager.get_block_ids(name)[0]}
        assert set(self.shared._pins) <= set(requests), "who waits holds nothing"
        held = {block for pins in self.shared._pins.values() for one in pins for block in one.block_ids}
        assert not own & held and self.shared.held() == len(held)
        free = self.pool.get_num_free_blocks()
        assert free == self.pool.num_gpu_blocks - 1 - len(own | held)
        everyone = [block for one in self.shared._resident.values() for block in one.block_ids]
        assert len(everyone) == len(set(everyone)) and self.shared.idle() <= free

    def run(self, each=lambda: None) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_requests():
            each()
            self.step()
            assert self.steps < STEPS, "requests wait for ever"
        assert not self.shared._pins and self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1

    def close(self) -> None:
        self.scheduler.connector.shutdown()


@pytest.fixture
def live(folder):
    lives = []

    def made(blocks: int = 40, seed: int = 0, **settings) -> Life:
        lives.append(Life(folder, blocks, seed, **settings))
        return lives[-1]

    yield made
    for one in lives:
        one.close()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_nothing_waits_for_ever_and_links_find_what_they_map(live, seed):
    """More chunks than fit, plain requests, links that copy, aborted requests, a cache that is emptied."""
    life = live(blocks=26, seed=seed, host_bytes=1 << 20)
    pick, asked = life.random, []

    def come() -> None:
        if len(asked) < 60 and pick.random() < 0.5:
            kind = pick.random()
            if kind < 0.2:
                asked.append(life.plain(pick.randint(1, 300), pick.randint(1, 60)))
            else:
                chunks = [pick.randrange(len(CHUNKS)) for _ in range(pick.randint(1, 3))]
                text, answer = pick.randint(1, 30), pick.randint(1, 60)
                if sum(CHUNKS[number] + text for number in chunks) + text + answer <= CONTEXT:
                    asked.append(life.link(chunks, pick.choice([1, 4, 20]), text, answer, kind < 0.9))
        if asked and pick.random() < 0.03:
            one = pick.choice(asked).request_id
            if one in life.scheduler.requests:
                life.abort(one)
        if pick.random() < 0.01:
            life.scheduler.reset_prefix_cache(reset_running_requests=pick.random() < 0.5)

    while len(asked) < 60:
        come()
        life.step()
    life.run(come)
    assert len(life.ended) == 60 and set(life.ended.values()) == {"length", "abort"}
    assert life.checked > 100 and life.preempted and life.shared.counters["evicted"]
    assert life.shared.counters["loaded"] and life.shared.counters["mapped"]


def test_nobody_passes_a_link_that_finds_too_few_blocks(live):
    """Requests that come all the time leave no block free for long, and each needs fewer than the link."""
    life = live(blocks=16)
    for _ in range(3):
        life.plain(100, 12)
    life.step()
    link = life.link([6, 4], answer=2)  # 12 blocks of chunks, and its own
    load = life.connector._admission._tracked[link.request_id].load
    until(lambda: load.done)
    after = []
    while link.request_id not in life.ended:
        after.append(life.plain(60, 12))
        life.step()
        assert life.steps < STEPS
        assert not life.ended.keys() & {one.request_id for one in after}
    assert life.ended[link.request_id] == "length" and life.shared.counters["waited"]
    life.run()


def test_a_chunk_that_is_taken_while_a_link_reads_its_other_ones_is_read_as_well(live, slow_disk):
    slow_disk.go.set()
    life = live(blocks=26)
    life.link([0])
    life.run()
    slow_disk.go.clear()
    link = life.link([0, 1])
    life.step()
    assert life.shared.idle() and not life.scheduler.running
    life.plain(400, 90)  # it takes every block in turn
    life.plain(400, 20)
    while life.shared.idle():
        life.step()
        assert life.steps < STEPS
    slow_disk.go.set()
    life.run()
    assert life.ended[link.request_id] == "length" and life.shared.counters["evicted"] == 1
    assert life.shared.counters["loaded"] == 3


def test_a_chunk_is_not_loaded_over_blocks_that_its_link_has_found_in_the_prefix_cache(live):
    """vLLM looks them up before it asks whether the link may start, and holds them afterwards. Here they are those that
    would be taken next."""
    life = live(blocks=13)
    life.link([0], text=70, salt="same")
    life.run()
    life.plain(160, 2)
    life.run()
    link = life.link([6], text=70, salt="same")
    assert life.scheduler.kv_cache_manager.get_computed_blocks(link)[1] == 128
    life.run()
    assert life.ended[link.request_id] == "length"


def test_a_chunk_that_cannot_be_placed_ends_those_who_map_it_and_is_read_anew_for_the_next(live):
    life = live()
    life.unreadable.add(life.refs[1][1])
    hurt, well = [life.link([0, 1]), life.link([1], text=40, salt="same")], life.link([0, 2])
    life.run()
    assert [life.ended[one.request_id] for one in hurt] == ["error"] * 2
    assert life.ended[well.request_id] == "length"
    assert {one.key for one in life.shared._resident} == {life.refs[0][1], life.refs[2][1]}
    life.unreadable.clear()
    again = life.link([1], text=40, salt="same")
    assert life.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0, (
        "computed over what was not there"
    )
    life.run()
    assert life.ended[again.request_id] == "length" and life.checked


REFUSED = {
    "more than 512": {"chunks": [6, 6], "answer": 100},
    "blocks, and the cache has 9": {"chunks": [6, 4]},
    "1 ranges at most, not 2: have it copied": {"chunks": [0, 1]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_link_that_could_never_run_is_refused_when_it_comes(live, reason, caplog):
    life = live(blocks=10, most_rows=1 if "ranges" in reason else 100)
    link = life.link(**REFUSED[reason])
    assert reason in life.connector._admission._tracked[link.request_id].fault.message
    life.run()
    assert life.ended == {link.request_id: "error"}


@pytest.mark.parametrize("requests", [16, 32])
def test_requests_over_the_same_chunks_take_at_most_a_quarter_of_the_blocks_that_copies_take(live, requests):
    """Eight documents of 220 tokens, of which 16 are computed anew; every request has them in another order, and all
    answer at the same time."""
    used, chunks, text, head, answer = {}, [220] * 8, 8, 16, 8
    for shared in (False, True):
        life = live(blocks=2400, chunks=chunks, context=2048, places=requests, rows=1 << 16)
        for i in range(requests):
            life.link([(i + j) % 8 for j in range(8)], head, text, answer, shared)
        most, total = 0, life.pool.num_gpu_blocks - 1
        while life.scheduler.has_requests():
            life.step()
            most = max(most, total - life.pool.get_num_free_blocks())
        assert not life.preempted and set(life.ended.values()) == {"length"} and len(life.ended) == requests
        used[shared] = most
    blocks = lambda tokens: -(-tokens // BLOCK)
    assert used[False] == requests * blocks(8 * 220 + 9 * text + answer - 1)
    assert used[True] == 8 * blocks(220) + requests * blocks(8 * head + 9 * text + answer - 1)
    assert used[True] <= used[False] / 4
