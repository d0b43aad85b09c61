"""The base class of policies. A policy describes itself (``mpic.method``) and decides what a link recomputes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mpic.errors import UnknownPolicy
from mpic.method import Method

if TYPE_CHECKING:
    import torch

Ranges = tuple[tuple[int, int], ...]
"""Half-open token ranges within a chunk, ascending and disjoint."""


def ranges_of(tokens: Sequence[int]) -> Ranges:
    """Group ascending token indices into maximal ranges."""
    runs = [list(group) for _, group in groupby(enumerate(tokens), lambda pair: pair[1] - pair[0])]
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


class ChunkPlace(NamedTuple):
    """A chunk's place in a prompt: its length in tokens, its sequence index and its rotary base."""

    length: int
    start: int
    base: int


class Wrapping(NamedTuple):
    """Extra tokens that chunks are compiled with.

    Args:
        sink: BOS tokens in front, dropped afterwards (LegoLink-0 of EPIC, section 5.4).
        packet: a trained header and trailer around them, kept (KV Packet, section 3.1).
    """

    sink: int = 0
    packet: bool = False


BARE = Wrapping()
"""Chunks are compiled as they are."""


class Need(Enum):
    """An ability that a policy needs and not every engine has. The value is the reason, for error messages."""

    DECISION = "it looks at keys and values before it decides"
    TWO_STEPS = "it takes two steps"
    SINK = "its chunks are compiled behind start tokens"
    PACKET = "its chunks are compiled inside a trained adapter"


class Policy(Method):
    """Decides what a link recomputes. A subclass is a frozen dataclass whose fields are the numbers in its name.

    Class attributes (beside those of ``Method``):
        examples: concrete policies to offer; a policy without a number offers itself.
        exact: the result equals a full prefill; such KV may enter the exact prefix namespace.
        uses_chunks: False when no compiled chunk is ever read (full, prefix).
        prefix: reuse the request's own earlier prefixes.
        wrapping: extra tokens that its chunks are compiled with.
        two_step: compute the own tokens without the chunks first and the last token over everything in a second step
            (the two-step form of full reuse of MPIC, section 3.2).
        context: False when chunks are left out of the prompt (``nocache``).
    """

    unknown = UnknownPolicy
    param = "mpic.policy"
    examples: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False
    uses_chunks: ClassVar[bool] = True
    prefix: ClassVar[bool] = True
    wrapping: ClassVar[Wrapping] = BARE
    two_step: ClassVar[bool] = False
    context: ClassVar[bool] = True

    @abstractmethod
    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        """Return for each chunk the ranges of its tokens that the request recomputes."""

    @property
    def head(self) -> int | None:
        """The maximum number of a chunk's first tokens that it recomputes, if it recomputes no others; None if it may
        recompute other tokens, which needs all of the chunk's KV."""
        return None

    @classmethod
    def needs(cls) -> frozenset[Need]:
        """Return the abilities that an engine needs to run this policy."""
        wanted = {
            Need.TWO_STEPS: cls.two_step,
            Need.SINK: cls.wrapping.sink > 0,
            Need.PACKET: cls.wrapping.packet,
        }
        return frozenset(need for need, is_needed in wanted.items() if is_needed)


class Evidence(Enum):
    """The evidence that a dynamic policy chooses by, one number for each chunk token.

    ``DEVIATION``: the whole prompt runs through the layers before the policy's; the number is the squared distance
    there between the token's fresh and compiled key and value, summed over heads.
    ``ATTENTION``: the text after the last chunk runs up to the attention of the policy's layer, which must be the
    first; the number is the attention of its queries there to the token's compiled key at its place in the prompt
    (softmax over chunk tokens alone, summed over heads and queries).
    """

    DEVIATION = "deviation"
    ATTENTION = "attention"


class DynamicPolicy(Policy):
    """A policy that looks at the prompt's own keys, values or queries before it decides.

    How many tokens are recomputed is known beforehand, so pages can be reserved: ``select`` gives a selection of the
    right size and ``choose`` the one that counts. Its results are not kept for later turns.

    Class attributes:
        layer: the deciding layer.
        evidence: the kind of evidence that it looks at there.
    """

    prefix: ClassVar[bool] = False
    layer: ClassVar[int] = 1
    evidence: ClassVar[Evidence] = Evidence.DEVIATION

    @classmethod
    def needs(cls) -> frozenset[Need]:
        return super().needs() | {Need.DECISION}

    @abstractmethod
    def choose(self, found: Sequence[torch.Tensor]) -> list[Ranges]:
        """Return for each chunk the ranges to recompute.

        Args:
            found: the evidence, one ``[tokens]`` fp32 tensor per chunk, in prompt order.
        """
