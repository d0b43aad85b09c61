"""Methods that are written as short strings with numbers in them, such as ``mpic-16``: policies and presses.

The registries, parsing, ``/health``, ``/v1/models``, the CLI's help, the web interface and the pages of the
documentation are made from these classes.
"""

from __future__ import annotations

import re
from abc import ABC
from dataclasses import Field, field, fields
from typing import Any, ClassVar, NamedTuple, Self

from mpic.errors import BadRequest


class Paper(NamedTuple):
    """A publication, by its short name and address."""

    name: str
    url: str


def parameter(unit: str, most: int, least: int = 0, **given: Any) -> Any:
    """Declare a number in a method's name as a dataclass field: field ``k`` stands for ``K`` in the syntax."""
    return field(metadata={"unit": unit, "least": least, "most": most}, **given)


def tokens(least: int = 0, **given: Any) -> Any:
    """Declare a number of tokens."""
    return parameter("tokens", 1_000_000, least, **given)


def percent(most: int = 100) -> Any:
    """Declare a share of tokens, 0 to ``most``."""
    return parameter("percent", most)


class Method(ABC):
    """A method. A subclass is a frozen dataclass whose fields are the numbers in its name.

    Class attributes:
        syntax: the form in which users write it; an upper-case letter stands for the field of that name, as in
        ``mpic-K``.
        summary: one line that helps users to choose.
        paper: the publication it comes from, or None for a control.
        unknown, param: the error for unknown names, and the request field that the error names.
    """

    syntax: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[Paper | None] = None
    unknown: ClassVar[type[BadRequest]]
    param: ClassVar[str]

    @classmethod
    def parameters(cls) -> tuple[Field[int], ...]:
        """Return the numbers in its name, in order."""
        return fields(cls)  # ty: ignore[invalid-argument-type] (its subclasses are dataclasses)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the method that ``text`` names, or None when it names another one.

        Raises:
            BadRequest: a number is out of its bounds.
        """
        return cls._parse(cls.syntax, text)

    @classmethod
    def _parse(cls, syntax: str, text: str) -> Self | None:
        match = re.fullmatch(re.sub("[A-Z]", r"(\\d{1,9})", syntax), text)
        if match is None:
            return None
        values = [int(group) for group in match.groups()]
        for value, one in zip(values, cls.parameters(), strict=False):
            unit, least, most = (one.metadata[key] for key in ("unit", "least", "most"))
            if value < least:
                raise cls.unknown(f"{text}: at least {least} {unit}", param=cls.param)
            if value > most:
                raise cls.unknown(f"{text}: at most {most} {unit}", param=cls.param)
        return cls(*values)

    @property
    def name(self) -> str:
        """The canonical short string; it parses back to an equal method."""
        return self._filled(self.syntax)

    @property
    def explanation(self) -> str:
        """The summary with the method's own numbers."""
        return self._filled(self.summary)

    def _filled(self, text: str) -> str:
        for one in self.parameters():
            text = re.sub(rf"\b{one.name.upper()}\b", str(getattr(self, one.name)), text)
        return text

    def __str__(self) -> str:
        return self.name
