"""More than one worker on the CPU, tensor or pipeline parallel: the native engine's answers and files (make parity)."""

from __future__ import annotations

import pytest
import torch
from vllm_facade import MANIFEST, Bench

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def bench(request, tmp_path_factory):
    tensor, pipeline = request.param
    made = Bench(
        tmp_path_factory.mktemp("library"), tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
    )
    yield made
    made.engine.close()
    made.library.close()


@pytest.fixture(scope="module")
def native(bench):
    engine = bench.native()
    yield engine
    engine.close()


@pytest.mark.parametrize("policy", ["full", "legolink-4", "mpic-16"])
def test_two_workers_give_the_native_engines_answers(bench, native, policy):
    for question in MANIFEST["questions"]:
        prompt = bench.prompt(question["messages"])
        ours, theirs = (bench.ask(prompt, policy, engine, logprobs=2) for engine in (bench.engine, native))
        assert ours.token_ids == theirs.token_ids, question["id"]
        assert [p.logprob for p in ours.logprobs] == pytest.approx(
            [p.logprob for p in theirs.logprobs], abs=1e-3
        )
        a, b = ours.usage, theirs.usage
        assert (a.prompt_tokens, a.reused, a.recomputed) == (b.prompt_tokens, b.reused, b.recomputed)


@pytest.mark.parametrize("sink", [0, 4])
def test_two_workers_compile_the_native_engines_files(bench, native, sink):
    prompt = bench.prompt([{"role": "user", "content": "IMAGE#MAP7 FILE#VERA What?"}])
    for chunk in prompt.chunks:
        key = bench.engine.chunks.key(chunk, sink)
        found = []
        for engine in (bench.engine, native):
            bench.library.store.delete(key)
            engine.forget(chunk)
            engine.compile(chunk, sink).result(60)
            stored = bench.library.store.open(key)
            kv = torch.empty(5, 2, 8, len(stored.inputs), 64)
            list(stored.read_layers(kv))
            found.append(kv)
        torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)
