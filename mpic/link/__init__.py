"""Linking: plans, and the registry of policies.

To add a policy: one file in ``mpic/link/policies``, one line in ``REGISTRY``, one row in the tests' policy matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mpic.errors import PolicyNotBuilt, UnknownPolicy
from mpic.link.plan import (
    ChunkSlot,
    DynamicPolicy,
    LinkPlan,
    Policy,
    Ranges,
    SegmentShape,
    Span,
    make_plan,
)
from mpic.link.policies.cacheblend import CacheBlend
from mpic.link.policies.edges import AttnLink, Block
from mpic.link.policies.full import Full, Prefix
from mpic.link.policies.head import MPIC, LegoLink, LegoLink0
from mpic.link.policies.nocache import NoCache
from mpic.link.policies.random import Random
from mpic.link.policies.reuse import Reuse, ReuseTwoStep

MAX_K = 1_000_000

REGISTRY: dict[str, Callable[..., Policy]] = {
    "full": Full,
    "prefix": Prefix,
    "reuse": Reuse,
    "reuse-2step": ReuseTwoStep,
    "mpic-K": MPIC,
    "legolink-K": lambda k: LegoLink(k) if k else LegoLink0(),
    "attnlink-K": AttnLink,
    "block-N": Block,
    "random-R": Random,
    "cacheblend-R": CacheBlend,
    "nocache": NoCache,
}
NOT_BUILT = ("a3-R", "packet", "auto")

_FORM = re.compile(r"(?P<stem>[a-z0-9]+?)(?:-(?P<number>\d{1,9}))?")


def policy_names() -> list[str]:
    """How each available policy is written."""
    return [*REGISTRY, "legolink-0"]


def parse_policy(text: str) -> Policy:
    """Parse a policy's short string, the same in REST, CLI, SDK and UI.

    Raises:
        PolicyNotBuilt: a policy of the papers that this version does not have yet.
        UnknownPolicy: anything else; the message lists what there is.
    """
    if not isinstance(text, str):
        raise UnknownPolicy(
            f"a policy is a string such as 'mpic-32', not {type(text).__name__}", param="mpic.policy"
        )
    match = _FORM.fullmatch(text)
    stem, number = (match["stem"], match["number"]) if match else (text, None)
    if number is None and text in REGISTRY and text == text.lower():
        return REGISTRY[text]()
    form = next((f for f in REGISTRY if f.rstrip("KNR") == f"{stem}-"), None)
    if number is not None and form is not None:
        limit = 100 if form.endswith("R") else MAX_K
        if int(number) > limit:
            unit = "percent" if form.endswith("R") else "tokens or pages"
            raise UnknownPolicy(f"{text}: at most {limit} {unit}", param="mpic.policy")
        return REGISTRY[form](int(number))
    known = ", ".join(policy_names())
    for form in NOT_BUILT:
        if stem == form.split("-")[0] and (number is not None) == ("-" in form):
            message = f"policy '{text}' ({form}) is known but not built yet; available: {known}"
            raise PolicyNotBuilt(message, param="mpic.policy")
    raise UnknownPolicy(f"unknown policy '{text}'; available: {known}", param="mpic.policy")


__all__ = [
    "ChunkSlot",
    "DynamicPolicy",
    "LinkPlan",
    "Policy",
    "Ranges",
    "SegmentShape",
    "Span",
    "make_plan",
    "parse_policy",
    "policy_names",
]
