"""Descriptions and figures of the policies, for the menu and the page that helps to choose one."""

from __future__ import annotations

from typing import Any

from mpic.errors import UnknownPolicy
from mpic.link import POLICIES, parse_policy
from mpic.press import NONE, parse_press

FIRST = ("mpic-16", "mpic-32", "reuse", "prefix", "full")
"""Concrete policies that are listed first."""

BY_SYNTAX = {policy.syntax: policy for policy in POLICIES}

MEASURED: dict[str, tuple[float, float]] = {
    "cacheblend-15": (-1.4, 2.76),
    "legolink-32": (-1.4, 16.92),
    "mpic-32": (-1.4, 16.92),
    "block-2": (-1.4, 16.92),
    "legolink-16": (-1.4, 28.84),
    "mpic-16": (-1.4, 28.84),
    "block-1": (-1.4, 28.84),
    "legolink-8": (-1.4, 44.44),
    "mpic-8": (-1.4, 44.44),
    "cacheblend-5": (-0.9, 4.0),
    "mpic-64": (-0.9, 9.24),
    "attnlink-16": (-0.9, 27.23),
    "full": (0.0, 1.0),
    "prefix": (0.0, 1.0),
    "cacheblend-50": (0.0, 1.36),
    "random-15": (0.5, 6.31),
    "legolink-2": (0.5, 74.65),
    "legolink-0": (5.0, 96.49),
    "reuse": (7.2, 96.49),
    "reuse-2step": (9.0, 177.72),
    "nocache": (49.5, 186.45),
}
"""Policy -> points lost of 100, and how many times fewer operations than ``full``, on the default model: the columns
``lost`` and ``FLOPs`` of docs/evidence/README.md, which a test compares."""

SHARES = ("30", "50")
"""Percent of tokens removed by the presses that are offered; requests may name others."""

RETRIEVAL = {
    "off": ("No search", "Answers use your files only."),
    "always": (
        "Always search",
        "Your words are looked up in the reference library before the answer begins.",
    ),
    "auto": (
        "Search when needed",
        "The model looks things up in the reference library while it answers.",
    ),
}
"""``mpic.retrieval`` -> its name on the page, and what it does."""


def menu(forms: list[str], default: str) -> list[dict[str, Any]]:
    """Return the concrete policies to choose from, the common ones first: ``name``, ``about``, ``uses_chunks``, and
    ``lost`` and ``fewer`` if it was measured.

    Args:
        forms: syntax of the policies that the server offers (``mpic-K``).
        default: the server's default policy.
    """
    found = []
    for name in offered(forms, default):
        lost, fewer = MEASURED.get(name, (None, None))
        uses = parse_policy(name).uses_chunks
        found.append(
            {"name": name, "about": explain(name), "uses_chunks": uses, "lost": lost, "fewer": fewer}
        )
    return found


def offered(forms: list[str], default: str) -> list[str]:
    """Return the names of ``menu``."""
    concrete: list[str] = []
    for form in forms:
        examples = BY_SYNTAX[form].examples if form in BY_SYNTAX else ()
        concrete += examples or (form,)
    return list(dict.fromkeys([default, *(name for name in FIRST if name in concrete), *concrete]))


def press_menu(forms: list[str], default: str) -> list[dict[str, str]]:
    """Return the presses to choose from, the server's own choice first: ``name``, ``about``; nothing where the server
    has none.

    Args:
        forms: syntax of the presses that the server offers (``snapkv-R``).
    """
    if not forms:
        return []
    shares = [form.removesuffix("R") + share for form in forms for share in SHARES]
    names = dict.fromkeys([default or NONE, NONE, *shares])
    return [{"name": name, "about": explain_press(name)} for name in names]


def explain_press(name: str) -> str:
    """Return one line about a press."""
    press = parse_press(name)
    return press.explanation if press is not None else "Images and documents keep all of their tokens."


def explain(policy: str) -> str:
    """Return one line about a policy or a form such as ``mpic-K``; empty for unknown ones."""
    if policy in BY_SYNTAX:
        return BY_SYNTAX[policy].summary
    try:
        return parse_policy(policy).explanation
    except UnknownPolicy:
        return ""
