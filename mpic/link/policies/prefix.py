"""Prefix caching, the baseline of all papers."""

from __future__ import annotations

from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policies.full import Full


@dataclass(frozen=True)
class Prefix(Full):
    """Like ``full``, but the longest prefix that the user's earlier exact requests have computed is mapped. The
    baseline of MPIC (section 6.1), EPIC and CacheBlend, and the method of vLLM and SGLang (RadixAttention)."""

    syntax = "prefix"
    summary = "Reuses only the beginning of an earlier prompt. Exact."
    paper = papers.SGLANG
    prefix = True
