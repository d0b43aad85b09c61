"""Links under pressure: prompts cut into several steps, too few blocks, aborted requests."""

from __future__ import annotations

import random

import pytest
import torch
import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, text_chunk
from families import random_image
from slow_device import LateDevice
from vllm_links import Linker, assert_close, engine

from mpic.engine.vllm.wire import CompileOrder

TOKENS = 30
SMALL_STEP = 48
BLOCKS = 26


@pytest.fixture(scope="module", params=kit.quick_or_parity(("qwen3_vl",)))
def linker(request, tmp_path_factory):
    files = tmp_path_factory.mktemp("chunks")
    options = {"max_num_batched_tokens": SMALL_STEP, "num_gpu_blocks_override": BLOCKS, "max_model_len": 512}
    options |= {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 20}
    if request.param in kit.VISION:
        options |= {"limit_mm_per_prompt": {"image": 1, "video": 0}}
    with engine(kit.checkpoint(request.param), files, **options) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        assert worker.use_v2_model_runner == kit.V2
        yield Linker(llm, request.param, files)


def core(linker):
    return linker.llm.llm_engine.engine_core.engine_core


def idle(linker) -> None:
    """Return whether nothing is held: no block, no chunk, no order."""
    scheduler = kit.settle(linker.llm)
    admission, host = scheduler.connector._admission, scheduler.connector._host
    assert not admission._tracked and not admission._unfinished and not admission._admitted
    assert not host._held and not host._waiting and not any(chunk.pins for chunk in host._chunks.values())
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def prompts(linker):
    """Yield ten prompts with three chunks, each chunk at many places."""
    picked = random.Random(0)
    third = text_chunk(ids(9, 33))
    if linker.name in kit.VISION:
        third = image_chunk(random_image(2, 40, 40))
    chunks = [text_chunk(ids(8, 70)), text_chunk(ids(7, 101)), third]
    for i in range(10):
        parts = [[1, *ids(20 + i, picked.randint(1, 30))]]
        for chunk in picked.sample(chunks, picked.randint(1, 3)):
            parts += [chunk, ids(40 + i, picked.randint(1, 12))]
        yield prompt_of(*parts), picked.choice(["mpic-0", "mpic-3", "mpic-20", "random-30", "attnlink-8"])


if kit.V2:  # the first runner's warm-up goes another way, which has no requests

    def test_what_vllm_runs_on_a_gpu_before_it_serves_leaves_links_right(linker):
        """It warms its kernels up with steps that no scheduler made and that carry no instructions for links. This is
        the first test because it needs every place of the batch."""
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        worker = linker.llm.llm_engine.model_executor.driver_worker.worker
        runner, steps = worker.model_runner, []

        def not_sampled(grammar):  # the interpreter does not take all of the sampler's kernels
            steps.append(runner.execute_model_state)
            runner.execute_model_state = None

        warmup_kernels(runner, worker.execute_model, not_sampled)
        assert len(steps) > 2 and all(steps)
        prompt, policy = next(prompts(linker))
        (answer,) = linker.run(*zip(linker.link(prompt, policy)))
        assert answer.ids == linker.expected(prompt, policy)[0]


def test_a_link_cut_into_steps_equals_the_oracle(linker):
    for prompt, policy in list(prompts(linker))[:3]:
        answers = linker.run(*zip(linker.link(prompt, "mpic-20")))
        assert answers[0].ids == linker.expected(prompt, "mpic-20")[0]
        (answer,) = linker.run(*zip(linker.link(prompt, policy)))
        assert_close(answer, linker.expected(prompt, policy))
    idle(linker)


def test_preempted_links_answer_as_if_they_were_alone(linker, preempted):
    asked = list(prompts(linker))
    alone = [linker.reported(*zip(linker.link(*one)), tokens=TOKENS)[0].ids for one in asked]
    assert not preempted
    for salt in ("one", "one", "two"):  # the second time blocks of the first are found
        batch = [*range(10), 3, 3, 7]
        requests = [linker.link(*asked[i], salt=f"{salt}-{i}") for i in batch]
        answers = linker.reported(*zip(*requests, strict=True), tokens=TOKENS)
        assert [answer.ids for answer in answers] == [alone[i] for i in batch]
    assert preempted
    idle(linker)


def test_a_link_that_is_preempted_while_it_answers_goes_on_as_if_it_had_not_been(linker, preempted):
    """All of its prompt is in the prefix cache when it comes back, so that nothing of it is linked any more."""
    from vllm import SamplingParams

    def long(prompt, policy):
        ragged = len(linker.order(prompt, policy)[0]) % kit.BLOCK > 8  # its answer soon needs another block
        return ragged and any(chunk.token_ids is None for chunk in prompt.chunks) == (
            linker.name in kit.VISION
        )

    prompt, policy = next(one for one in prompts(linker) if long(*one))
    (alone,) = linker.reported(*zip(linker.link(prompt, policy)), tokens=TOKENS)
    request, params = linker.link(prompt, policy, salt="set aside")
    vllm, pool = linker.llm.llm_engine, core(linker).scheduler.kv_cache_manager.block_pool
    settings = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    extra = {"kv_transfer_params": params}
    vllm.add_request("set aside", request, SamplingParams(extra_args=extra, **settings))
    answer, taken = [], None
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            answer = list(output.outputs[0].token_ids)
        if answer and taken is None:
            taken = pool.get_new_blocks(pool.get_num_free_blocks())
        elif preempted and taken:
            pool.free_blocks(taken)
            taken = []
    assert len(preempted) == 1 and answer == alone.ids
    idle(linker)


def test_an_aborted_link_leaves_nothing_half_written_in_the_prefix_cache(linker):
    from vllm import SamplingParams

    prompt, _ = next((p, k) for p, k in prompts(linker) if len(linker.order(p, k)[0]) > 2 * SMALL_STEP)
    (alone,) = linker.run(*zip(linker.link(prompt, "random-60")))
    request, params = linker.link(prompt, "random-60", salt="given up")
    vllm = linker.llm.llm_engine
    for steps in range(1, 4):
        extra = {"kv_transfer_params": params}
        vllm.add_request(f"aborted-{steps}", request, SamplingParams(max_tokens=4, extra_args=extra))
        scheduler = core(linker).scheduler
        while not scheduler.running:
            vllm.step()
        for _ in range(steps - 1):
            vllm.step()
        vllm.abort_request([f"aborted-{steps}"])
        vllm.step()
        (answer,) = linker.run([request], [params])
        assert_close(answer, (alone.ids, alone.logprobs))
        core(linker).scheduler.reset_prefix_cache()
    idle(linker)


def test_two_links_with_one_salt_at_once_do_not_read_each_other_half_written(linker):
    prompt, _ = next((p, k) for p, k in prompts(linker) if len(linker.order(p, k)[0]) > 2 * SMALL_STEP)
    (alone,) = linker.run(*zip(linker.link(prompt, "random-60")))
    twins = [linker.link(prompt, "random-60", salt="twins") for _ in range(3)]
    for answer in linker.run(*zip(*twins, strict=True)):
        assert_close(answer, (alone.ids, alone.logprobs))
    idle(linker)


def test_links_with_one_salt_are_computed_in_the_same_steps_and_found_afterwards(linker):
    """Three questions about the same document, under one policy and so with one salt: none waits for another."""
    document = text_chunk(ids(8, 70))
    asked = [prompt_of([1, *ids(60, 5)], document, ids(61 + i, 4)) for i in range(3)]
    alone = [linker.reported(*zip(linker.link(prompt, "mpic-2")))[0].ids for prompt in asked]
    steps, schedule = [], type(core(linker).scheduler).schedule

    def watched(self, *args, **options):
        out = schedule(self, *args, **options)
        steps.append(len(out.num_scheduled_tokens))
        return out

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(core(linker).scheduler), "schedule", watched)
        together = linker.reported(*zip(*(linker.link(prompt, "mpic-2", salt="three") for prompt in asked)))
    assert [answer.ids for answer in together] == alone
    assert max(steps) == 3 and [answer.report["prefix_hit"] for answer in together] == [0, 0, 0]
    again = linker.reported(*zip(linker.link(asked[0], "mpic-2", salt="three")))[0]
    assert again.ids == alone[0] and again.report["prefix_hit"] > 0
    idle(linker)


def compile_request(linker, vllm, name: str) -> list[int]:
    """Ask to compile a text of two steps; return its tokens."""
    from vllm import SamplingParams

    (linker.files / name).mkdir()
    tokens = ids(77, SMALL_STEP + 9)
    extra = {"kv_transfer_params": CompileOrder(name).params()}
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, extra_args=extra)
    vllm.add_request(name, {"prompt_token_ids": tokens, "cache_salt": name}, params)
    return tokens


def test_blocks_of_a_compiled_chunk_are_kept_until_they_are_read_while_others_are_answered(linker):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from mpic.engine.vllm.frontend.compiled import read_compiled

    prompt, policy = next(prompts(linker))
    request, params = linker.link(prompt, policy)
    idle(linker)
    exporter, vllm = get_kv_transfer_group()._exporter, linker.llm.llm_engine
    usual, held = exporter._readback, LateDevice()
    exporter._readback = held
    try:
        tokens = compile_request(linker, vllm, "kept")
        while vllm.has_unfinished_requests():
            vllm.step()
        (answer,) = linker.run([request], [params])
        assert answer.ids == linker.expected(prompt, policy)[0], "answered beside the export"
        scheduler = core(linker).scheduler
        for _ in range(3):
            core(linker).step()
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert list(scheduler.requests) and free == BLOCKS - 1 - -(-len(tokens) // kit.BLOCK)
    finally:
        held.computed.set()
        exporter._readback = usual
    idle(linker)
    inputs, kv = read_compiled(linker.files / "kept")
    assert inputs.token_ids.tolist() == tokens
    _, again = linker.compiled(text_chunk(tokens))
    assert torch.equal(kv, again)


@pytest.fixture
def room_for_one_image(linker):
    """Leave room for one encoded image of 32 x 32 pixels; as it starts, vLLM has room for many so small ones."""
    if linker.name not in kit.VISION:
        pytest.skip("the family has no images")
    inputs, _ = linker.compiled(image_chunk(random_image(3, 32, 32)))
    manager = core(linker).scheduler.encoder_cache_manager
    usual, manager.cache_size = manager.cache_size, len(inputs)
    manager.reset()
    yield
    manager.cache_size = usual
    manager.reset()


def test_an_image_stays_encoded_until_its_embeddings_are_exported_although_others_want_its_room(
    linker, room_for_one_image
):
    """As an adapter's trailer may be, text behind the image is computed in a later step than the image."""
    from vllm import SamplingParams

    from mpic.engine.vllm.frontend.compiled import read_compiled

    vllm, pad = linker.llm.llm_engine, kit.image_ids(linker.name)[-2:][:1]

    def ask(name: str, seed: int) -> None:
        (linker.files / name).mkdir()
        prompt = {"prompt_token_ids": pad + ids(5, SMALL_STEP), "cache_salt": name}
        prompt["multi_modal_data"] = {"image": random_image(seed, 32, 32)}
        settings = {"max_tokens": 1, "temperature": 0, "skip_reading_prefix_cache": True}
        extra = {"kv_transfer_params": CompileOrder(name).params()}
        vllm.add_request(name, prompt, SamplingParams(extra_args=extra, **settings))

    for name, seeds in (("alone", [4]), ("beside", [4, 5])):
        for seed in seeds:
            ask(f"{name}-{seed}", seed)
            vllm.step()  # it computes the image, and not all of the text
        while vllm.has_unfinished_requests():
            vllm.step()
        idle(linker)
    (alone, kv), (beside, other) = (read_compiled(linker.files / f"{name}-4") for name in ("alone", "beside"))
    assert torch.equal(alone.embeds, beside.embeds) and torch.equal(kv, other)
    read_compiled(linker.files / "beside-5")


def test_a_compile_that_is_aborted_before_its_last_step_holds_no_blocks(linker):
    vllm = linker.llm.llm_engine
    compile_request(linker, vllm, "aborted")
    vllm.step()
    vllm.abort_request(["aborted"])
    vllm.step()
    idle(linker)
    assert not any((linker.files / "aborted").iterdir())
