"""Decoding steps that begin with tokens give the logits of fused steps that begin with embeddings, to the last bit."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise

import pytest
import torch
from engine_kit import ids, logits_of, prompt_of, request_of, submit_together, text_chunk
from families import make_model
from fused_kit import loaded_model, needs_fused

from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.fused_decode import ROTATED
from mpic.kernels.stream import SECTION
from mpic.model.fused_layers import TOKENS_NOTE
from mpic.model.kernel_linear import KernelLinear

pytestmark = needs_fused
TOKENS = (9, 14, ROTATED + 20)
"""Answers of different lengths, so that batches of three, two and one are decoded, and rotations run out."""
LONG = prompt_of(ids(6, SECTION - 10))
"""Its own tokens outgrow a section of the kernel that attends."""


def _answers(engine):
    """Returns tokens and logits of answers over shared chunks and of one without, decoded together."""
    chunks = [text_chunk(ids(seed, n)) for seed, n in ((1, 40), (2, 25))]
    prompts = [prompt_of(ids(seed, 6), *chunks[: 1 + seed], ids(seed + 9, 5)) for seed in range(2)]
    asked = zip((*prompts, LONG), TOKENS, strict=True)
    streams = submit_together(engine, [request_of(p, "mpic-4", n, logprobs=300) for p, n in asked])
    return [logits_of(stream, n) for stream, n in zip(streams, TOKENS, strict=True)]


def _counted(engine, name="steps_from_tokens"):
    return engine.stats()["counters"].get(name, 0)


def _both(make_engine, name, loaded):
    """Returns the answers without and with steps that begin with tokens, and the engine of the latter."""
    usual = make_engine(name, loaded, adapter=None)
    usual.runner.static = None
    expected = _answers(usual)
    engine = make_engine(name, loaded, adapter=None)
    return expected, _answers(engine), engine


def _assert_equal(expected, found):
    for (wanted, wanted_logits), (got, logits) in zip(expected, found, strict=True):
        assert got == wanted and torch.equal(logits, wanted_logits)


CASES = {
    "llama": ("llama", torch.float32, None),
    "biases": ("qwen2", torch.float32, None),
    "norms of heads, bf16": ("qwen3", torch.bfloat16, None),
    "three axes of positions": ("qwen2_vl", torch.float32, None),
    "keys and values in 16 bits": ("llama", torch.float32, torch.float16),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_runners_other_way(case, make_engine):
    name, dtype, kv_dtype = CASES[case]
    expected, found, engine = _both(make_engine, name, loaded_model(name, dtype, kv_dtype=kv_dtype))
    _assert_equal(expected, found)
    assert _counted(engine) >= max(TOKENS) - 4 and engine.runner.tables.advanced > ROTATED


@pytest.mark.parametrize("what", ["hook", "head", "embedding", "forward"])
def test_what_has_changed_around_the_layers_is_run_through_its_modules(what, make_engine):
    loaded, seen = loaded_model(), []
    head, embedding = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    assert loaded.fused.begins_with_tokens()
    if what == "hook":
        head.register_forward_hook(lambda module, inputs, out: seen.append(1) or 2 * out)
    elif what == "forward":
        embedding.forward = lambda tokens: type(embedding).forward(embedding, tokens) + 1
    else:
        module = head if what == "head" else embedding
        module.weight = torch.nn.Parameter(module.weight * 2, requires_grad=False)
    expected, found, engine = _both(make_engine, "llama", loaded)
    _assert_equal(expected, found)
    assert not _counted(engine) and _counted(engine, "fused_steps")
    assert bool(seen) == (what == "hook")


def test_an_output_projection_of_another_kind_is_run_as_it_is(make_engine):
    class Louder(KernelLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make_model("llama")[0]
    model.lm_head.__class__ = Louder
    loaded = loaded_model(model=model)
    assert loaded.fused is not None and not loaded.fused.begins_with_tokens()
    assert "output projection" in loaded.info.details[TOKENS_NOTE]
    expected, found, engine = _both(make_engine, "llama", loaded)
    _assert_equal(expected, found)
    assert not _counted(engine) and _counted(engine, "fused_steps")


def test_steps_begin_with_tokens_again_when_other_requests_have_come_and_gone(make_engine):
    """Tables of other rows, in other numbers, and the first ones again."""
    loaded = loaded_model()
    engine = make_engine("llama", loaded, adapter=None)
    first = _answers(engine)
    between = engine.submit(request_of(prompt_of(ids(30, 20)), "full", 40))
    between.result()
    before = _counted(engine)
    for (wanted, wanted_logits), (got, logits) in zip(first, _answers(engine), strict=True):
        assert got == wanted
        # what the prefix cache holds is not computed again, so that logits differ by rounding
        torch.testing.assert_close(logits, wanted_logits, atol=1e-4, rtol=1e-4)
    assert _counted(engine) > before


def test_steps_that_are_run_in_another_way_in_between_are_counted_in_the_positions(make_engine, monkeypatch):
    loaded = loaded_model()
    calls, begins = [], loaded.fused.begins_with_tokens
    monkeypatch.setattr(
        loaded.fused, "begins_with_tokens", lambda: calls.append(1) or (len(calls) % 3 > 0 and begins())
    )
    expected, found, engine = _both(make_engine, "llama", loaded)
    _assert_equal(expected, found)
    assert 0 < _counted(engine) < _counted(engine, "fused_steps")


def test_tokens_rotations_and_tables_that_do_not_fit_are_refused(make_engine):
    loaded = loaded_model()
    engine = make_engine("llama", loaded, adapter=None)
    engine.submit(request_of(prompt_of(ids(30, 20)), "full", 4)).result()
    decoder, turns = engine.runner.static._decoder, loaded.fused.rotations(torch.arange(3)[None])
    half = turns[0].shape[1]
    decoder.rotate(*(table.view(3, 1, half) for table in turns))
    for tokens in ([-1], [decoder.vocabulary], [1, 2]):
        with pytest.raises(ValueError, match="tokens"):
            decoder(tokens, 0)
    with pytest.raises(ValueError, match="no rotations of step 3"):
        decoder([1], 3)
    for wrong in (turns[0].view(1, 3, half), turns[0].double().view(3, 1, half)):
        with pytest.raises(ValueError, match="are no rotations"):
            decoder.rotate(wrong, wrong)
    rows, writes = engine.runner.static._used
    writes.count += 1
    with pytest.raises(ValueError, match="does not write"):
        decoder.use(rows, writes)


def test_two_engines_over_one_model_decode_in_turns(make_engine):
    """Each has tables and logits of its own, whichever of them took the last step."""
    loaded = loaded_model()
    engines = [make_engine("llama", loaded, adapter=None) for _ in range(2)]
    prompts = [prompt_of(ids(seed, 30)) for seed in (40, 41)]
    asked = [request_of(prompt, "full", 40, logprobs=300) for prompt in prompts]
    alone = [logits_of(engine.submit(one), 40) for engine, one in zip(engines, asked, strict=True)]
    turn, order = threading.Condition(), []

    def in_turns(number, run):
        def step(slices, ids=None):
            with turn:  # until the other has taken a step, or has none to take
                turn.wait_for(lambda: order[-1:] != [number], timeout=0.2)
                order.append(number)
                turn.notify_all()
                return run(slices, ids)

        return step

    for number, engine in enumerate(engines):
        engine.runner.static.run = in_turns(number, engine.runner.static.run)
    asked = [request_of(prompt, "full", 40, logprobs=300) for prompt in prompts]
    streams = [engine.submit(one) for engine, one in zip(engines, asked, strict=True)]
    for stream, (wanted, wanted_logits) in zip(streams, alone, strict=True):
        got, logits = logits_of(stream, 40)
        assert got == wanted
        torch.testing.assert_close(logits, wanted_logits, atol=1e-4, rtol=1e-4)
    assert sum(one != other for one, other in pairwise(order)) > 5  # as often as the machine lets them


def test_a_closed_engine_leaves_nothing_of_its_pool_with_the_model(make_engine):
    loaded = loaded_model()
    engine = NativeEngine(loaded, pages=64, page_size=8)
    engine.submit(request_of(prompt_of(ids(30, 20)), "full", 8)).result()
    assert _counted(engine)
    arena = weakref.ref(engine.pool.arena)
    engine.close()
    del engine
    gc.collect()
    assert arena() is None


def test_answers_of_requests_that_are_preempted_and_moved_are_the_same(make_engine, monkeypatch):
    """Their extents change between two steps."""
    loaded = loaded_model()
    prompts = [prompt_of(ids(seed, 30)) for seed in (50, 51, 52)]
    wide = make_engine("llama", loaded, adapter=None)
    asked = lambda: [request_of(prompt, "full", 60) for prompt in prompts]
    expected = [stream.result().token_ids for stream in submit_together(wide, asked())]
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 8)
    narrow = make_engine("llama", loaded, adapter=None, pages=26)
    assert [stream.result().token_ids for stream in submit_together(narrow, asked())] == expected
    assert _counted(narrow, "preemptions") and _counted(narrow)


def test_a_step_that_is_launched_ahead_gives_the_same_answers(make_engine):
    """Its logits take the place of those that are being drawn from."""
    loaded, found = loaded_model(), []
    prompts = [prompt_of(ids(seed, 30)) for seed in (60, 61, 62)]
    for ahead in (False, True):
        engine = make_engine("llama", loaded, adapter=None, ahead=ahead)
        asked = [
            request_of(prompt, "full", 12 + 9 * number, temperature=0.7 * (number % 2), seed=number)
            for number, prompt in enumerate(prompts)
        ]
        found.append([stream.result().token_ids for stream in submit_together(engine, asked)])
        assert _counted(engine) and bool(_counted(engine, "steps_ahead")) == ahead
    assert found[0] == found[1]
