"""Links on the scheduler's side, over real chunk files and without an engine: when they may start, and what they wait
for."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import vllm_kit  # noqa: F401 - sets the environment before vLLM is imported
from engine_kit import until

from mpic.engine.vllm.plugin.admission import Admission
from mpic.engine.vllm.plugin.host_memory import HostMemory
from mpic.engine.vllm.plugin.step_messages import StepReport
from mpic.engine.vllm.wire import ChunkRef, LinkOrder
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, KVShape, Recipe
from mpic.kv.expected import Expected
from mpic.kv.file import write

SHAPE, HIDDEN, IMAGE = KVShape(2, 1, 4), 4, 9
TOKENS, TEXT = 8, 3
"""Tokens of a chunk, and of the text before and behind it."""


class Scheduler:
    """The questions of vLLM's scheduler about links, with one reader of files."""

    def __init__(self, folder, patience: float) -> None:
        self.folder = folder
        expected = Expected(SHAPE, torch.float32, HIDDEN, 0)
        self.host = HostMemory([folder], 1 << 20, 1, expected)
        model = SimpleNamespace(is_multimodal_model=True, hf_config=SimpleNamespace(image_token_id=IMAGE))
        config = SimpleNamespace(model_config=model)
        self.admission = Admission(config, self.host, [folder], patience, 100)
        self.admission.manager = SimpleNamespace(get_block_ids=lambda request: ([1, 2],))

    def link(self, name: str, image: bool = False) -> SimpleNamespace:
        """A request that has arrived: text, a chunk of a file of its own, text."""
        ids = [IMAGE] * TOKENS if image else list(range(10, 10 + TOKENS))
        key = KVKey("local", ChunkKey("image" if image else "text", name * 64), "model", Recipe("float32"))
        embeds = torch.ones(TOKENS, HIDDEN) if image else None
        inputs = ChunkInputs(torch.tensor(ids), torch.arange(TOKENS)[None], TOKENS, embeds)
        write(self.folder / f"{name}.kv", ChunkKV(key, inputs, torch.ones(2, 2, 1, TOKENS, 4)))
        ref = ChunkRef(f"{name}.kv", key.digest, TEXT, TOKENS, TEXT)
        length = TOKENS + 2 * TEXT
        order = LinkOrder(length, length, ((0, TEXT), (TEXT + TOKENS, length)), (ref,))
        request = SimpleNamespace(
            request_id=name,
            kv_transfer_params=order.params(),
            prompt_token_ids=[1] * TEXT + ids + [1] * TEXT,
            num_prompt_tokens=length,
            cache_salt="salt",
            **dict.fromkeys(("pooling_params", "lora_request", "resumable", "mm_features")),
            skip_reading_prefix_cache=False,
        )
        self.admission.arrive(request)
        return request

    def tracked(self, request):
        return self.admission._tracked[request.request_id]

    def decided(self, request) -> int:
        """Ask until the link may start; return the tokens that need no computing."""
        until(
            lambda: (claimed := self.admission.claim(request, 0)) is not None or self.tracked(request).fault
        )
        assert self.tracked(request).fault is None
        return self.admission.claim(request, 0)


@pytest.fixture
def make(tmp_path):
    made = []

    def scheduler(patience: float = 60.0) -> Scheduler:
        made.append(Scheduler(tmp_path, patience))
        return made[-1]

    yield scheduler
    for one in made:
        one.host.close()


def test_a_link_whose_image_could_not_be_opened_in_time_waits_for_it(make, slow_disk):
    scheduler = make(patience=0.0)
    scheduler.link("a")
    until(lambda: slow_disk.reads == ["a.kv"])  # the only reader is busy
    request = scheduler.link("b", image=True)
    for _ in range(5):
        assert scheduler.admission.claim(request, 0) is None
        assert scheduler.tracked(request).fault is None
    slow_disk.go.set()
    assert scheduler.decided(request) in (0, TOKENS)


def test_a_link_whose_image_is_open_goes_on_without_its_kv(make, slow_disk):
    scheduler = make(patience=0.0)
    request = scheduler.link("a", image=True)
    assert scheduler.decided(request) == 0
    assert scheduler.tracked(request).fallback == [(0, "late")] and scheduler.tracked(request).chunks


def test_a_text_that_could_not_be_opened_in_time_is_computed(make, slow_disk):
    scheduler = make(patience=0.0)
    scheduler.link("a")
    until(lambda: slow_disk.reads == ["a.kv"])
    request = scheduler.link("b")
    assert scheduler.decided(request) == 0
    assert scheduler.tracked(request).fallback == [(0, "late")] and not scheduler.tracked(request).chunks


def step(scheduler, request=None, before=0, tokens=0):
    """Has a step's instructions made in which ``tokens`` of a request are computed."""
    news = [SimpleNamespace(req_id=request.request_id, num_computed_tokens=before)] if request else []
    return scheduler.admission.instructions(
        SimpleNamespace(
            preempted_req_ids=set(),
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            scheduled_new_reqs=news,
            num_scheduled_tokens={request.request_id: tokens} if request else {},
        )
    )


@pytest.fixture
def answering(make):
    """A link whose prompt has been placed and computed, as it answers."""
    scheduler = make()
    scheduler.admission.manager.cache_blocks = lambda request, tokens: None
    request = scheduler.link("a")
    external = scheduler.decided(request)
    assert external == TOKENS
    scheduler.admission.admitted(request, external)
    assert step(scheduler, request, external, 2 * TEXT).links
    scheduler.admission.executed(StepReport(placed={"a": 0.1}))
    return scheduler, request


def test_a_preempted_answer_whose_prompt_is_in_the_prefix_cache_reads_no_file_again(answering, monkeypatch):
    scheduler, request = answering
    report = scheduler.admission.report("a")["mpic"]
    assert report["reused"] == TOKENS and report["fallback"] == []
    (scheduler.folder / "a.kv").unlink()
    monkeypatch.setattr(scheduler.host, "load", Mock(side_effect=AssertionError("a file is read")))
    length = request.num_prompt_tokens
    assert scheduler.admission.claim(request, length + 1) == 0
    scheduler.admission.admitted(request, 0)
    assert not step(scheduler, request, length + 1, 1).links
    assert scheduler.admission.finished(request) == (False, {"mpic": report})
    assert not scheduler.host._held


def test_a_preempted_answer_whose_prompt_was_evicted_is_linked_again(answering):
    scheduler, request = answering
    until(lambda: scheduler.admission.claim(request, 0) == TOKENS)
    scheduler.admission.admitted(request, TOKENS)
    assert step(scheduler, request, TOKENS, 2 * TEXT).links


def test_a_preempted_answer_whose_prompt_was_evicted_and_whose_image_is_gone_says_so(make):
    """The frontend compiles the image again and goes on behind what was answered."""
    scheduler = make()
    request = scheduler.link("a", image=True)
    external = scheduler.decided(request)
    scheduler.admission.admitted(request, external)
    scheduler.admission.manager.cache_blocks = lambda *_: None
    assert step(scheduler, request, external, 2 * TEXT).links
    scheduler.host._budget = 0  # others need the memory
    scheduler.admission.executed(StepReport(placed={"a": 0.1}))
    assert scheduler.admission.report("a")["mpic"]["error"] is None
    (scheduler.folder / "a.kv").unlink()
    until(lambda: scheduler.admission.claim(request, 0) is None and scheduler.tracked(request).fault)
    assert scheduler.admission.finished(request)[1]["mpic"]["error"] == "missing"


def test_a_step_without_work_waits_for_files_and_for_nothing_else(answering, slow_disk, monkeypatch):
    scheduler, _ = answering
    waits = Mock(wraps=scheduler.host.wait)
    monkeypatch.setattr(scheduler.host, "wait", waits)
    step(scheduler)
    assert not waits.called, "only a link that answers is there"
    request = scheduler.link("b")
    step(scheduler)
    assert waits.call_count == 1
    slow_disk.go.set()
    scheduler.decided(request)
    step(scheduler)
    assert waits.call_count == 1
