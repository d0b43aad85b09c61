"""The self-test of an engine's links, with answers that no engine gave."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from vllm_kit import make_tokenizer

from mpic.engine.base import ChunkUse, Delta, GenerationUsage, TokenLogprob
from mpic.engine.vllm.frontend.linktest import CHUNK, link_test
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.errors import ModelRefused

MODEL = SimpleNamespace(tokenizer=make_tokenizer("llama"), image=None, bos=1, dtype="float32")
MODEL.some_words = partial(ModelDescription.some_words, MODEL)


def engine(reused: int, logprob: float = -0.5, reason: str | None = None):
    """Return what submits requests to an engine whose links give ``logprob`` where a plain prefill gives -0.5."""
    asked = []

    def submit(request, chunk):
        asked.append(request)
        linked = not request.policy.exact
        usage = GenerationUsage(reused=reused if linked else 0)
        usage.chunks = (ChunkUse(chunk.key, "", CHUNK, reused, CHUNK - reused, "none", reason=reason),)
        top = ((7, logprob if linked else -0.5), (8, -3.0))
        delta = Delta("x", (7,), (TokenLogprob(7, top[0][1], top),), "length", usage)
        return SimpleNamespace(result=lambda: delta)

    submit.asked = asked
    return submit


def test_a_link_that_gives_what_a_plain_prefill_gives_passes():
    submit = engine(CHUNK)
    link_test(MODEL, submit)
    plain, linked = submit.asked
    assert plain.policy.exact and not linked.policy.exact and plain.prompt == linked.prompt
    start, chunk, _ = linked.prompt.segments
    assert len(start) > 0 and len(chunk.chunk.token_ids) == CHUNK


def test_a_link_that_gives_something_else_is_refused():
    with pytest.raises(ModelRefused, match="does not give what a plain prefill gives"):
        link_test(MODEL, engine(CHUNK, logprob=-0.6))


@pytest.mark.parametrize(("reused", "reason"), [(0, "late"), (0, "mismatch"), (CHUNK - 1, None)])
def test_the_right_answer_is_refused_when_it_was_computed_and_not_linked(reused, reason):
    with pytest.raises(ModelRefused, match=f"{reused} of {CHUNK} tokens .*{reason}"):
        link_test(MODEL, engine(reused, reason=reason))
