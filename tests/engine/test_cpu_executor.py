"""The executor of a decoder with a program in C answers as the model's own modules do."""

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

from mpic.engine.native.cpu_executor import CpuExecutor
from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.executor import TorchExecutor
from mpic.kernels.stream import SECTION
from mpic.model.own_modules import KernelLinear
from mpic.model.program import NOTE, TOKENS_NOTE

pytestmark = needs_fused
TOKENS = (9, 14, 84)
"""Answers of different lengths, so that batches of three, two and one are decoded."""
LONG = prompt_of(ids(6, SECTION - 10))
"""Its own tokens outgrow a section of the kernel that attends."""


def _answers(engine):
    """Return tokens and logits of answers over shared chunks and of one without, decoded together."""
    chunks = [text_chunk(ids(seed, n)) for seed, n in ((1, 40), (2, 25))]
    prompts = [prompt_of(ids(seed, 6), *chunks[: 1 + seed], ids(seed + 9, 5)) for seed in range(2)]
    asked = zip((*prompts, LONG), TOKENS, strict=True)
    streams = submit_together(engine, [request_of(p, "mpic-4", n, logprobs=300) for p, n in asked])
    return [logits_of(stream, n) for stream, n in zip(streams, TOKENS, strict=True)]


def _counted(engine, name="fused_steps"):
    return engine.stats()["counters"].get(name, 0)


def _both(make_engine, name, loaded):
    """Return the answers of the model's modules and of its program, and the engine of the latter."""
    program, loaded.program = loaded.program, None
    usual = make_engine(name, loaded, adapter=None)
    assert type(usual.executor) is TorchExecutor
    expected = _answers(usual)
    assert not _counted(usual) and not _counted(usual, "fused_block_steps")
    loaded.program = program
    engine = make_engine(name, loaded, adapter=None)
    assert type(engine.executor) is CpuExecutor
    return expected, _answers(engine), engine


def _assert_near(expected, found, tolerance=1e-4):
    for (wanted, wanted_logits), (got, logits) in zip(expected, found, strict=True):
        assert got == wanted
        torch.testing.assert_close(logits, wanted_logits, atol=tolerance, rtol=tolerance)


CASES = {
    "llama": ("llama", torch.float32, None),
    "biases": ("qwen2", torch.float32, None),
    "norms of heads": ("qwen3", torch.float32, None),
    "three axes of positions": ("qwen2_vl", torch.float32, None),
    "keys and values in 16 bits": ("llama", torch.float32, torch.float16),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_program_are_those_of_the_modules(case, make_engine):
    name, dtype, kv_dtype = CASES[case]
    expected, found, engine = _both(make_engine, name, loaded_model(name, dtype, kv_dtype=kv_dtype))
    _assert_near(expected, found, 1e-4 if kv_dtype is None else 4e-3)
    assert _counted(engine) >= max(TOKENS) - 4 and engine.executor.tables.advanced > 64
    assert _counted(engine, "fused_block_steps")


def test_an_output_projection_of_another_kind_is_run_as_it_is(make_engine):
    class Louder(KernelLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make_model("llama")[0]
    loud = Louder(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    loud.weight, model.lm_head = model.lm_head.weight, loud
    loaded = loaded_model(model=model)
    assert loaded.program is not None and "output projection" in loaded.info.details[TOKENS_NOTE]
    expected, found, engine = _both(make_engine, "llama", loaded)
    _assert_near(expected, found)
    assert not _counted(engine) and _counted(engine, "fused_block_steps")
    assert "output projection" in engine.executor.what


def test_the_executor_says_what_it_does_and_why(make_engine, caplog):
    loaded = loaded_model()
    with caplog.at_level("INFO"):
        make_engine("llama", loaded, adapter=None)
    said = loaded.info.details["executor"]
    assert said in caplog.text and said.startswith("a program in C") and "proved" in said
    loaded.choose_attention("reference")
    assert type(make_engine("llama", loaded, adapter=None).executor) is TorchExecutor
    assert loaded.info.details["executor"].startswith("torch runs the model's modules, reference attends")
    assert "cpu-stream" in loaded.info.details["executor"] and "cpu-stream" in loaded.info.details[NOTE]


def test_an_attention_that_was_asked_for_is_not_replaced_by_the_program(make_engine):
    pytest.importorskip("triton")
    loaded = loaded_model()
    assert loaded.program is not None
    loaded.choose_attention("triton")
    engine = make_engine("llama", loaded, adapter=None)
    assert type(engine.executor) is TorchExecutor and "triton" in loaded.info.details["executor"]


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
    calls, decoded = [], CpuExecutor._decoded
    monkeypatch.setattr(
        CpuExecutor, "_decoded", lambda *given: decoded(*given) if calls.append(1) or len(calls) % 3 else None
    )
    expected, found, engine = _both(make_engine, "llama", loaded_model())
    _assert_near(expected, found)
    assert 0 < _counted(engine) < len(calls)


def test_tokens_rotations_and_tables_that_do_not_fit_are_refused(make_engine):
    loaded = loaded_model()
    engine = make_engine("llama", loaded, adapter=None)
    engine.submit(request_of(prompt_of(ids(30, 20)), "full", 4)).result()
    decoder, turns = engine.executor.decoder, loaded.program.rotations(torch.arange(1)[None])
    for tokens in ([-1], [decoder.vocabulary], [1, 2]):
        with pytest.raises(ValueError, match="tokens"):
            decoder(tokens, *turns)
    for wrong in (turns[0][:, 1:], turns[0].double(), turns[0].repeat(2, 1)):
        with pytest.raises(ValueError, match="are no rotations of 1 rows"):
            decoder([1], turns[0], wrong)
    rows, writes = engine.executor._used
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
        def step(*given):
            with turn:  # until the other has taken a step, or has none to take
                turn.wait_for(lambda: order[-1:] != [number], timeout=0.2)
                order.append(number)
                turn.notify_all()
                return run(*given)

        return step

    for number, engine in enumerate(engines):
        engine.executor._decoded = in_turns(number, engine.executor._decoded)
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
