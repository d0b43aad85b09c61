"""Links that map resident chunks, one copy for all requests, compared with the oracle."""

from __future__ import annotations

import pytest
import vllm_kit as kit
from engine_kit import ids, prompt_of
from vllm_links import Linker, assert_close, chunks_of, engine, prompt_for, random_adapter

from mpic.engine.vllm.wire import mapped
from mpic.errors import ModelRefused

FAMILIES = kit.quick_or_parity(("llama", "qwen3_vl"))
POLICIES = ["mpic-0", "mpic-4", "mpic-16", "legolink-4", "attnlink-4", "block-1", "random-30", "reuse"]
POLICIES += ["packet", "packet-7"]


@pytest.fixture(scope="module", params=FAMILIES)
def linker(request, tmp_path_factory):
    files = tmp_path_factory.mktemp("chunks")
    soft, path = random_adapter(request.param), tmp_path_factory.mktemp("packet") / "adapter.safetensors"
    soft.save(path)
    with engine(kit.checkpoint(request.param), files, {"sharing": True, "packet": str(path)}) as llm:
        yield Linker(llm, request.param, files, soft)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_link_that_maps_resident_chunks_equals_the_oracle(linker, policy):
    prompt = prompt_for(linker.name)
    (answer,) = linker.run(*zip(linker.link(prompt, policy, shared=True)))
    assert_close(answer, linker.expected(prompt, policy))


def test_without_a_compiler_spans_are_gathered_by_torch(linker, monkeypatch):
    from mpic.engine.vllm.plugin import span_attention

    monkeypatch.setattr(span_attention, "kernel_for", lambda *_: None)
    monkeypatch.setattr(span_attention, "SCORES", 4 * 200 * 9)  # a prompt's rows take several rounds
    prompt = prompt_for(linker.name)
    asked = [linker.link(prompt, "mpic-16", shared=True), (plain(linker), None)]
    assert_close(linker.run(*zip(*asked, strict=True))[0], linker.expected(prompt, "mpic-16"))


def scheduler_of(linker):
    return linker.llm.llm_engine.engine_core.engine_core.scheduler


def shared_of(linker):
    """Return the resident chunks once nothing runs, of which none is held."""
    scheduler = kit.settle(linker.llm)
    shared = scheduler.connector._admission.shared
    assert not shared._pins and not shared.held() and not scheduler.connector._admission._tracked
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return shared


def plain(linker) -> dict:
    return {"prompt_token_ids": [1, *ids(6, 40)]}


def test_shared_links_copying_links_and_plain_requests_share_a_batch(linker):
    _, b, c = chunks_of(linker.name)
    first, second = prompt_for(linker.name), prompt_of([1, *ids(5, 47)], c, ids(2, 6), b, ids(4, 9))
    (alone,) = linker.run([plain(linker)], [None])
    asked = [linker.link(first, "mpic-4", shared=True), (plain(linker), None)]
    asked += [linker.link(second, "random-30", shared=True), linker.link(second, "mpic-4")]
    asked += [linker.link(first, "mpic-16", shared=True)]
    answers = linker.run(*zip(*asked, strict=True))
    assert_close(answers[0], linker.expected(first, "mpic-4"))
    assert_close(answers[1], (alone.ids, alone.logprobs))
    assert_close(answers[2], linker.expected(second, "random-30"))
    assert_close(answers[3], linker.expected(second, "mpic-4"))
    assert_close(answers[4], linker.expected(first, "mpic-16"))


def test_a_chunk_is_loaded_once_for_all_policies_and_places(linker):
    prompt, shared = prompt_for(linker.name), shared_of(linker)
    linker.run(*zip(linker.link(prompt, "mpic-0", shared=True)))
    resident, before = dict(shared._resident), dict(shared.counters)
    other = prompt_of([1, *ids(3, 11)], *reversed(chunks_of(linker.name)), ids(2, 6))
    asked = [(other, "mpic-4"), (prompt, "mpic-16"), (prompt, "attnlink-4"), (prompt, "reuse")]
    linker.run(*zip(*(linker.link(*one, shared=True) for one in asked), strict=True))
    assert shared_of(linker)._resident == resident and len(resident) >= 3
    assert shared.counters["loaded"] == before["loaded"]
    orders = [linker.order(*one)[1] for one in asked]
    chunks = sum(len({order.chunks[number].key for number, *_ in mapped(order)}) for order in orders)
    assert shared.counters["mapped"] == before["mapped"] + chunks


def test_a_later_turn_finds_its_own_blocks_and_maps_its_chunks_again(linker):
    a, b, _ = chunks_of(linker.name)
    start = [[1, *ids(1, 40)], a, ids(2, 30), b, ids(3, 30)]
    first = prompt_of(*start)
    (answer,) = linker.reported(*zip(linker.link(first, "mpic-4", "conversation", shared=True)))
    assert answer.report["prefix_hit"] == 0 and answer.report["reused"] > 0
    assert answer.ids == linker.expected(first, "mpic-4")[0]
    second = prompt_of(*start[:-1], start[-1] + answer.ids + ids(4, 9))
    (answer,) = linker.reported(*zip(linker.link(second, "mpic-4", "conversation", shared=True)))
    assert answer.report["prefix_hit"] > 40 + 4 and answer.ids == linker.expected(second, "mpic-4")[0]
    length = linker.order(second, "mpic-4")[1].length
    assert sum(answer.report[name] for name in ("prefix_hit", "recomputed", "reused")) == length


def test_a_worker_whose_attention_does_not_turn_queries_is_refused(linker, monkeypatch):
    """The last test: it clears the cache."""
    from mpic.engine.vllm.plugin.selftest import self_test

    shared = shared_of(linker)
    runner = linker.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    by = runner.rotation.by
    monkeypatch.setattr(runner.rotation, "by", lambda delta: by(delta) if delta > 0 else None)
    with pytest.raises(ModelRefused, match="where they stand"):
        self_test(runner, sharing=True)
    monkeypatch.undo()
    self_test(runner, sharing=True)
    assert scheduler_of(linker).reset_prefix_cache() and not shared._resident
    prompt = prompt_for(linker.name)
    (answer,) = linker.run(*zip(linker.link(prompt, "mpic-4", shared=True)))
    assert_close(answer, linker.expected(prompt, "mpic-4"))
