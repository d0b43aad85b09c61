"""Lets the peers take turns, checks that all compute the same model, and keeps their measurements."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from mpic_lab.bench.harness import BenchFailed, Series, Ticker, rotated
from mpic_lab.bench.peers.cases import STOCK, turn_of
from mpic_lab.bench.peers.groups import PeerGroup
from mpic_lab.bench.peers.prompts import Peer, Questions
from mpic_lab.bench.peers.stock import Stock
from mpic_lab.bench.peers.weights import Weights

Samples = dict[tuple[str, str], Series]
"""Measurements by case and column."""
ROUNDING = {torch.float32: 0.03, torch.float16: 0.1, torch.bfloat16: 0.3}
"""How far below the best logit, in standard deviations of all logits, another token's logit may be so that rounding
explains a peer's choice of it. The best of 32,000 random logits is 4 deviations above the mean and 0.2 above the
next."""


@dataclass
class Measured:
    """The measurements of one model.

    Args:
        samples: by case and column.
        details: description of each peer, by its name.
        agreement: how many of the probes each peer answers with the token of transformers.
    """

    samples: Samples = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, str] = field(default_factory=dict)


def measure(weights: Weights, groups: Sequence[PeerGroup], ticker: Ticker) -> Measured:
    """Measure all peers of the groups, whose first one has transformers in it.

    With ``together`` every round lets each peer have a turn and begins with another one, and the first round is cold.
    Otherwise a group is started for its turn alone, asked a short prompt that does not count, and ended.

    Raises:
        BenchFailed: a peer computes another model, or a measurement is not what its case says.
    """
    settings, questions = weights.settings, Questions(weights.settings, weights.images)
    check, found = Check(weights, questions), Measured()
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    cold = int(settings.together)

    def turns(peers: Iterable[Peer], turn: int) -> None:
        for peer in peers:
            with ticker.step(peer.name):
                for case, value in turn_of(settings, peer, questions, turn).items():
                    values[case, peer.name].append(value)

    def checked(peers: Sequence[Peer]) -> None:
        found.agreement |= check.all(peers)
        found.details |= {peer.name: peer.detail for peer in peers}

    if settings.together:
        with _started(groups, weights, questions, ticker) as peers:
            checked(peers)
            ticker.expect((settings.repeats + 1) * len(peers))
            for turn in range(settings.repeats + 1):
                turns(rotated(peers, turn), turn)
    else:
        for turn in range(settings.repeats):
            for group in rotated(groups, turn):
                with _started([group], weights, questions, ticker) as peers:
                    ticker.expect(len(peers))
                    if turn == 0:
                        checked(peers)
                    for peer in peers:
                        peer.first(questions.fresh(settings.short))
                    turns(rotated(peers, turn), turn)
    found.samples = {key: Series(some[0], some[cold:]) for key, some in values.items()}
    return found


@contextmanager
def _started(
    groups: Sequence[PeerGroup], weights: Weights, questions: Questions, ticker: Ticker
) -> Iterator[list[Peer]]:
    peers: list[Peer] = []
    with ExitStack() as stack:
        for group in groups:
            ticker.say(f"starting {group.name}")
            peers += stack.enter_context(group.start(weights, questions))
        yield peers
    # the caller still refers to this list: a model in it would stay in memory beside the next group
    peers.clear()
    gc.collect()


class Check:
    """Compares the next tokens of peers after some prompts with the logits of transformers."""

    def __init__(self, weights: Weights, questions: Questions) -> None:
        self._allowed = ROUNDING[weights.placement.dtype]
        self._probes = [questions.probe() for _ in range(weights.settings.probes)]
        self._logits: list[torch.Tensor] = []

    def all(self, peers: Sequence[Peer]) -> dict[str, str]:
        """Return how often each peer's token is that of transformers, which must be among the first peers asked.

        Raises:
            BenchFailed: in more than a quarter of the prompts a peer's token differs by more than rounding explains.
        """
        for peer in peers:
            if isinstance(peer, Stock):
                self._logits = [peer.logits(probe) for probe in self._probes]
        return {peer.name: self._one(peer) for peer in peers}

    def _one(self, peer: Peer) -> str:
        tokens = [peer.next_token(probe) for probe in self._probes]
        same = sum(token == int(logits.argmax()) for token, logits in zip(tokens, self._logits, strict=True))
        near = sum(self._near(*pair) for pair in zip(tokens, self._logits, strict=True))
        total = len(tokens)
        if 4 * near < 3 * total:
            raise BenchFailed(
                f"{peer.name} generates another token than {STOCK} after {total - near} of {total} prompts: it does "
                "not compute the same model"
            )
        return f"{same} of {total}" + (f", {near} within rounding" if near > same else "")

    def _near(self, token: int, logits: torch.Tensor) -> bool:
        return bool(logits[token] >= logits.max() - self._allowed * logits.std())
