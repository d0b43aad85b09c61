"""KV Packet with recomputed heads."""

from __future__ import annotations

from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policies.mpic import MPIC
from mpic.link.policy import Wrapping


@dataclass(frozen=True)
class PacketK(MPIC):
    """KV Packet (arXiv 2604.13226) under MPIC-k: the first ``k`` tokens of every packet are recomputed, those of its
    header among them, so that they depend on what stands before it. This combination is not in the paper."""

    syntax = "packet-K"
    summary = "Like packet, but recomputes the first K tokens of each, including the trained ones in front."
    paper = papers.KV_PACKET
    examples = ("packet-16",)
    wrapping = Wrapping(packet=True)
