"""What can be refused before anything is computed, whichever engine would."""

from __future__ import annotations

import math

from mpic.engine.base import Sampling
from mpic.errors import EmptyPrompt, MPICError, UnsupportedParameter
from mpic.prompt.segments import Prompt, TextSegment


def check_prompt(prompt: Prompt) -> None:
    """Raises EmptyPrompt: there is no text of its own at the end, after which an answer could begin."""
    last = prompt.segments[-1] if prompt.segments else None
    if not isinstance(last, TextSegment) or len(last) == 0:
        raise EmptyPrompt("a prompt must end with text of its own", param="messages")


def check_sampling(sampling: Sampling) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        UnsupportedParameter: names the parameter.
    """
    s = sampling
    for name, good, rule in (
        ("max_tokens", s.max_tokens is None or s.max_tokens >= 1, "at least 1"),
        ("temperature", math.isfinite(s.temperature) and s.temperature >= 0, "0 or more"),
        ("top_p", 0 < s.top_p <= 1, "above 0 and at most 1"),
        ("top_k", s.top_k >= 0, "0 or more"),
        ("logprobs", s.logprobs is None or s.logprobs >= 0, "0 or more"),
    ):
        if not good:
            raise UnsupportedParameter(f"{name} must be {rule}, not {getattr(s, name)}", param=name)


def as_failure(error: BaseException) -> MPICError:
    """An error of the tree for whatever went wrong inside."""
    return error if isinstance(error, MPICError) else MPICError(f"{type(error).__name__}: {error}")
