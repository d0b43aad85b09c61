"""Checks that refuse a request before anything is computed, shared by both engines."""

from __future__ import annotations

import math

from mpic import memory
from mpic.engine.base import MOST_TOP_K, GenerationRequest, Sampling
from mpic.errors import ContextLengthExceeded, EmptyPrompt, MPICError, OutOfMemory, UnsupportedParameter
from mpic.link import LinkPlan, Policy
from mpic.prompt.segments import Prompt, TextSegment


def check_prompt(prompt: Prompt) -> None:
    """Raise EmptyPrompt when a prompt does not end with text of its own, after which an answer could begin."""
    last = prompt.segments[-1] if prompt.segments else None
    if not isinstance(last, TextSegment) or len(last) == 0:
        raise EmptyPrompt("a prompt must end with text of its own", param="messages")


def check_sampling(sampling: Sampling) -> None:
    """Refuse sampling parameters that are out of range.

    Raises:
        UnsupportedParameter: names the parameter.
    """
    s = sampling
    for name, good, rule in (
        ("max_tokens", s.max_tokens is None or s.max_tokens >= 1, "at least 1"),
        ("temperature", math.isfinite(s.temperature) and s.temperature >= 0, "0 or more"),
        ("top_p", 0 < s.top_p <= 1, "above 0 and at most 1"),
        ("top_k", 0 <= s.top_k <= MOST_TOP_K, f"0 to {MOST_TOP_K}"),
        ("min_p", 0 <= s.min_p <= 1, "0 to 1"),
        ("presence_penalty", abs(s.presence_penalty) <= 2, "-2 to 2"),
        ("frequency_penalty", abs(s.frequency_penalty) <= 2, "-2 to 2"),
        ("repetition_penalty", 0.01 <= s.repetition_penalty <= 100, "0.01 to 100"),
        ("logit_bias", all(abs(bias) <= 100 for _, bias in s.logit_bias), "-100 to 100"),
        ("logprobs", s.logprobs is None or s.logprobs >= 0, "0 or more"),
    ):
        if not good:
            raise UnsupportedParameter(f"{name} must be {rule}, not {getattr(s, name)}", param=name)


def check_grammar(request: GenerationRequest) -> None:
    """Refuse options that an answer with a grammar cannot follow.

    Raises:
        UnsupportedParameter: names the option.
    """
    if request.grammar is None:
        return
    if request.sampling.ignore_eos:
        raise UnsupportedParameter(
            "an answer in a given form ends where the form ends: ignore_eos cannot go on",
            param="mpic.ignore_eos",
        )
    if request.retrieval is not None:
        raise UnsupportedParameter(
            "the model cannot ask for references within a given form: use mode 'always'",
            param="mpic.retrieval.mode",
        )


def check_context(length: int, asked: int | None, context: int) -> None:
    """Refuse a prompt that does not fit a model together with its answer.

    Args:
        length: tokens of the prompt.
        asked: number of answer tokens that the request asks for; if it names none, at least one must fit.
        context: maximum number of tokens of prompt and answer together.

    Raises:
        ContextLengthExceeded: they do not fit.
    """
    if length >= context or (asked is not None and length + asked > context):
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens{'' if asked is None else f' and {asked} were asked for'}; "
            f"the model's context is {context}",
            param="messages",
            prompt_tokens=length,
            context_length=context,
        )


def check_extends(plan: LinkPlan, shorter: LinkPlan, policy: Policy) -> None:
    """Raise UnsupportedParameter when adding references to a request would change the part of its plan that has
    already been computed."""
    if not plan.extends(shorter):
        raise UnsupportedParameter(
            f"policy {policy} would choose other tokens for a longer prompt: it cannot take references while decoding",
            param="mpic.policy",
        )


def as_failure(error: BaseException) -> MPICError:
    """Convert any exception to an error of ``mpic.errors``."""
    if isinstance(error, MPICError):
        return error
    short = as_shortage(error)
    return short if isinstance(short, MPICError) else MPICError(f"{type(error).__name__}: {error}")


def as_shortage(error: BaseException) -> BaseException:
    """Return OutOfMemory in place of an error that reports exhausted memory; others as they are."""
    if isinstance(error, MPICError) or not memory.is_exhaustion(error):
        return error
    short = OutOfMemory("the server does not have enough memory for this request now")
    short.__cause__ = error
    return short
