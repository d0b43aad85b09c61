"""The methods that an evaluation compares: a policy with the press of the chunks that it links, written
``mpic-16+snapkv-50``."""

from __future__ import annotations

from typing import NamedTuple

from mpic.link import Policy, Wrapping, parse_policy
from mpic.link.pressing import check_presses
from mpic.press import NONE, parse_press
from mpic.prompt import Prompt


class Linking(NamedTuple):
    """A policy that links chunks compressed by a press (``none``: uncompressed ones)."""

    policy: Policy
    press: str

    @property
    def name(self) -> str:
        return self.policy.name if self.press == NONE else f"{self.policy}+{self.press}"

    @property
    def compiles(self) -> tuple[Wrapping, str] | None:
        """The wrapping with which its chunks are compiled; None when it reads no compiled chunk."""
        return (self.policy.wrapping, self.press) if self.policy.uses_chunks else None

    def over(self, prompt: Prompt) -> Prompt:
        """Returns a prompt whose chunks are compressed by the press."""
        return prompt.pressed(self.press)


def parse_linking(text: str) -> Linking:
    """Parses a policy's name, with or without a press after it.

    Raises:
        UnknownPolicy, UnknownPress: there is no policy or press of that name.
        UnsupportedParameter: the policy and the press cannot be combined.
    """
    if not isinstance(text, str):
        return Linking(parse_policy(text), NONE)
    name, _, pressed = text.partition("+")
    policy, press = parse_policy(name), parse_press(pressed)
    check_presses(policy, [pressed])
    return Linking(policy, NONE if press is None else press.name)
