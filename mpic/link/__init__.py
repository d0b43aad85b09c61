"""Linking: the registry of policies, and plans.

To add a policy, write one file in ``mpic/link/policies`` and one line in ``POLICIES``; see "To add" in STRUCTURE.md for
the rest.
"""

from __future__ import annotations

import re
from functools import lru_cache

from mpic.errors import UnknownPolicy, cut
from mpic.link.plan import LinkPlan, SegmentShape, make_plan
from mpic.link.policies.a3 import A3
from mpic.link.policies.attnlink import AttnLink
from mpic.link.policies.block import Block
from mpic.link.policies.cacheblend import CacheBlend
from mpic.link.policies.full import Full
from mpic.link.policies.legolink import LegoLink
from mpic.link.policies.legolink_0 import LegoLink0
from mpic.link.policies.mpic import MPIC
from mpic.link.policies.nocache import NoCache
from mpic.link.policies.packet import Packet
from mpic.link.policies.packet_k import PacketK
from mpic.link.policies.prefix import Prefix
from mpic.link.policies.random import Random
from mpic.link.policies.reuse import Reuse
from mpic.link.policies.reuse_2step import ReuseTwoStep
from mpic.link.policy import (
    BARE,
    ChunkPlace,
    DynamicPolicy,
    Evidence,
    Need,
    Policy,
    Ranges,
    Wrapping,
    ranges_of,
)

POLICIES: tuple[type[Policy], ...] = (
    Full,
    Prefix,
    Reuse,
    ReuseTwoStep,
    MPIC,
    LegoLink,
    AttnLink,
    Block,
    Random,
    CacheBlend,
    A3,
    NoCache,
    LegoLink0,
    Packet,
    PacketK,
)


_LONGEST = 64
"""Maximum characters of a text that is looked up among policies, because lookups are cached."""


AUTO = "auto"
"""Stands for a policy where a server accepts one; the server chooses it for its model (``mpic.server.auto``)."""


def policy_names() -> list[str]:
    """Return the syntax of each policy."""
    return [cls.syntax for cls in POLICIES]


@lru_cache(maxsize=64)
def _named(text: str) -> Policy | None:
    for cls in sorted(POLICIES, key=lambda cls: len(cls.parameters())):  # legolink-0 before legolink-K
        policy = cls.parse(text)
        if policy is not None:
            return policy
    return None


def parse_policy(text: str) -> Policy:
    """Parse a policy's short string, the same in REST, CLI, SDK and web interface.

    Raises:
        UnknownPolicy: there is no such policy, or its number is out of bounds; the message lists the policies.
    """
    if not isinstance(text, str):
        raise UnknownPolicy(
            f"a policy is a string such as 'mpic-32', not {type(text).__name__}", param="mpic.policy"
        )
    plain = re.sub(r"-0+(?=\d)", "-", text)  # legolink-00 is legolink-0
    policy = _named(plain) if len(plain) <= _LONGEST else None
    if policy is not None:
        return policy
    raise UnknownPolicy(
        f"unknown policy '{cut(text)}'; available: {', '.join([AUTO, *policy_names()])}", param="mpic.policy"
    )


def named_policy(text: str) -> Policy | None:
    """Parse a policy or ``auto`` as a server accepts them. Return None for ``auto``. Raise UnknownPolicy."""
    return None if text == AUTO else parse_policy(text)


__all__ = [
    "AUTO",
    "BARE",
    "POLICIES",
    "ChunkPlace",
    "DynamicPolicy",
    "Evidence",
    "LinkPlan",
    "Need",
    "Policy",
    "Ranges",
    "SegmentShape",
    "Wrapping",
    "make_plan",
    "named_policy",
    "parse_policy",
    "policy_names",
    "ranges_of",
]
