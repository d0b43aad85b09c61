"""More than one worker on the CPU, tensor or pipeline parallel: the native engine's answers and files (make parity)."""

from __future__ import annotations

import pytest
from vllm_facade import MANIFEST, WRAPPINGS, Bench, compile_the_same

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def bench(request, tmp_path_factory):
    tensor, pipeline = request.param
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with Bench(tmp_path_factory.mktemp("library"), **ranks) as made:
        yield made


@pytest.mark.parametrize("policy", ["full", "legolink-4", "mpic-16", "packet-4"])
def test_two_workers_give_the_native_engines_answers(bench, native, policy):
    for question in MANIFEST["questions"]:
        prompt = bench.prompt(question["messages"])
        ours, theirs = (bench.ask(prompt, policy, engine, logprobs=2) for engine in (bench.engine, native))
        assert ours.token_ids == theirs.token_ids, question["id"]
        mine, natives = ([p.logprob for p in answer.logprobs] for answer in (ours, theirs))
        assert mine == pytest.approx(natives, abs=1e-3)
        a, b = ours.usage, theirs.usage
        assert (a.prompt_tokens, a.reused, a.recomputed) == (b.prompt_tokens, b.reused, b.recomputed)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_two_workers_compile_the_native_engines_files(bench, native, wrapping):
    compile_the_same(bench, native, wrapping)
