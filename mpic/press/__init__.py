"""The registry of presses. To add one: one file in ``mpic/press/presses``, one line in ``PRESSES`` (STRUCTURE.md)."""

from __future__ import annotations

import functools

from mpic.errors import UnknownPress, cut
from mpic.press.press import PROTECTED, LayerKV, Press
from mpic.press.presses.cur import CUR
from mpic.press.presses.knorm import KNorm
from mpic.press.presses.leverage import Leverage
from mpic.press.presses.random import Random
from mpic.press.presses.snapkv import SnapKV
from mpic.press.presses.streaming import Streaming
from mpic.press.presses.tova import TOVA

PRESSES: tuple[type[Press], ...] = (Random, KNorm, Streaming, CUR, Leverage, TOVA, SnapKV)

NONE = "none"
"""The name by which a request asks for uncompressed chunks, whatever the server's default."""


def press_names() -> list[str]:
    """Return the syntax of each press."""
    return [cls.syntax for cls in PRESSES]


@functools.lru_cache(64)
def parse_press(text: str) -> Press | None:
    """Parse a press's short string, the same in configuration, REST, CLI and SDK. Return None for ``none`` and the
    empty string.

    Raises:
        UnknownPress: there is no such press, or a number is out of bounds; the message lists the presses.
    """
    if text in ("", NONE):
        return None
    for cls in PRESSES:
        press = cls.parse(text)
        if press is not None:
            return press
    raise UnknownPress(
        f"unknown press '{cut(text)}'; available: {NONE}, {', '.join(press_names())} (R percent of the tokens are "
        f"removed; -P behind it protects the first P, otherwise {PROTECTED}; -P-L also the last L)",
        param="mpic.press",
    )


__all__ = [
    "NONE",
    "PRESSES",
    "PROTECTED",
    "LayerKV",
    "Press",
    "parse_press",
    "press_names",
]
