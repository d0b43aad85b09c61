"""The state that all routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from mpic.server.auth import KeyRates
from mpic.server.kept_responses import KeptResponses
from mpic.server.thread_pools import DiskProbe, ThreadPools

if TYPE_CHECKING:
    from mpic.config import Config
    from mpic.engine.base import Engine
    from mpic.keys import KeyStore
    from mpic.library import Library
    from mpic.prompt import ChatTemplate
    from mpic.retriever import Retriever
    from mpic.server.auto import Auto
    from mpic.server.metrics import Metrics
    from mpic.server.savings import SavingsLedger
    from mpic.server.uploads import PartedUploads, UploadsUnderWay


@dataclass(frozen=True)
class State:
    """The parts of a server.

    Args:
        started: Unix time of the start.
        probe: checks the library's disk.
        pools: threads for work that may take long.
        uploads: counts the bytes of uploads under way.
        auto: what the policy ``auto`` means for the engine's model.
        parted: uploads in parts.
        rates: counts the requests of keys.
        responses: responses that requests may go on from.
    """

    engine: Engine
    library: Library
    template: ChatTemplate
    config: Config
    started: int
    keys: KeyStore
    metrics: Metrics
    retriever: Retriever
    savings: SavingsLedger
    probe: DiskProbe
    uploads: UploadsUnderWay
    parted: PartedUploads
    auto: Auto
    pools: ThreadPools = field(default_factory=ThreadPools)
    rates: KeyRates = field(default_factory=KeyRates)
    responses: KeptResponses = field(default_factory=KeptResponses)


async def get_state(request: Request) -> State:
    """Return the state of the application. It is asynchronous because FastAPI runs other dependencies on a thread,
    for which every request would wait."""
    return request.app.state.mpic


StateDep = Annotated[State, Depends(get_state)]
