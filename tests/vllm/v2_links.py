"""What ``test_runner_v2.py`` runs in a process of its own, with vLLM's second model runner. Its Triton kernels run in the
interpreter, on a CPU; everything else is vLLM's own code."""

from __future__ import annotations

from test_link_pressure import (
    core,
    linker,
    preempted,
    prompts,
    test_a_link_cut_into_steps_equals_the_oracle,
    test_a_link_that_is_preempted_while_it_answers_goes_on_as_if_it_had_not_been,
    test_links_with_one_salt_are_computed_in_the_same_steps_and_found_afterwards,
)

__all__ = [
    "linker",
    "preempted",
    "test_a_link_cut_into_steps_equals_the_oracle",
    "test_a_link_that_is_preempted_while_it_answers_goes_on_as_if_it_had_not_been",
    "test_links_with_one_salt_are_computed_in_the_same_steps_and_found_afterwards",
]


def test_what_vllm_runs_on_a_gpu_before_it_serves_leaves_links_right(linker):
    """It warms its kernels up with steps that no scheduler made, which therefore carry no instructions for links."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    worker = core(linker).model_executor.driver_worker.worker
    warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
    prompt, policy = next(prompts(linker))
    (answer,) = linker.run(*zip(linker.link(prompt, policy)))
    assert answer.ids == linker.expected(prompt, policy)[0]
