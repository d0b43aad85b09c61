"""The methods that an evaluation compares: a policy with the press of the chunks that it links, written
``mpic-16+snapkv-50``, and the baseline ``single`` (``single+snapkv-50``; ``mpic_lab.eval.single``)."""

from __future__ import annotations

from typing import NamedTuple

from mpic.errors import UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link import Policy, Wrapping, parse_policy
from mpic.link.policies.reuse import Reuse
from mpic.link.pressing import check_presses
from mpic.press import NONE, parse_press
from mpic.prompt import Prompt
from mpic_lab.eval.single import SINGLE, joined


class Linking(NamedTuple):
    """A policy that links chunks compressed by a press (``none``: uncompressed ones). ``single``: the beginning of a
    prompt, to the end of its last document, is one chunk."""

    policy: Policy
    press: str
    single: bool = False

    @property
    def name(self) -> str:
        policy = SINGLE if self.single else self.policy.name
        return policy if self.press == NONE else f"{policy}+{self.press}"

    def over(self, prompt: Prompt) -> Prompt:
        """Return a prompt whose chunks are compressed by the press.

        Raises:
            UnsupportedParameter: ``single`` does not take the prompt.
        """
        return (joined(prompt) if self.single else prompt).pressed(self.press)

    def compiles(self, prompt: Prompt) -> list[tuple[Chunk, Wrapping]]:
        """Return the chunks that its answer to a prompt links, and how each is compiled. It returns none if the policy
        reads no compiled chunk, and if ``single`` does not take the prompt: asking it then says why."""
        if not self.policy.uses_chunks:
            return []
        try:
            return [(chunk, self.policy.wrapping) for chunk in self.over(prompt).chunks]
        except UnsupportedParameter:
            return []


def parse_linking(text: str) -> Linking:
    """Parse a policy's name, with or without a press after it.

    Raises:
        UnknownPolicy, UnknownPress: there is no policy or press of that name.
        UnsupportedParameter: the policy and the press cannot be combined.
    """
    if not isinstance(text, str):
        return Linking(parse_policy(text), NONE)
    name, _, pressed = text.partition("+")
    single = name == SINGLE
    policy, press = Reuse() if single else parse_policy(name), parse_press(pressed)
    check_presses(policy, [pressed])
    return Linking(policy, NONE if press is None else press.name, single)
