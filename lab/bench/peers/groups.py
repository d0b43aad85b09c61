"""The peers by what starts and ends together: MPIC and transformers in this process, and every server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass

from mpic_lab.bench.peers import llama_server, lmcache_server, openvino_genai, plain_vllm
from mpic_lab.bench.peers.cases import LINKS, PREFIX
from mpic_lab.bench.peers.native import Native
from mpic_lab.bench.peers.prompts import Peer, Questions
from mpic_lab.bench.peers.stock import Stock
from mpic_lab.bench.peers.weights import Weights
from mpic_lab.bench.workload import compile_all, engine_for

Start = Callable[[Weights, Questions], AbstractContextManager[list[Peer]]]


@dataclass(frozen=True)
class PeerGroup:
    """Peers that start and end together.

    Args:
        name: name shown while it starts, and in the list of peers that could not be measured.
        start: starts them; they end with the context.
        why_not: the reason why it cannot be measured here with these weights, or None.
    """

    name: str
    start: Start
    why_not: Callable[[Weights], str | None] = lambda weights: None


@contextmanager
def _in_process(weights: Weights, questions: Questions) -> Iterator[list[Peer]]:
    """Start MPIC's engine with every document compiled, and transformers."""
    model, settings = weights.model, weights.settings
    tower = settings.tower if weights.images else None
    # room for the compiled documents, and for a long prompt beside everything that later questions must find
    tokens = settings.kept_tokens + 2 * max(settings.length, settings.image_length)
    with engine_for(model, tokens) as engine:
        compile_all(engine, questions.documents)
        peers: list[Peer] = [Native(engine, name.removeprefix("MPIC ")) for name in (PREFIX, *LINKS)]
        yield [*peers, Stock(model.stock, settings.decoder, weights.placement, tower)]


def _server(made: Callable[[Weights], Peer]) -> Start:
    @contextmanager
    def start(weights: Weights, questions: Questions) -> Iterator[list[Peer]]:
        with closing(made(weights)) as peer:
            yield [peer]

    return start


def groups() -> list[PeerGroup]:
    """Return all of them, this process first: the others are compared with it."""
    servers = (
        (plain_vllm.VLLM, plain_vllm.why_not),
        (lmcache_server.LMCache, lmcache_server.why_not),
        (llama_server.LlamaServer, llama_server.why_not),
        (openvino_genai.GenAI, openvino_genai.why_not),
    )
    return [
        PeerGroup("MPIC and transformers", _in_process),
        *(PeerGroup(made.name, _server(made), why_not) for made, why_not in servers),
    ]
