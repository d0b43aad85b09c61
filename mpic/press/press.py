"""The base class of presses. A press scores a chunk's tokens, and those with the lowest scores are removed from its KV
once it is compiled.

A press removes the same share of tokens in every layer and head, but different tokens in each, so the remaining KV is
rectangular: ``m`` slots for ``n`` tokens. Keys keep the rotation of the positions that they were compiled at. The chunk
takes as many positions in a prompt as before, and queries are rotated by its single base, whichever tokens remain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mpic.errors import UnknownPress
from mpic.method import Method, percent, tokens

if TYPE_CHECKING:
    import torch

PROTECTED = 16
"""First tokens of a chunk that a press keeps unless its name says otherwise: as many as ``mpic-16`` recomputes."""


class LayerKV(NamedTuple):
    """A layer of a chunk of n tokens that has just been compiled.

    Args:
        layer: number of the layer.
        keys, values: ``[kv_heads, n, head_dim]`` fp32, keys rotated at chunk-local positions.
        unrotated: function that returns the keys as they were before their rotation.
        queries: ``[heads, w, head_dim]`` fp32, rotated, of the last w tokens (``Press.observed``).
        scale: scale of the layer's softmax.
    """

    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    unrotated: Callable[[], torch.Tensor]
    queries: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Press(Method):
    """Removes ``r`` percent of a chunk's tokens from its KV, but none of its first ``p`` or last ``l``.

    Policies compute the first tokens again in a prompt (``mpic-K``). Because every head keeps all of those, the part
    that a prompt maps after them is one range of slots in every head. The first and the last tokens of a packet are
    its header and trailer: ``p`` and ``l`` of their lengths keep both (Keep Filler of KV Packet, arXiv 2604.13226,
    section 4.4), and ``p`` = ``l`` = 0 allows any token to be removed (Normal). A subclass overrides ``score``, and
    ``observed`` if it ``needs_queries``.

    Class attributes:
        needs_positions: True if it undoes rotations, which works where positions have one axis (not M-RoPE).
        needs_queries: True if it looks at queries, which exist only while a chunk is compiled.
    """

    unknown = UnknownPress
    param = "mpic.press"
    needs_positions: ClassVar[bool] = False
    needs_queries: ClassVar[bool] = False
    r: int = percent(99)
    p: int = tokens(default=PROTECTED)
    l: int = tokens(default=0)

    @abstractmethod
    def score(self, kv: LayerKV) -> torch.Tensor:
        """Return scores ``[kv_heads, n]``; the tokens with the lowest are removed."""

    def observed(self, n: int, trailer: int) -> int:
        """Return the number of last tokens whose queries the press needs.

        Args:
            n: tokens of the chunk.
            trailer: number of last tokens that an adapter added.
        """
        return 0

    def slots(self, n: int) -> int:
        """Return how many of ``n`` tokens every layer and head keeps."""
        return max(n - n * self.r // 100, min(n, self.p + self.l))

    def kept(self, kv: LayerKV) -> torch.Tensor:
        """Return the tokens that each head keeps, ``[kv_heads, slots]`` ascending. Among equal scores the earlier
        token stays."""
        scores = self.score(kv).clone()
        n = scores.shape[-1]
        scores[:, : self.p] = float("inf")
        scores[:, max(0, n - self.l) :] = float("inf")
        order = scores.argsort(dim=-1, descending=True, stable=True)
        return order[:, : self.slots(n)].sort(-1).values

    @classmethod
    def parse(cls, text: str) -> Press | None:
        """See ``Method.parse``; a second number says how many first tokens are protected, a third one how many last
        ones."""
        forms = (f"{cls.syntax}{rest}" for rest in ("", "-P", "-P-L"))
        return next((found for form in forms if (found := cls._parse(form, text)) is not None), None)

    @property
    def name(self) -> str:
        """The canonical short string. It leaves out default numbers of protected tokens, because the name is part of a
        chunk's recipe and there are chunks from before these numbers existed."""
        if self.l:
            return self._filled(f"{self.syntax}-P-L")
        return self._filled(self.syntax if self.p == PROTECTED else f"{self.syntax}-P")
