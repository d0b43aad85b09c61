"""Checks that a policy can link chunks that a press has compressed (``mpic.press``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpic.errors import UnsupportedParameter
from mpic.link.policy import Policy
from mpic.press import parse_press


def check_presses(policy: Policy, presses: Iterable[str]) -> None:
    """Refuse a policy that recomputes tokens whose neighbours a press may have removed.

    The first tokens of a chunk, which every press keeps in every head, can be recomputed and the rest mapped as one
    range of slots. Anything else would take KV that is no longer there.

    Args:
        presses: names of the presses of the chunks that a request links; empty for uncompressed ones.

    Raises:
        UnsupportedParameter: the policy and a press cannot be combined.
    """
    if not policy.uses_chunks:
        return
    for name in set(presses):
        press = parse_press(name)
        if press is None:
            continue
        if policy.head is None:
            raise UnsupportedParameter(
                f"policy {policy} may recompute any token of a chunk, and press {press} removes some: take a policy "
                "that recomputes only first tokens (such as mpic-16, legolink-16, block-1, packet), or press none",
                param="mpic.press",
            )
        if policy.head > press.p:
            raise UnsupportedParameter(
                f"policy {policy} recomputes the first {policy.head} tokens of a chunk, and press {press} protects "
                f"{press.p}: ask for {replace(press, p=policy.head)}",
                param="mpic.press",
            )
