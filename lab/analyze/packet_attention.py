"""The attention of a question to chunks and to packets (KV Packet, section 4.5.2, figure 5), over many prompts.

Chunks differ in length, so only the first and last tokens of each are counted: they stand next to the seams that the
adapter is meant to repair. The columns of a chunk are the header, the chunk's first tokens, its last tokens, and the
trailer; a chunk without an adapter leaves the outer ones empty, so that both are compared token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mpic.errors import UnsupportedParameter
from mpic.link import Policy
from mpic.prompt.segments import Prompt
from mpic_lab.analyze import measures
from mpic_lab.analyze.dense import DenseLink, DenseLinker
from mpic_lab.analyze.figures import titled

FIRST, LAST = 24, 8
"""First and last tokens of a chunk that are counted; a chunk has at least as many together."""


@dataclass
class PacketAttention:
    """Sums over prompts with one number of chunks.

    Attributes:
        sums: attention of a row of the question to each column, by policy, ``[chunks, columns]``: the mean over layers,
            heads and the rows behind the last chunk.
    """

    linker: DenseLinker
    policies: tuple[Policy, ...]
    chunks: int
    prompts: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def header(self) -> int:
        """Number of tokens of the header."""
        return len(self.linker.adapter.header) if self.linker.adapter else 0

    @property
    def columns(self) -> int:
        """Number of columns of a chunk."""
        return self.header + FIRST + LAST + (len(self.linker.adapter.trailer) if self.linker.adapter else 0)

    def add(self, prompt: Prompt) -> None:
        """Link a prompt under every policy and add what its question attends to.

        Raises:
            UnsupportedParameter: it has another number of chunks than the others, or one too short.
        """
        if len(prompt.chunks) != self.chunks:
            raise UnsupportedParameter(f"a sample has {len(prompt.chunks)} chunks and not {self.chunks}")
        for policy in self.policies:
            found = self._of(self.linker.link(prompt, policy), policy.wrapping.packet)
            self.sums[policy.name] = self.sums.get(policy.name, torch.zeros_like(found)) + found
        self.prompts += 1

    def _of(self, linked: DenseLink, packets: bool) -> torch.Tensor:
        paid = measures.received(linked).mean(0)
        out = torch.zeros(self.chunks, self.columns)
        soft = (self.header, self.columns - self.header - FIRST - LAST) if packets else (0, 0)
        for number, place in enumerate(linked.places):
            own = paid[place.start : place.start + place.length]
            if len(own) < FIRST + LAST + sum(soft):
                raise UnsupportedParameter(
                    f"a chunk has {len(own)} tokens; {FIRST + LAST} are needed without adapters"
                )
            front, back = soft[0] + FIRST, soft[1] + LAST
            low = self.header - soft[0]
            out[number, low : low + front] = own[:front]
            out[number, self.header + FIRST : self.header + FIRST + back] = own[len(own) - back :]
        return out

    def mean(self, policy: str) -> torch.Tensor:
        """Return the mean attention to each column, ``[chunks, columns]``."""
        return self.sums[policy] / self.prompts

    def numbers(self) -> dict[str, Any]:
        """Return, for each policy, the attention per token in parts of a chunk, as means over chunks."""
        front, back = self.header + FIRST, self.header + FIRST + LAST
        parts = {
            "header": slice(0, self.header),
            "first": slice(self.header, self.header + 1),
            "next": slice(self.header + 1, front),
            "last": slice(front, back),
            "trailer": slice(back, self.columns),
        }
        shown = {name: self.mean(name).mean(0) for name in self.sums}
        return {
            policy: {part: _mean(values[columns]) for part, columns in parts.items()}
            for policy, values in shown.items()
        }

    def draw(self, figure: Any) -> None:
        """Draw the attention to each column, a panel a policy; header and trailer stand out."""
        panels = figure.subplots(len(self.sums), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, policy in zip(panels, self.sums, strict=True):
            for number, values in enumerate(self.mean(policy)):
                start = number * (self.columns + 4)
                colours = ["C0"] * self.columns
                colours[: self.header] = ["C1"] * self.header
                colours[self.header + FIRST + LAST :] = ["C1"] * (self.columns - self.header - FIRST - LAST)
                axes.bar(start + torch.arange(self.columns), values, width=1.0, color=colours)
            axes.set(ylabel="attention", yscale="log")
            axes.set_title(policy, fontsize=9)
        middle = [number * (self.columns + 4) + self.columns / 2 for number in range(self.chunks)]
        panels[-1].set_xticks(middle, [f"chunk {number + 1}" for number in range(self.chunks)])
        titled(
            figure,
            f"What a row of the question attends to, mean of {self.prompts} prompts, all layers and heads",
            f"Of each chunk its first {FIRST} and last {LAST} tokens; header and trailer of packets in orange.",
        )


def _mean(values: torch.Tensor) -> float | None:
    return round(float(values.mean()), 6) if values.numel() else None
