"""Links that map resident chunks, under pressure: prompts cut into several steps, more chunks than fit, preemption."""

from __future__ import annotations

import random

import pytest
import vllm_kit as kit
from engine_kit import ids, prompt_of, text_chunk
from vllm_links import Linker, assert_close, engine

TOKENS, SMALL_STEP, BLOCKS = 30, 48, 26
CHUNKS = [text_chunk(ids(40 + n, tokens)) for n, tokens in enumerate((70, 101, 33, 150, 64, 96, 129, 45))]
"""Together they take more blocks than there are."""


@pytest.fixture(scope="module", params=kit.quick_or_parity(("llama",), kit.TEXT))
def linker(request, tmp_path_factory):
    files = tmp_path_factory.mktemp("chunks")
    options = {"max_num_batched_tokens": SMALL_STEP, "num_gpu_blocks_override": BLOCKS, "max_model_len": 512}
    options |= {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 20}
    with engine(kit.checkpoint(request.param), files, {"sharing": True}, **options) as llm:
        yield Linker(llm, request.param, files)


def prompts():
    """Yield 16 prompts with one to three chunks, each chunk at many places."""
    picked = random.Random(0)
    for i in range(16):
        parts = [[1, *ids(20 + i, picked.randint(1, 30))]]
        for chunk in picked.sample(CHUNKS, picked.randint(1, 3)):
            parts += [chunk, ids(60 + i, picked.randint(1, 12))]
        yield prompt_of(*parts), picked.choice(["mpic-0", "mpic-3", "mpic-20", "attnlink-8"])


def idle(linker):
    """Return the resident chunks; check that nothing is held."""
    scheduler = kit.settle(linker.llm)
    admission, host = scheduler.connector._admission, scheduler.connector._host
    assert not admission._tracked and not admission._admitted and not admission.shared._pins
    assert not host._held and not host._waiting
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    return admission.shared


def test_a_link_cut_into_steps_equals_the_oracle(linker):
    for prompt, policy in list(prompts())[:3]:
        (answer,) = linker.run(*zip(linker.link(prompt, policy, shared=True)))
        assert_close(answer, linker.expected(prompt, policy))
    idle(linker)


def test_preempted_links_over_more_chunks_than_fit_answer_as_the_oracle_does(linker, preempted):
    asked = list(prompts())
    for salt in ("one", "one", "two"):  # the second time blocks of the first are found
        batch = [*range(16), 3, 3, 7]
        requests = [linker.link(*asked[i], salt=f"{salt}-{i}", shared=True) for i in batch]
        answers = linker.reported(*zip(*requests, strict=True), tokens=TOKENS)
        for i, answer in zip(batch, answers, strict=True):
            assert answer.ids == linker.expected(*asked[i], tokens=TOKENS)[0], i
    counters = idle(linker).counters
    assert preempted and counters["evicted"] and counters["mapped"] and counters["loaded"]


def test_an_aborted_link_leaves_nothing_held(linker):
    from vllm import SamplingParams

    vllm = linker.llm.llm_engine
    asked = list(prompts())[:4]
    for i, one in enumerate(asked):
        prompt, params = linker.link(*one, shared=True)
        settings = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        vllm.add_request(
            f"gone {i}", prompt, SamplingParams(extra_args={"kv_transfer_params": params}, **settings)
        )
    for i in range(4):
        for _ in range(i + 1):
            vllm.step()
        vllm.abort_request([f"gone {i}"])
    idle(linker)
    (answer,) = linker.run(*zip(linker.link(*asked[0], shared=True)))
    assert_close(answer, linker.expected(*asked[0]))
