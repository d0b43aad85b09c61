"""The engine's last test before it serves: a link must give the same result as a plain prefill.

A chunk that is compiled behind start tokens and linked behind the same ones is compiled exactly as a plain prefill
computes it, so reusing all of it is exact. The test exercises everything that a request goes through: the compile,
the chunk file, the scheduler, the paged cache, attention, and, with several workers, all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from mpic.engine.base import Delta, GenerationRequest, Sampling
from mpic.engine.stream import DeltaStream
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.errors import ModelRefused, MPICError
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.link import Policy, parse_policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment

OWNER = "@self-test"
CHUNK, TEXT = 45, 3
"""Tokens of the chunk and of the text behind it."""
POLICY = parse_policy("legolink-0")
"""A policy that recomputes nothing and compiles chunks behind start tokens, so that the chunk is not at the start of
the prompt."""
ALTERNATIVES = 20
TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 3e-1}
"""Maximum difference of a log-probability."""

Submit = Callable[[GenerationRequest, Chunk], DeltaStream]


def link_test(model: ModelDescription, submit: Submit) -> None:
    """Compare a link with a plain prefill.

    Args:
        submit: submits a request with a chunk that is compiled for it and not kept.

    Raises:
        ModelRefused: the two differ, one of them could not be computed, or the chunk was not reused.
    """
    ids = tuple(model.some_words(CHUNK + TEXT, seed=1))
    chunk = Chunk(ChunkKey.of_text(f"{OWNER} {ids}"), OWNER, ids[:CHUNK])
    start = TextSegment((model.bos,) * POLICY.wrapping.sink)
    prompt = Prompt((start, ChunkSegment(chunk), TextSegment(ids[CHUNK:])))
    try:
        plain, linked = (_answer(submit, prompt, chunk, policy) for policy in (parse_policy("full"), POLICY))
    except MPICError as error:
        raise ModelRefused(f"linking in vLLM: the self-test could not run: {error.message}") from error
    if linked.usage.reused != CHUNK:
        raise ModelRefused(
            f"linking in vLLM: {linked.usage.reused} of {CHUNK} tokens of a chunk were reused, the others were "
            f"computed instead ({linked.usage.chunks[0].reason})"
        )
    chosen, expected = max(plain.logprobs[0].top, key=lambda entry: entry[1])
    limit = TOLERANCE.get(model.dtype, TOLERANCE["float32"])
    difference = abs(dict(linked.logprobs[0].top).get(chosen, float("inf")) - expected)
    if not difference <= limit:
        raise ModelRefused(
            "linking in vLLM: a reused chunk does not give what a plain prefill gives (log-probabilities differ by "
            f"{difference:.1e}, limit {limit:.0e})"
        )


def _answer(submit: Submit, prompt: Prompt, chunk: Chunk, policy: Policy) -> Delta:
    """Return an answer of one token under a policy, with the log-probabilities of the likeliest tokens."""
    sampling = Sampling(max_tokens=1, logprobs=ALTERNATIVES, ignore_eos=True)
    request = GenerationRequest(f"self-test-{policy.name}", prompt, policy, sampling, OWNER)
    return submit(request, chunk).result()
