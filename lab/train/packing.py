"""The rows the model runs over for one conversation, or for several that share their context, and what each row sees.

A head length k stands for a link that recomputes the first k tokens of every chunk: tokens beyond see only their own
chunk, as they did when the chunk was compiled alone. The first k tokens then exist twice: the recomputed copy, which
sees the whole prompt, and the compiled copy, which only its own chunk sees. A chunk may have been compiled behind
begin tokens that are dropped afterwards (LegoLink-0): its compiled copy sees those too, and nothing else does.

Questions about the same chunks are *branches* of one context: a branch's rows see the context's rows and their own,
and the positions of every branch go on from the context's end, so each is computed as if it were alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpic_lab.train.attention import BLOCK, AttentionBlock, make_block

Span = tuple[int, int]


@dataclass
class PackedRows:
    """Rows of one group; every array is [rows]."""

    # number of the example in the group whose token it is (the first one for the context)
    example: np.ndarray
    token: np.ndarray  # index of the token in that example
    position: np.ndarray  # rotary position
    order: np.ndarray  # a row sees no row with a higher order
    chunk: np.ndarray  # a compiled row's chunk, counted from 1 over the group; 0: computed in the prompt
    hidden: np.ndarray  # a compiled row that the prompt does not see, for its token is recomputed
    branch: np.ndarray  # 0: context

    def blocks(self, first: int) -> list[AttentionBlock]:
        """Returns blocks of attention; the group's rows are those from `first` on of the batch."""
        compiled = int((self.chunk > 0).sum())  # these come first
        out = []
        for start, end in ((0, compiled), (compiled, len(self.token))):
            count = math.ceil((end - start) / BLOCK)
            for cut in range(count):
                low = start + (end - start) * cut // count
                high = start + (end - start) * (cut + 1) // count
                out.append(make_block(self._visible(low, high), first + low, first))
        return out

    def _visible(self, low: int, high: int) -> np.ndarray:
        """Returns what rows [low, high) see, [high - low, keys from 0 on]."""
        rows = slice(low, high)
        keys = slice(0, high)  # rows see nothing that comes after them in this order
        earlier = self.order[None, keys] <= self.order[rows, None]
        if self.chunk[low]:
            return (self.chunk[None, keys] == self.chunk[rows, None]) & earlier
        branch = self.branch[None, keys]
        return ~self.hidden[None, keys] & earlier & ((branch == 0) | (branch == self.branch[rows, None]))


def pack_rows(
    lengths: list[int], chunks: list[list[Span]], shared: int, head: int | None, shift: bool, begins: int = 0
) -> PackedRows:
    """Returns the rows of examples of these lengths and chunks whose first `shared` tokens are one context.

    Without `shift`, chunk tokens keep the positions they were compiled at (what linking must not do). So many `begins`
    stand before each chunk while it is compiled; they are the example's first token.
    """
    compiled: list[tuple[int, int, int, int, int, int, int]] = []
    computed: list[tuple[int, int, int, int, int, int, int]] = []
    count = 0
    pieces = [(0, 0, shared, 0)] if shared else []
    pieces += [(i, shared, n, i + 1 if shared else 0) for i, n in enumerate(lengths)]
    for example, start, end, branch in pieces:
        reused = np.zeros(end - start, bool)
        for low, high in chunks[example]:
            if head is None or not start <= low < end or low + head >= high:
                continue
            count += 1
            for order in range(low - begins, high):
                position = order if shift else order - low + begins
                hidden = order < low + head
                compiled.append(
                    (example, order if order >= low else 0, position, order, count, hidden, branch)
                )
            reused[low + head - start : high - start] = True
        computed += [(example, t, t, t, 0, 0, branch) for t in range(start, end) if not reused[t - start]]
    columns = np.array(compiled + computed, np.int64).T
    return PackedRows(*columns[:5], columns[5].astype(bool), columns[6])
