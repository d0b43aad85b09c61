"""Full reuse in two steps."""

from __future__ import annotations

from dataclasses import dataclass

from mpic.link.policies.reuse import Reuse


@dataclass(frozen=True)
class ReuseTwoStep(Reuse):
    """Full reuse in the two steps of MPIC, section 3.2: the text is prefilled without the chunks, then the last token
    once more over everything. Kept for comparison: it launches two forwards and its text never sees a chunk."""

    syntax = "reuse-2step"
    summary = "Like reuse, in two steps: the text without images and documents, then its last token over everything."
    prefix = False
    two_step = True
